"""A folder beside the model that it was made from: which tensors differ, and whether they may."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.folders.compressed_numbers import largest_error
from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, compared, counted_wrong
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, read_whole, row_ranges
from fsdp_trainer.checkpoint.frozen_weights import (
    base_folder,
    model_config,
    read_base,
    unmerged_weights,
    weights_on_disk,
)
from fsdp_trainer.config.paths import find_checkpoint, is_adapter
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig

CONFIG, MATRICES, DIFFER = "reference: config.json", "reference: matrices", "reference: changes"
MERGED, OTHERS = "merged: share of the adapter", "merged: other tensors"
MAY_DIFFER = {
    *("vocab_size", "tie_word_embeddings", "torch_dtype", "max_position_embeddings"),
    *("labels", "problem", "pooling", "mtp_heads", "logit_factor"),
}
"""What a training may change in an architecture: its vocabulary, its head."""
ROUNDED, HALF_STEPS = "reference: numbers in few bits", 1.01
NOT_ROUNDED = "its scales or its codes are of other weights: compress the reference anew"
LIKENESS = 0.2
"""Least cosine of a matrix and the reference's. Trainings change it by little; of matrices that
have nothing to do with each other it is nearly 0."""
SHARE_LIMIT = 0.03
"""Largest error of the adapter's part in a merged matrix, as a share of it."""
OTHER_CONFIG = "write the reference's values into config.json, such as those of RoPE"
UNLIKE = "these are transposed, moved, or of another model: export the folder anew"
WRONG_SHARE = (
    "merge it anew, in float32 and once, with the adapter's own alpha, rank and rsLoRA: in 16 bits"
    " a small adapter is lost to rounding"
)
NOT_NAMED = "the adapter does not name them: merge into the base that it was trained on"


@dataclass
class Likeness:
    """Sums over two tensors' numbers, and over their difference. same: all numbers are equal."""

    same: bool = True
    product: float = 0.0
    own: float = 0.0
    theirs: float = 0.0

    @property
    def is_unlike(self) -> bool:
        size = (self.own * self.theirs) ** 0.5
        return not self.same and self.product < LIKENESS * size


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Compare configuration and tensors of a whole model with the reference's."""
    if proof.is_adapter or not proof.reference:
        return
    try:
        config, known = proof.config, model_config(proof.reference)
        wrong = differing_keys(config, known)
        right = "the same architecture, with the same positions"
        yield counted_wrong(CONFIG, wrong, right, OTHER_CONFIG)
        own = proof.weights
        theirs = weights_on_disk(known, proof.reference)
    except UserError as error:
        yield NotProved(f"beside the reference: {reasons(error)[0]}", proof.command)
        return
    proof.say("compares each tensor with the reference's")
    both = [name for name in theirs if name in own]
    likeness = {name: like(own[name], theirs[name]) for name in both}
    matrices = [name for name in both if len(own[name].shape) > 1]
    unlike = [name for name in matrices if likeness[name].is_unlike]
    right = f"each of {len(matrices)} is like the reference's"
    yield counted_wrong(MATRICES, unlike, right, UNLIKE)
    if proof.is_compressed:
        yield from rounded(proof)
        return
    if adapted := before_merging(known, proof.reference):
        yield from merges(own, theirs, adapted)
        return
    changed = [name for name in both if not likeness[name].same]
    kinds = Counter(kind_of(name) for name in changed)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    yield counted_wrong(
        DIFFER, [], f"{len(changed)} of {len(both)} tensors differ{': ' * bool(shown)}{shown}", ""
    )


def differing_keys(own: ModelConfig, theirs: ModelConfig) -> list[str]:
    ours, known = own.decisive, theirs.decisive
    names = [name for name in {**known, **ours} if name not in MAY_DIFFER]
    names = [name for name in names if "token_id" not in name]
    values = [(name, ours.get(name), known.get(name)) for name in names]
    return [f"{n} is {a}, the reference's {b}" for n, a, b in values if not is_same(a, b)]


def is_same(own: Any, theirs: Any) -> bool:
    """Return True for equal values; fractions may be rounded to float32, as in GGUF files."""
    if isinstance(own, float) and isinstance(theirs, float):
        return math.isclose(own, theirs, rel_tol=1e-6)
    return bool(own == theirs)


def kind_of(name: str) -> str:
    """Return the last part of a parameter's name that says which it is."""
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    return next((part for part in reversed(parts) if not part.isdigit()), name)


