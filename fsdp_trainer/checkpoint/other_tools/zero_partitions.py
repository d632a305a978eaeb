"""DeepSpeed's ZeRO checkpoints: float32 weights in flat parts, one file for each rank.

In stages 1 and 2 the parameters of a group follow each other in the joined parts of all ranks; in
stage 3 each parameter is divided by itself, and every rank's part has its share of each.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.base.torch_private import fake_load, file_offset
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, as_tensor, read
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import ForeignTensor, huggingface_names
from fsdp_trainer.config.other_tools.other_weights import ZERO_MODEL, ZERO_STATES, zero_folder
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_")
STAGE_3, STAGE_1_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"
"""Keys of the flat parts. DeepSpeed's own classes beside them are not unpickled."""
CLASSES = ("deepspeed.",)


@dataclass(frozen=True)
class Segment:
    """Consecutive float32 numbers of a tensor. first: index of the first one in the tensor."""

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


def zero_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the weights of a ZeRO checkpoint by Hugging Face's names. Raises UserError."""
    checkpoint = zero_folder(folder)
    assert checkpoint is not None
    files = {rank_of(file): file for file in checkpoint.glob(ZERO_STATES)}
    about = _loaded(min(checkpoint.glob(ZERO_MODEL)))
    ranks = int(about.get("dp_world_size") or len(files))
    missing = sorted(set(range(ranks)) - files.keys())
    if missing:
        reason = f"has the parts of {len(files)} of {ranks} ranks: rank {missing[0]} is missing"
        raise UserError("the weights are not complete", [Problem(str(checkpoint), reason)])
    if about.get("frozen_param_shapes"):
        reason = "has frozen parameters, which are not read. Convert it with its zero_to_fp32.py"
        raise UserError("cannot read the weights", [Problem(str(checkpoint), reason)])
    parts = [(files[rank], _loaded(files[rank])["optimizer_state_dict"]) for rank in range(ranks)]
    shapes = about["param_shapes"]
    if STAGE_3 in parts[0][1]:
        tensors = _divided_each(parts, {name: s for group in shapes for name, s in group.items()})
    else:
        tensors = _joined(parts, shapes)
    return huggingface_names(tensors, config)


def rank_of(file: Path) -> int:
    """Return the rank that has written a file."""
    found = RANK.search(file.name)
    assert found is not None
    return int(found[1])


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
    parts: list[tuple[Path, Any]], shapes: list[dict[str, torch.Size]]
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stages 1 and 2."""
    tensors: dict[str, TensorOnDisk] = {}
    padded = parts[-1][1].get("param_alignment_paddings")
    for number, group in enumerate(shapes):
        whole = _consecutive([(file, state[STAGE_1_2][number]) for file, state in parts])
        paddings = padded[number] if padded else [0] * len(group)
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            count = shape.numel()
            tensors[name] = _flat(shape, _cut(whole, start, count))
            start += count + int(padding)
    return tensors


def _cut(whole: list[Segment], start: int, count: int) -> list[Segment]:
    """Return the segments of the numbers [start, start + count)."""
    cut = []
    for segment in whole:
        low = max(start, segment.first)
        high = min(start + count, segment.first + segment.count)
        if low < high:
            offset = segment.offset + (low - segment.first) * torch.float32.itemsize
            cut.append(Segment(low - start, high - low, segment.file, offset))
    return cut


def _divided_each(
    parts: list[tuple[Path, Any]], shapes: dict[str, torch.Size]
) -> dict[str, TensorOnDisk]:
    """Return the parameters of stage 3."""
    wholes = [_consecutive([(file, flat) for flat in state[STAGE_3]]) for file, state in parts]
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


def _flat(shape: torch.Size, segments: list[Segment]) -> FlatTensor:
    named_in_messages = [Chunk(segments[0].file, segments[0].offset, whole_slice(shape))]
    return FlatTensor(torch.float32, tuple(shape), named_in_messages, segments)
