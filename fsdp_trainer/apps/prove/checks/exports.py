"""Each form of export computes the same logits, under the names that other programs expect."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, compared, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.export_forms import (
    LENGTH,
    TEXTS,
    Original,
    adapter_misnamed,
    class_of,
    misnamed,
    quiet,
)
from fsdp_trainer.apps.prove.proof.promises import broken_promises
from fsdp_trainer.apps.prove.twins.twin_step import TwinData
from fsdp_trainer.apps.verify import peft_model
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.errors import UserError

LIMIT = 2e-5
"""Largest difference of logits in float32, as a share of the largest one."""
HALF_A_STEP = 1.01 / 127 / 2
"""Largest error of a number in 8 bits, as a share of the largest of its row."""
ADVICE = "do not serve this export; report it with the names above"
NAMES = "a server would leave such tensors out: do not serve this export, and report it"


def check(evidence: Evidence) -> Iterator[Checked | NotProved]:
    """Write the plain run's last checkpoint in each form, and read it by other programs."""
    evidence.say("exports, and reads the exports by other programs")
    checkpoint = evidence.plain.checkpoints[-1]
    original = Original.of(checkpoint, texts_of(evidence), evidence.scratch / "exports")
    forms: dict[str, Callable[[Original, bool], Iterator[Checked]]] = {"export": merged}
    if evidence.small.plain.adapter.name != "none":
        forms = {"merged": merged, "adapter": adapter}
    if evidence.config.predicts:
        forms |= {"gguf": gguf, "compressed": compressed}
    else:
        line = "fsdp-trainer verify RUN hf=RUN/hf"
        yield NotProved("scores or embeddings of the export by transformers", line)
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
            reason = error.problems[0].reason.splitlines()[0] if error.problems else error.title
            yield NotProved(f"{name}: {reason}", f"fsdp-trainer export RUN form={name} out=OUT")
        except Exception as error:  # whatever another program raises that cannot read an export
            reason = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
            yield counted_wrong(f"{name}: read by others", [reason], "", ADVICE)


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
    """Return the beginnings of a few documents; random tokens for a stream and for prompts."""
    if evidence.order is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(evidence.config.vocab_size, (LENGTH,), generator=generator)]
    return [one.tokens[:LENGTH] for one in TwinData(evidence).of_step(1)][:TEXTS]


def merged(original: Original, is_adapter: bool) -> Iterator[Checked]:
    name = "merged" if is_adapter else "export"
    folder = original.merged()
    model, wrong = misnamed(folder, class_of(original.config))
    right = "transformers misses no tensor and knows all of them"
    yield counted_wrong(f"{name}: names", wrong, right, NAMES)
    right = "config.json promises nothing that is not there"
    yield counted_wrong(f"{name}: promises", broken_promises(folder), right, NAMES)
    if original.config.predicts:
        detail = f"logits of {len(original.texts)} texts by transformers from the folder"
        yield compared(f"{name}: logits", original.difference(model), LIMIT, detail, ADVICE)


def adapter(original: Original, is_adapter: bool) -> Iterator[Checked]:
    folder = original.folder / "adapter"
    export_adapter(original.checkpoint, folder, "float32")
    model = peft_model(class_of(original.config), folder)
    wrong = adapter_misnamed(folder, model.get_base_model())
    modules = {name.replace(".base_layer", "") for name, _ in model.named_modules()}
    wrong = [text for text in wrong if text.split()[0] not in modules]
    right = "each tensor names a module of the base, as PEFT and vLLM look for it"
    yield counted_wrong("adapter: names", wrong, right, NAMES)
    if original.config.predicts:
        detail = "logits by PEFT from the adapter on its base, and of the run"
        yield compared("adapter: logits", original.difference(model), LIMIT, detail, ADVICE)


def gguf(original: Original, is_adapter: bool) -> Iterator[Checked]:
    """Compare a GGUF file in float32, read back."""
    from fsdp_trainer.interop.weights.gguf_file import write_gguf

    file = original.folder / "gguf" / "model.gguf"
    file.parent.mkdir()
    write_gguf(original.merged(), file, "f32")
    model = read_model(file)
    detail = "logits of the GGUF file in float32, read back, and of the run"
    yield compared("gguf: logits", original.difference(model.logits), LIMIT, detail, ADVICE)


def compressed(original: Original, is_adapter: bool) -> Iterator[Checked]:
    """Compare each number of an export in 8 bits, as vLLM decodes it: an integer and its scale."""
    from fsdp_trainer.checkpoint.exports.compressed_export import write_compressed

    folder = original.folder / "compressed"
    folder.mkdir()
    write_compressed(original.merged(), folder, "int8", None)
    stored, exact = stored_in(folder), stored_in(original.merged())
    worst, where = 0.0, ""
    for name, tensor in exact.items():
        decoded = stored.get(name, torch.empty(0))
        if (scale := stored.get(f"{name}_scale")) is not None:
            decoded = decoded.float() * scale.float()
        error = row_error(decoded, tensor)
        if error > worst:
            worst, where = error, name
    detail = f"numbers in 8 bits, of a row's largest one; largest in {where}"
    yield compared("compressed: numbers", worst, HALF_A_STEP, detail, ADVICE)
    right = "config.json keeps its promises"
    yield counted_wrong("compressed: promises", broken_promises(folder), right, NAMES)


def stored_in(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def row_error(decoded: Tensor, exact: Tensor) -> float:
    if decoded.shape != exact.shape:
        return float("inf")
    error = (decoded.float() - exact.float()).abs()
    if not exact.ndim:
        return float(error)
    largest = exact.float().abs().amax(-1, keepdim=True).clamp_min(1e-20)
    return float((error / largest).max()) if error.numel() else 0.0