def like(own: TensorOnDisk, theirs: TensorOnDisk) -> Likeness:
    """Return how two tensors are alike, in the rows that both have; they are read in pieces."""
    sums = Likeness()
    if own.shape[1:] != theirs.shape[1:]:
        return Likeness(same=False, own=1.0, theirs=1.0)
    dtype = min(own.dtype, theirs.dtype, key=lambda one: one.itemsize)
    for a, b in pieces(own, theirs):
        sums.same &= bool(torch.equal(a.to(dtype), b.to(dtype)))
        a, b = a.float(), b.float()
        sums.product += float((a * b).sum())
        sums.own += float(a.square().sum())
        sums.theirs += float(b.square().sum())
    return sums


def pieces(*tensors: TensorOnDisk) -> Iterator[list[Tensor]]:
    """Yield some rows after others of tensors, of the rows that all have."""
    rows = min(one.shape[0] if one.shape else 0 for one in tensors)
    for first, last in row_ranges(0, rows, 8 * max(one.row_bytes for one in tensors)):
        yield [read_whole(one, first, last) for one in tensors]


# --- matrices in few bits -------------------------------------------------------------------------


def rounded(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Compare each decoded number with the reference's."""
    assert proof.reference
    own, theirs = proof.weights, weights_on_disk(model_config(proof.reference), proof.reference)
    if methods := calibrations(proof.source):
        name = f"{ROUNDED}: chosen by {methods}, not rounded to the nearest"
        yield NotProved(name, f"fsdp-trainer evaluate {proof.source} …")
        return
    is_float, worst, where = proof.has_float8, 0.0, ""
    for name, steps in proof.steps.items():
        error = in_half_steps(own[name], theirs[name], steps, is_float) if name in theirs else 0.0
        if not error <= worst:
            worst, where = error, f"; largest in {name}"
    detail = f"errors, in half steps of their scales: 1 is rounding to the nearest code{where}"
    yield compared(ROUNDED, worst, HALF_STEPS, detail, NOT_ROUNDED)


def calibrations(folder: Path) -> str:
    """Return the methods by which llm-compressor has chosen codes from data; "" for rounding."""
    file = folder / "recipe.yaml"
    named = re.findall(r"\b(\w+)Modifier\b", file.read_text("utf-8")) if file.is_file() else []
    return ", ".join(dict.fromkeys(name for name in named if name != "Quantization"))


def in_half_steps(
    own: TensorOnDisk, theirs: TensorOnDisk, steps: TensorOnDisk, is_float: bool
) -> float:
    """Return the largest error, as a multiple of the largest that rounding to a code makes.

    Weights, quotients by scales and products with them are rounded too, to the scales' format.
    """
    if own.shape != theirs.shape:
        return math.inf
    worst, eps = 0.0, torch.finfo(own.dtype).eps
    for piece in pieces(own, theirs, steps):
        a, b, step = (numbers.float() for numbers in piece)
        limit = largest_error(b, step, is_float) + 1.5 * b.abs() * eps
        worst = max(worst, float(((a - b).abs() / limit.clamp_min(1e-30)).max()))
    return worst


# --- an adapter merged into its base --------------------------------------------------------------


def before_merging(config: ModelConfig, reference: Path) -> dict[str, TensorOnDisk]:
    checkpoint = find_checkpoint(reference)
    if checkpoint and read_base(checkpoint).adapters:
        return unmerged_weights(config, checkpoint)
    return weights_on_disk(config, base_folder(reference)) if is_adapter(reference) else {}


def merges(own: Any, merged: Any, base: Any) -> Iterator[Checked]:
    """Compare a merged model with base and adapter. All: tensors by parameter."""
    worst, where, named = 0.0, "", []
    for name in (name for name in merged if name in own and name in base):
        if merged[name] is base[name] or like(merged[name], base[name]).same:
            if not like(own[name], base[name]).same:
                named.append(name)
            continue
        error = lost_share(own[name], merged[name], base[name])
        if not error <= worst:
            worst, where = error, f"; largest in {name}"
    detail = f"the change of each matrix, and what the adapter makes of the base{where}"
    yield compared(MERGED, worst, SHARE_LIMIT, detail, WRONG_SHARE)
    right = "what the adapter does not name is the base's"
    yield counted_wrong(OTHERS, named, right, NOT_NAMED)


def lost_share(own: TensorOnDisk, merged: TensorOnDisk, base: TensorOnDisk) -> float:
    """Return by how much the change of a matrix is too small or too large, as a share of it.

    Rounding to the stored format is not counted: it has no direction, a wrong scale has.
    """
    along = size = 0.0
    for piece in pieces(own, merged, base):
        a, b, start = (numbers.double() for numbers in piece)
        along += float(((a - start) * (b - start)).sum())
        size += float((b - start).square().sum())
    return abs(along / size - 1) if size else 0.0
