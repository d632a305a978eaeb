"""DeepSpeed's ZeRO checkpoints: float32 weights in flat parts, one file for each rank.

In stages 1 and 2 the parameters of a group follow each other in the joined parts of all ranks; in
stage 3 each parameter is divided by itself, and every rank's part has its share of each.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.checkpoint.formats.tensor_files import (
    Chunk,
    TensorOnDisk,
    as_tensor,
    dtype_name,
    read,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import ZERO_MODEL, ZERO_STATES, zero_folder
from fsdp_trainer.interop.weights.foreign_states import (
    MOMENTS,
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.interop.weights.foreign_tensors import ForeignTensor
from fsdp_trainer.interop.weights.torch_archive import TorchArchive
from fsdp_trainer.interop.weights.translated_names import huggingface_names
from fsdp_trainer.models.config import ModelConfig

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_")
STAGE_3, STAGE_1_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"
"""Keys of the flat parts. DeepSpeed's own classes beside them are not unpickled."""
CLASSES = ("deepspeed.",)
ALIGNMENT = 2
"""DeepSpeed fills up a group of stages 1 and 2 to a multiple of this many numbers a rank."""
WRONG_FORM = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What is raised when a file's content has another form than DeepSpeed gives it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive numbers of a tensor. first: index of the first one in the tensor."""

    first: int
    count: int
    file: Path
    offset: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass
class FlatTensor(TensorOnDisk):
    """A tensor in consecutive segments, which may begin and end within a row."""

    segments: list[Segment]

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        row = math.prod(self.shape[1:])
        begin, end = first * row, last * row
        flat = as_tensor(buffer, self.dtype, (end - begin,))
        for segment in self.segments:
            low = max(begin, segment.first)
            high = min(end, segment.end)
            if low < high:
                offset = segment.offset + (low - segment.first) * self.dtype.itemsize
                read(segment.file, offset, flat[low - begin : high - begin])
        return flat.view(last - first, *self.shape[1:])


@dataclass(frozen=True)
class Partitions:
    """The opened files of all ranks in a checkpoint.

    shapes: of each group, the shapes of the parameters by name. frozen: those of the parameters
    that were not trained. ranks: each rank's file, and the optimizer in it.
    """

    shapes: list[dict[str, torch.Size]]
    frozen: dict[str, torch.Size]
    ranks: list[tuple[TorchArchive, dict[str, Any]]]

    def tensors(self, flats: Callable[[dict[str, Any]], list[Tensor]]) -> dict[str, TensorOnDisk]:
        """Return the parameters by name. flats: returns the flat part of each group of a rank.

        Raises UserError, and WRONG_FORM.
        """
        parts = [(archive, flats(state)) for archive, state in self.ranks]
        if STAGE_3 in self.ranks[0][1]:
            return _divided_each(parts, {n: s for group in self.shapes for n, s in group.items()})
        return _joined(parts, self.shapes, self.ranks[-1][1].get("param_alignment_paddings"))


def zero_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the weights of a ZeRO checkpoint by Hugging Face's names. Raises UserError."""
    checkpoint = zero_folder(folder)
    assert checkpoint is not None

    def weights(state: dict[str, Any]) -> list[Tensor]:
        return state[STAGE_3] if STAGE_3 in state else state[STAGE_1_2]

    with _of_its_form(checkpoint):
        partitions = opened(checkpoint)
        tensors = partitions.tensors(weights)
        if partitions.frozen:
            tensors |= _frozen(checkpoint, partitions.frozen)
    return huggingface_names(tensors, config)


@contextmanager
def _of_its_form(checkpoint: Path) -> Iterator[None]:
    """Raise UserError in place of WRONG_FORM."""
    try:
        yield
    except WRONG_FORM as error:
        reason = f"is no checkpoint of ZeRO, or not the whole of it: {_said(error)}"
        raise UserError("cannot read the weights", str(checkpoint), reason) from None


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"


def _frozen(checkpoint: Path, shapes: dict[str, torch.Size]) -> dict[str, TensorOnDisk]:
    """Return the parameters that were not trained; in stage 3 each rank's file has a part of each.

    They are in the number format of the forward pass, and the last parts are filled up.
    """
    files = sorted(checkpoint.glob(ZERO_MODEL), key=rank_of)
    archives = [_opened(file) for file in files]
    parts = [(archive, archive.content["frozen_param_fragments"]) for archive in archives]
    tensors: dict[str, TensorOnDisk] = {}
    for name, shape in shapes.items():
        whole = _consecutive([(each, own[name]) for each, own in parts])
        _require_used(whole, shape.numel(), len(parts))
        tensors[name] = _flat(name, shape, _cut(whole, 0, shape.numel()))
    return tensors


def zero_states(checkpoint: Path) -> StatesByName:
    with _of_its_form(checkpoint):
        partitions = opened(checkpoint)
    archive, first = partitions.ranks[0]
    try:
        own = _own_optimizer(first)
        steps = archive.number(STEP, own["state"][0][STEP])
        tensors = {moment: partitions.tensors(partial(_moments, moment)) for moment in MOMENTS}
        options = known_options(own.get("param_groups"))
    except WRONG_FORM as error:
        raise unusable_states(checkpoint, f"holds no states of AdamW ({_said(error)})") from None
    names = tensors[MOMENTS[0]]
    states = {name: {m: tensors[m][name] for m in MOMENTS} | {STEP: steps} for name in names}
    return StatesByName(states, options)


