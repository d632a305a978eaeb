"""DeepSpeed's ZeRO checkpoints: float32 weights in flat parts, one file for each rank.

In stages 1 and 2 the parameters of a group follow each other in the joined parts of all ranks; in
stage 3 each parameter is divided by itself, and every rank's part has its share of each.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.base.torch_private import fake_load, file_offset
from fsdp_trainer.checkpoint.formats.tensor_files import (
    Chunk,
    TensorOnDisk,
    as_tensor,
    read,
    read_number,
)
from fsdp_trainer.checkpoint.other_tools.foreign_states import (
    MOMENTS,
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import ForeignTensor
from fsdp_trainer.checkpoint.other_tools.translated_names import huggingface_names
from fsdp_trainer.config.other_tools.other_weights import ZERO_MODEL, ZERO_STATES, zero_folder
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_")
STAGE_3, STAGE_1_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"
"""Keys of the flat parts. DeepSpeed's own classes beside them are not unpickled."""
CLASSES = ("deepspeed.",)


@dataclass(frozen=True)
class Segment:
    """Consecutive numbers of a tensor. first: index of the first one in the tensor."""

    first: int
    count: int
    file: Path
    offset: int


@dataclass
class FlatTensor(TensorOnDisk):
    """A tensor in consecutive segments, which may begin and end within a row."""

    segments: list[Segment]

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows `first` to `last` into `buffer`, uint8; return them."""
        row = math.prod(self.shape[1:])
        begin, end = first * row, last * row
        flat = as_tensor(buffer, self.dtype, (end - begin,))
        for segment in self.segments:
            low = max(begin, segment.first)
            high = min(end, segment.first + segment.count)
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
    ranks: list[tuple[Path, dict[str, Any]]]

    def tensors(self, flats: Callable[[dict[str, Any]], list[Tensor]]) -> dict[str, TensorOnDisk]:
        """Return the parameters by name. flats: returns the flat part of each group of a rank."""
        parts = [(file, flats(state)) for file, state in self.ranks]
        if STAGE_3 in self.ranks[0][1]:
            return _divided_each(parts, {n: s for group in self.shapes for n, s in group.items()})
        return _joined(parts, self.shapes, self.ranks[-1][1].get("param_alignment_paddings"))


def zero_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the weights of a ZeRO checkpoint by Hugging Face's names. Raises UserError."""
    checkpoint = zero_folder(folder)
    assert checkpoint is not None

    def weights(state: dict[str, Any]) -> list[Tensor]:
        return state[STAGE_3] if STAGE_3 in state else state[STAGE_1_2]

    partitions = opened(checkpoint)
    tensors = partitions.tensors(weights)
    if partitions.frozen:
        tensors |= _frozen(checkpoint, partitions.frozen)
    return huggingface_names(tensors, config)


def _frozen(checkpoint: Path, shapes: dict[str, torch.Size]) -> dict[str, TensorOnDisk]:
    """Return the parameters that were not trained; in stage 3 each rank's file has a part of each.

    They are in the number format of the forward pass.
    """
    files = sorted(checkpoint.glob(ZERO_MODEL), key=rank_of)
    parts = [(file, _loaded(file)["frozen_param_fragments"]) for file in files]
    tensors: dict[str, TensorOnDisk] = {}
    for name, shape in shapes.items():
        fragments = [(file, own[name]) for file, own in parts]
        dtype = fragments[0][1].dtype
        segments = _cut(_consecutive(fragments), 0, shape.numel(), dtype)
        tensors[name] = _flat(shape, segments, dtype)
    return tensors


def zero_states(checkpoint: Path) -> StatesByName:
    """Return the states of AdamW in a ZeRO checkpoint. Raises UserError."""
    partitions = opened(checkpoint)
    file, first = partitions.ranks[0]
    try:
        own = _own_optimizer(first)
        step = own["state"][0][STEP]
        count = read_number(file, file_offset(step), step.dtype)
        tensors = {moment: partitions.tensors(partial(_moments, moment)) for moment in MOMENTS}
    except (KeyError, TypeError, AttributeError) as error:
        raise unusable_states(checkpoint, f"holds no states of AdamW ({error})") from None
    names = tensors[MOMENTS[0]]
    states = {name: {m: tensors[m][name] for m in MOMENTS} | {STEP: count} for name in names}
    return StatesByName(states, known_options(own.get("param_groups")))


