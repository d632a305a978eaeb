"""A folder computes the same logits here and in the programs that others load it with."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.folders.compressed_numbers import largest_error
from fsdp_trainer.apps.prove.folders.head_numbers import numbers_elsewhere, numbers_here
from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import (
    Checked,
    NotProved,
    compared,
    counted_wrong,
    raised,
)
from fsdp_trainer.apps.prove.proof.export_forms import (
    misnamed,
    peft_with_misnamed,
    quiet,
    share,
)
from fsdp_trainer.apps.prove.proof.trajectories import AMPLIFIED
from fsdp_trainer.checkpoint.formats.tensor_files import read_whole
from fsdp_trainer.checkpoint.huggingface import read_parameters
from fsdp_trainer.checkpoint.load import empty_model, read_model
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import Decoder

LOGITS = "logits"
LIMIT = 1e-4
"""Largest difference of logits in float32, as a share of the largest one, at any depth."""
ADVICE = "programs disagree on this folder: compare config.json with the published one's"
OF_HEAD = "fsdp-trainer prove model.init_from={} objective.mtp=0.1 data.path=…"
NAMES = "a server would leave such tensors out: do not serve this folder"


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Load the folder here and elsewhere, one model after the other."""
    ours, limit = None, LIMIT
    try:
        if reason := why_not_here(proof):
            yield NotProved(f"{LOGITS}: {reason}", proof.command)
            return
        ours, limit = numbers_and_limit(proof)
        if proof.is_compressed and proof.reference:
            yield beside_rounded(proof, ours)
    except UserError as error:  # others may read it
        yield NotProved(f"{LOGITS}: {reasons(error)[0]}", proof.command)
    other = "PEFT" if proof.is_adapter else "transformers"
    proof.say(f"loads the folder by {other}")
    try:
        with quiet():
            theirs, wrong = numbers_by_others(proof)
    except UserError as error:
        yield NotProved(f"loads: {other}: {reasons(error)[0]}", proof.command)
    except Exception as error:  # whatever another program raises that cannot read a folder
        yield not_loaded(proof, f"loads: {other}", error)
    else:
        right = f"{other} misses no tensor and knows all of them"
        yield counted_wrong(f"loads: {other}", wrong, right, NAMES)
        if ours is not None:
            yield beside_others(proof, ours, theirs, limit)
        if proof.config.mtp_heads:
            yield NotProved(f"{LOGITS} of the MTP head", OF_HEAD.format(proof.source))


def not_loaded(proof: ProvedFolder, name: str, error: Exception) -> Checked | NotProved:
    """Return the result for a folder that another program does not load."""
    if proof.quantization:  # kernels for it may need a GPU
        return NotProved(f"{name}: {raised(error)}", proof.command)
    return counted_wrong(name, [raised(error)], "", ADVICE)


def beside_others(proof: ProvedFolder, ours: Tensor, theirs: Tensor, limit: float) -> Checked:
    """Compare what this program computes with what another one does."""
    what = "PEFT, and the adapter merged here" if proof.is_adapter else "transformers and here"
    counted = "tokens" if proof.config.predicts or proof.config.tags else "texts"
    detail = f"{ours[..., 0].numel()} {counted}: {what}"
    return compared(LOGITS, share(theirs, ours, proof.is_compressed), limit, detail, ADVICE)


def why_not_here(proof: ProvedFolder) -> str:
    """Return why the models cannot be loaded here, "" if they can. Raises UserError."""
    for package in ("transformers", *(("peft",) * proof.is_adapter)):
        if not importlib.util.find_spec(package):
            return f"{package} is not installed: pip install {package}"
    if not proof.is_adapter and not proof.is_safetensors:
        return "another tool's files, which transformers does not read"
    return proof.why_not_decoded or proof.lacking_memory


# --- this program ---------------------------------------------------------------------------------


@torch.no_grad()
def numbers_and_limit(proof: ProvedFolder) -> tuple[Tensor, float]:
    """Return what this program computes, and how far another may be from it.

    Programs round products of codes and scales differently, if the scales are in 16 bits.
    """
    model, limit = empty_model(proof.config), LIMIT
    read_parameters(model, proof.weights)
    numbers = numbers_of(proof, model)
    if proof.is_compressed:
        eps = torch.finfo(next(w.dtype for n, w in proof.weights.items() if n in proof.steps)).eps
        moved = by_chance(proof, model, lambda weight, steps: weight.abs() * (steps > 0) * eps)
        limit = max(limit, AMPLIFIED * share(moved, numbers, True))
    return numbers, limit


def numbers_of(proof: ProvedFolder, model: Decoder) -> Tensor:
    """Return logits of random tokens; of a head that predicts none what it gives texts."""
    if model.config.predicts:
        return model.logits(tokens_of(proof)).float()
    return numbers_here(model, tokenizer_folder(proof.based))


@torch.no_grad()
def beside_rounded(proof: ProvedFolder, ours: Tensor) -> Checked:
    """Compare with the reference, as far as rounding of other numbers in few bits moves it."""
    assert proof.reference
    proof.say("compares with the reference, and with it rounded by chance")
    model = read_model(proof.reference, is_checked=True)
    exact = numbers_of(proof, model)
    moved = by_chance(
        proof, model, lambda weight, steps: largest_error(weight, steps, proof.has_float8)
    )
    limit = AMPLIFIED * share(moved, exact, True)
    detail = f"of the middle token; rounding by chance moves it by 1/{AMPLIFIED:g} of the limit"
    return compared(f"reference: {LOGITS}", share(ours, exact, True), limit, detail, ADVICE)


def by_chance(
    proof: ProvedFolder, model: Decoder, largest: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return what a model computes whose matrices are changed, by at most `largest` of each."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_weights().items():
        if (steps := proof.steps.get(name)) and steps.shape == weight.shape:
            most = largest(weight, read_whole(steps, 0, len(weight)))
            weight += (2 * torch.rand(weight.shape, generator=generator) - 1) * most
    return numbers_of(proof, model)


def tokens_of(proof: ProvedFolder) -> Tensor:
    placeholder = proof.content.get("image_token_id", proof.content.get("image_token_index"))
    tokens = proof.tokens
    return torch.where(tokens == placeholder, 0, tokens) if type(placeholder) is int else tokens


# --- other programs -------------------------------------------------------------------------------


def numbers_by_others(proof: ProvedFolder) -> tuple[Tensor, list[str]]:
    """Return what another program computes, and what it does not find or know.

    Raises what it raises.
    """
    model, wrong = loaded(proof)
    if not proof.config.predicts:
        return numbers_elsewhere(model, tokenizer_folder(proof.based), proof.config), wrong
    with torch.no_grad():
        return model(tokens_of(proof)).logits.float(), wrong


def loaded(proof: ProvedFolder) -> tuple[Any, list[str]]:
    """Return another program's model, and what it does not find or know. Raises what it raises."""
    if proof.is_compressed:
        # imports transformers
        from transformers import CompressedTensorsConfig

        decoded = CompressedTensorsConfig(dequantize=True)
        return misnamed(proof.source, proof.config, quantization_config=decoded)
    if not proof.is_adapter:
        return misnamed(proof.source, proof.config)
    return peft_with_misnamed(proof.based, proof.config)
