"""A folder computes the same logits here and in the programs that others load it with."""

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, compared, counted_wrong
from fsdp_trainer.apps.prove.proof.export_forms import adapter_misnamed, class_of, misnamed, quiet
from fsdp_trainer.apps.verify import peft_model
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.errors import UserError

LOGITS = "logits"
LIMIT = 1e-4
"""Largest difference of logits in float32, as a share of the largest one, at any depth."""
ADVICE = "programs disagree on this folder: compare config.json with the published one's"
NAMES = "a server would leave such tensors out: do not serve this folder"


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    other = "PEFT" if proof.is_adapter else "transformers"
    try:
        reason = why_not_here(proof)
        ours = None if reason else logits_of(proof)
    except UserError as error:
        reason, ours = reasons(error)[0], None
    if reason:
        yield NotProved(f"{LOGITS}: {reason}", proof.command)
        return
    proof.say(f"loads the folder by {other}")
    try:
        with quiet():
            model, wrong = loaded(proof)
    except UserError as error:
        yield NotProved(f"loads: {other}: {reasons(error)[0]}", proof.command)
        return
    except Exception as error:  # whatever another program raises that cannot read a folder
        said = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
        if proof.content.get("quantization_config"):  # kernels for it may need a GPU
            yield NotProved(f"loads: {other}: {said}", proof.command)
        else:
            yield counted_wrong(f"loads: {other}", [said], "", ADVICE)
        return
    right = f"{other} misses no tensor and knows all of them"
    yield counted_wrong(f"loads: {other}", wrong, right, NAMES)
    if ours is None:
        yield NotProved("scores or embeddings of the folder", f"fsdp-trainer chat {proof.source}")
    else:
        with torch.no_grad():
            theirs = model(tokens_of(proof)).logits.float()
        what = "the adapter on its base by PEFT, and merged here" if proof.is_adapter else other
        detail = f"{ours.shape[0] * ours.shape[1]} tokens: this program and {what}"
        yield compared(LOGITS, share(theirs, ours), LIMIT, detail, ADVICE)


def why_not_here(proof: ProvedFolder) -> str:
    """Return why the models cannot be loaded here, "" if they can. Raises UserError."""
    for package in ("transformers", *(("peft",) * proof.is_adapter)):
        if not importlib.util.find_spec(package):
            return f"{package} is not installed: pip install {package}"
    if proof.is_compressed:
        return "matrices in few bits, which vLLM computes"
    if not proof.is_adapter and not proof.is_safetensors:
        return "another tool's files, which transformers does not read"
    return proof.lacking_memory


def logits_of(proof: ProvedFolder) -> Tensor | None:
    """Return what this program computes; None for a model of scores or embeddings."""
    model = read_model(proof.based, is_checked=True)
    if not model.config.predicts:
        return None
    with torch.no_grad():
        logits = model.logits(tokens_of(proof)).float()
    del model
    gc.collect()
    return logits


def tokens_of(proof: ProvedFolder) -> Tensor:
    placeholder = proof.content.get("image_token_id", proof.content.get("image_token_index"))
    tokens = proof.tokens
    return torch.where(tokens == placeholder, 0, tokens) if type(placeholder) is int else tokens


def loaded(proof: ProvedFolder) -> tuple[Any, list[str]]:
    """Return another program's model, and what it does not find or know. Raises what it raises."""
    auto = class_of(proof.config)
    if not proof.is_adapter:
        return misnamed(proof.source, auto)
    model = peft_model(auto, proof.based)
    wrong = adapter_misnamed(proof.based, model.get_base_model())
    modules = {name.replace(".base_layer", "") for name, _ in model.named_modules()}
    return model, [text for text in wrong if text.split()[0] not in modules]


def share(given: Tensor, expected: Tensor) -> float:
    if given.shape != expected.shape:
        return float("inf")
    return float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-20))