def _moments(moment: str, state: dict[str, Any]) -> list[Tensor]:
    groups = _own_optimizer(state)["state"]
    return [groups[number][moment] for number in sorted(groups)]


def _own_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict of torch's optimizer within DeepSpeed's."""
    return state["optimizer_state_dict" if STAGE_3 in state else "base_optimizer_state"]


def opened(checkpoint: Path) -> Partitions:
    """Return the parts of all ranks. Raises UserError."""
    files = {rank_of(file): file for file in checkpoint.glob(ZERO_STATES)}
    about = _loaded(min(checkpoint.glob(ZERO_MODEL)))
    ranks = int(about.get("dp_world_size") or len(files))
    missing = sorted(set(range(ranks)) - files.keys())
    if missing:
        reason = f"has the parts of {len(files)} of {ranks} ranks: rank {missing[0]} is missing"
        raise UserError("the weights are not complete", [Problem(str(checkpoint), reason)])
    parts = [(files[rank], _loaded(files[rank])["optimizer_state_dict"]) for rank in range(ranks)]
    return Partitions(about["param_shapes"], about.get("frozen_param_shapes") or {}, parts)


def rank_of(file: Path) -> int:
    """Return the rank that has written a file; one that is not numbered is of rank 0."""
    found = RANK.search(file.name)
    return int(found[1]) if found else 0


def _loaded(file: Path) -> Any:
    try:
        return fake_load(file, CLASSES)
    except Exception as error:
        reason = f"cannot be read: {str(error).splitlines()[0]}"
        raise UserError("cannot read the weights", [Problem(str(file), reason)]) from None


def _consecutive(flats: list[tuple[Path, Tensor]]) -> list[Segment]:
    """Return flat tensors, each with its file, as the segments of one."""
    segments, first = [], 0
    for file, flat in flats:
        segments.append(Segment(first, flat.numel(), file, file_offset(flat)))
        first += flat.numel()
    return segments


def _joined(
    parts: list[tuple[Path, list[Tensor]]],
    shapes: list[dict[str, torch.Size]],
    padded: list[list[int]] | None,
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stages 1 and 2."""
    tensors: dict[str, TensorOnDisk] = {}
    for number, group in enumerate(shapes):
        whole = _consecutive([(file, flats[number]) for file, flats in parts])
        paddings = padded[number] if padded else [0] * len(group)
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            count = shape.numel()
            tensors[name] = _flat(shape, _cut(whole, start, count))
            start += count + int(padding)
    return tensors


def _cut(
    whole: list[Segment], start: int, count: int, dtype: torch.dtype = torch.float32
) -> list[Segment]:
    """Return the segments of the numbers [start, start + count)."""
    cut = []
    for segment in whole:
        low = max(start, segment.first)
        high = min(start + count, segment.first + segment.count)
        if low < high:
            offset = segment.offset + (low - segment.first) * dtype.itemsize
            cut.append(Segment(low - start, high - low, segment.file, offset))
    return cut


def _divided_each(
    parts: list[tuple[Path, list[Tensor]]], shapes: dict[str, torch.Size]
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stage 3."""
    wholes = [_consecutive([(file, flat) for flat in flats]) for file, flats in parts]
    tensors: dict[str, TensorOnDisk] = {}
    start = 0
    for name, shape in shapes.items():
        count = shape.numel()
        share = -(-count // len(parts))
        segments = []
        for rank, whole in enumerate(wholes):
            held = max(0, min(share, count - rank * share))
            for part in _cut(whole, start, held):
                segments.append(
                    Segment(part.first + rank * share, part.count, part.file, part.offset)
                )
        tensors[name] = _flat(shape, segments)
        start += share
    return tensors


def _flat(
    shape: torch.Size, segments: list[Segment], dtype: torch.dtype = torch.float32
) -> FlatTensor:
    named_in_messages = [Chunk(segments[0].file, segments[0].offset, whole_slice(shape))]
    return FlatTensor(dtype, tuple(shape), named_in_messages, segments)
