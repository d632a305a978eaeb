"""Each form of export computes the same logits, under the names that other programs expect."""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.folders import needed_tensors, same_logits
from fsdp_trainer.apps.prove.folders.beside_reference import rounded
from fsdp_trainer.apps.prove.folders.head_numbers import numbers_elsewhere, numbers_here
from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import (
    Checked,
    Findings,
    NotProved,
    compared,
    counted_wrong,
    raised,
)
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.export_forms import (
    LENGTH,
    TEXTS,
    Original,
    misnamed,
    peft_with_misnamed,
    quiet,
    share,
)
from fsdp_trainer.apps.prove.proof.promises import broken_promises
from fsdp_trainer.apps.prove.twins.twin_step import TwinData
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.errors import UserError

LIMIT = 2e-5
"""Largest difference of logits in float32, as a share of the largest one."""
ADVICE = "do not serve this export; report it with the names above"
NAMES = "a server would leave such tensors out: do not serve this export, and report it"


def check(evidence: Evidence) -> Iterator[Checked | NotProved]:
    """Write the plain run's last checkpoint in each form, and read it by other programs."""
    evidence.say("exports, and reads the exports by other programs")
    checkpoint = evidence.plain.checkpoints[-1]
    original = Original.of(checkpoint, texts_of(evidence), evidence.scratch / "exports")
    forms: dict[str, Callable[[Original, bool], Findings]] = {"export": merged}
    if evidence.small.plain.adapter.name != "none":
        forms = {"merged": merged, "adapter": adapter}
    if evidence.config.predicts:
        forms |= {"gguf": gguf, "compressed": compressed}
    for name, form in forms.items():
        lacking = lacking_package(name)
        if lacking:
            extra, package = lacking
            yield NotProved(f"{name}: {package} is not installed", install(extra, evidence))
            continue
        try:
            with quiet():
                results = [*form(original, evidence.small.plain.adapter.name != "none")]
            yield from results
        except UserError as error:
            command = f"fsdp-trainer export RUN form={name} out=OUT"
            yield NotProved(f"{name}: {reasons(error)[0]}", command)
        except Exception as error:  # whatever another program raises that cannot read an export
            yield counted_wrong(f"{name}: read by others", [raised(error)], "", ADVICE)


PACKAGES = {
    "export": [("hf", "transformers")],
    "merged": [("hf", "transformers")],
    "adapter": [("hf", "transformers"), ("peft", "peft")],
    "gguf": [("gguf", "gguf")],
    "compressed": [("compressed", "compressed_tensors")],
}
"""The extra and the package that reading a form needs."""


def lacking_package(form: str) -> tuple[str, str] | None:
    needed = PACKAGES[form]
    return next((pair for pair in needed if not importlib.util.find_spec(pair[1])), None)


def install(extra: str, evidence: Evidence) -> str:
    what = extra if extra == "peft" else f"'fsdp_trainer[{extra}]'"
    return f"pip install {what} ; {evidence.command('')}"


def texts_of(evidence: Evidence) -> list[Tensor]:
    """Return the beginnings of a few documents; random tokens for prompts."""
    if evidence.small.plain.objective.method.samples:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(evidence.config.vocab_size, (LENGTH,), generator=generator)]
    return [one.tokens[:LENGTH] for one in TwinData(evidence).of_step(1)][:TEXTS]


def merged(original: Original, is_adapter: bool) -> Iterator[Checked]:
    name = "merged" if is_adapter else "export"
    folder = original.merged()
    model, wrong = misnamed(folder, original.config)
    right = "transformers misses no tensor and knows all of them"
    yield counted_wrong(f"{name}: names", wrong, right, NAMES)
    right = "config.json promises nothing that is not there"
    yield counted_wrong(f"{name}: promises", broken_promises(folder), right, NAMES)
    detail = "logits by transformers from the folder, and of the run"
    yield compared(f"{name}: logits", difference(original, model), LIMIT, detail, ADVICE)


def adapter(original: Original, is_adapter: bool) -> Iterator[Checked]:
    folder = original.folder / "adapter"
    export_adapter(original.checkpoint, folder, "float32")
    model, wrong = peft_with_misnamed(folder, original.config)
    right = "each tensor names a module of the base, as PEFT and vLLM look for it"
    yield counted_wrong("adapter: names", wrong, right, NAMES)
    detail = "logits by PEFT from the adapter on its base, and of the run"
    yield compared("adapter: logits", difference(original, model), LIMIT, detail, ADVICE)


def difference(original: Original, other: Any) -> float:
    """Return the largest difference of another program's logits, or numbers of its head."""
    if original.config.predicts:
        return original.difference(other)
    folder = original.merged()
    theirs = numbers_elsewhere(other, folder, original.config)
    return share(theirs, numbers_here(original.model, folder))


def gguf(original: Original, is_adapter: bool) -> Iterator[Checked]:
    """Compare a GGUF file in float32, read back."""
    from fsdp_trainer.interop.weights.gguf_file import write_gguf

    file = original.folder / "gguf" / "model.gguf"
    file.parent.mkdir()
    write_gguf(original.merged(), file, "f32")
    model = read_model(file)
    detail = "logits of the GGUF file in float32, read back, and of the run"
    yield compared("gguf: logits", original.difference(model.logits), LIMIT, detail, ADVICE)


def compressed(original: Original, is_adapter: bool) -> Iterator[Checked | NotProved]:
    """Compare an export in 8 bits as any folder in few bits."""
    from fsdp_trainer.checkpoint.exports.compressed_export import write_compressed

    folder, whole = original.folder / "compressed", original.merged()
    folder.mkdir()
    write_compressed(whole, folder, "int8", None)
    words = ["source=COMPRESSED", "reference=RUN"]
    with tempfile.TemporaryDirectory() as scratch:
        proof = ProvedFolder(folder, whole, words, Path(scratch), lambda line: None)
        for check in (needed_tensors.check, rounded, same_logits.check):
            for one in check(proof):
                yield replace(one, name=f"compressed: {one.name}")
    right = "config.json keeps its promises"
    yield counted_wrong("compressed: promises", broken_promises(folder), right, NAMES)