def _moments(moment: str, state: dict[str, Any]) -> list[Tensor]:
    groups = _own_optimizer(state)["state"]
    return [groups[number][moment] for number in sorted(groups)]


def _own_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict of torch's optimizer within DeepSpeed's."""
    return state["optimizer_state_dict" if STAGE_3 in state else "base_optimizer_state"]


def opened(checkpoint: Path) -> Partitions:
    """Return the parts of all ranks. Raises UserError, and WRONG_FORM."""
    files = {rank_of(file): file for file in checkpoint.glob(ZERO_STATES)}
    about = _opened(min(checkpoint.glob(ZERO_MODEL))).content
    ranks = int(about.get("dp_world_size") or len(files))
    if ranks < 1:
        raise ValueError(f"dp_world_size={ranks}")
    missing = next(rank for rank in count() if rank not in files)
    if missing < ranks:
        reason = f"has the parts of {len(files)} of {ranks} ranks: rank {missing} is missing"
        raise UserError("the weights are not complete", str(checkpoint), reason)
    archives = [_opened(files[rank]) for rank in range(ranks)]
    parts = [(archive, archive.content["optimizer_state_dict"]) for archive in archives]
    return Partitions(about["param_shapes"], about.get("frozen_param_shapes") or {}, parts)


def rank_of(file: Path) -> int:
    """Return the rank that has written a file; one that is not numbered is of rank 0."""
    match = RANK.search(file.name)
    return int(match[1]) if match else 0


def _opened(file: Path) -> TorchArchive:
    return TorchArchive(file, "the weights", CLASSES)


def _consecutive(flats: list[tuple[TorchArchive, Tensor]]) -> list[Segment]:
    segments, first = [], 0
    for archive, flat in flats:
        size = flat.numel()
        if size:
            part = archive.tensor("a flat part", flat)
            (chunk,) = part.chunks
            segments.append(Segment(first, size, chunk.file, chunk.offset, part.dtype))
            first += size
    return segments


def _joined(
    parts: list[tuple[TorchArchive, list[Tensor]]],
    shapes: list[dict[str, torch.Size]],
    padded: list[list[int]] | None,
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stages 1 and 2."""
    if any(len(flats) != len(shapes) for _, flats in parts):
        raise ValueError(f"param_shapes has {len(shapes)} groups, and a part has others")
    tensors: dict[str, TensorOnDisk] = {}
    for number, group in enumerate(shapes):
        whole = _consecutive([(archive, flats[number]) for archive, flats in parts])
        paddings = padded[number] if padded else [0] * len(group)
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            size = shape.numel()
            tensors[name] = _flat(name, shape, _cut(whole, start, size))
            start += size + int(padding)
        _require_used(whole, start, ALIGNMENT * len(parts))
    return tensors


def _require_used(whole: list[Segment], used: int, multiple: int = 1) -> None:
    """Raise ValueError if there are more numbers, filled up to a multiple, than parameters."""
    held = whole[-1].end if whole else 0
    if -(-held // multiple) != -(-used // multiple):
        raise ValueError(f"param_shapes has {used:,} numbers, and its parts hold {held:,}")


def _cut(whole: list[Segment], start: int, size: int) -> list[Segment]:
    """Return the segments of the numbers [start, start + size)."""
    cut = []
    at = max(0, bisect_right(whole, start, key=lambda segment: segment.first) - 1)
    while at < len(whole) and whole[at].first < start + size:
        segment = whole[at]
        low = max(start, segment.first)
        high = min(start + size, segment.end)
        if low < high:
            offset = segment.offset + (low - segment.first) * segment.dtype.itemsize
            cut.append(Segment(low - start, high - low, segment.file, offset, segment.dtype))
        at += 1
    return cut


def _divided_each(
    parts: list[tuple[TorchArchive, list[Tensor]]], shapes: dict[str, torch.Size]
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stage 3."""
    wholes = [_consecutive([(archive, flat) for flat in flats]) for archive, flats in parts]
    tensors: dict[str, TensorOnDisk] = {}
    start = 0
    for name, shape in shapes.items():
        size = shape.numel()
        share = -(-size // len(parts))
        segments = []
        for rank, whole in enumerate(wholes):
            held = max(0, min(share, size - rank * share))
            for part in _cut(whole, start, held):
                segments.append(replace(part, first=part.first + rank * share))
        tensors[name] = _flat(name, shape, segments)
        start += share
    for whole in wholes:
        _require_used(whole, start)
    return tensors


def _flat(name: str, shape: torch.Size, segments: list[Segment]) -> FlatTensor:
    """Return a tensor of segments. Raises ValueError unless they are the whole of it."""
    held = sum(segment.count for segment in segments)
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a parameter")
    if held != shape.numel() or not held:
        raise ValueError(f"{name} has {shape.numel():,} numbers, and its parts hold {held:,}")
    formats = {segment.dtype: dtype_name(segment.dtype) for segment in segments}
    if len(formats) > 1:
        raise ValueError(f"the parts of {name} are in {' and '.join(formats.values())}")
    named_in_messages = [Chunk(segments[0].file, segments[0].offset, whole_slice(shape))]
    return FlatTensor(segments[0].dtype, tuple(shape), named_in_messages, segments)
