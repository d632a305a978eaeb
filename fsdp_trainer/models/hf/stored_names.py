"""The form in which transformers stores weights: its own renaming, and tensors that it joins.

Uses names that transformers does not promise to keep, all in this file.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from fsdp_trainer.base.matrix_rows import matrix_rows

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Rows of a parameter that are rows of a stored tensor. Stacks count as one matrix of all rows.

    parameter_row, tensor_row: the first of them. rows: their number.
    """

    parameter: str
    parameter_row: int
    tensor: str
    tensor_row: int
    rows: int


class NotReadable(ValueError):
    """transformers changes tensors as it loads them in a way that is not done here."""


def stored_shapes(hf: PreTrainedModel, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the tensors that transformers would store, by name.

    shapes: those of the parameters and buffers, in transformers' orientation.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    stored: dict[str, Tensor] = revert_weight_conversion(hf, empty)
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def places(
    hf: PreTrainedModel, stored: Mapping[str, Shape], names: Iterable[str]
) -> tuple[list[Place], list[str]]:
    """Return the places of stored tensors, and the names of those that no parameter is made of.

    stored: shapes of a folder's tensors by name; names: of the parameters and buffers. Raises
    NotReadable.
    """
    known: dict[str, Any] = dict.fromkeys(names, True)
    transforms = get_model_conversion_mapping(hf)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {p: each for each in converters for p in each.source_patterns}
    joined: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    placed: list[Place] = []
    unused = []
    for tensor in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(
            tensor, renamings, converters, hf.base_model_prefix, known
        )
        if pattern is not None and tensor not in known:
            joined[name][pattern].append(tensor)
        elif tensor in known or name in known:
            name = tensor if tensor in known else name
            placed.append(Place(name, 0, tensor, 0, matrix_rows(stored[tensor])))
        else:
            unused.append(tensor)
    for name, sources in joined.items():
        converter = of_pattern[next(iter(sources))]
        own = converted(name, converter, sources, stored)
        if {place.parameter for place in own} <= known.keys():
            placed += own
        else:
            unused += [tensor for tensors in sources.values() for tensor in tensors]
    return placed, unused


def converted(
    name: str,
    converter: WeightConverter,
    sources: Mapping[str, list[str]],
    stored: Mapping[str, Shape],
) -> list[Place]:
    """Return the places of tensors that are joined, or of one that is divided.

    name: of the parameter, of several the first. sources: names of tensors by source pattern.
    """
    kinds = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", 0) for operation in converter.operations]
    ordered = [sources[p] for p in converter.source_patterns if p in sources]
    if (kinds, dims) == ([Chunk], [0]):
        return divided(name, converter.target_patterns, ordered[0][0], stored)
    if (kinds, dims) == ([Concatenate], [0]):
        return concatenated(name, [tensor for group in ordered for tensor in group], stored)
    if (kinds, dims) in (
        ([MergeModulelist], [0]),
        ([MergeModulelist, Concatenate], [0, 1]),
    ):
        return merged_list(name, ordered, stored)
    raise NotReadable(f"{name} is made by {', '.join(map(repr, converter.operations))}")


def merged_list(name: str, groups: list[list[str]], stored: Mapping[str, Shape]) -> list[Place]:
    """Return the places of matrices that become one stack, of each group one below the other.

    groups: for each matrix of an expert the names of all experts' tensors.
    """
    heights = [matrix_rows(stored[group[0]]) for group in groups]
    placed = []
    for i, (group, height) in enumerate(zip(groups, heights, strict=True)):
        for number, tensor in enumerate(group):
            first = number * sum(heights) + sum(heights[:i])
            placed.append(Place(name, first, tensor, 0, height))
    return placed


def concatenated(name: str, tensors: list[str], stored: Mapping[str, Shape]) -> list[Place]:
    placed, first = [], 0
    for tensor in tensors:
        placed.append(Place(name, first, tensor, 0, matrix_rows(stored[tensor])))
        first += matrix_rows(stored[tensor])
    return placed


def divided(name: str, targets: list[str], tensor: str, stored: Mapping[str, Shape]) -> list[Place]:
    """Return the places of the equal parts of one tensor.

    name: of the first parameter; targets: patterns of all.
    """
    rows = matrix_rows(stored[tensor]) // len(targets)
    return [
        Place(name.replace(targets[0], target), 0, tensor, i * rows, rows)
        for i, target in enumerate(targets)
    ]


def may_be_unused(hf: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return those of a folder's tensors that the model has no use for, as is known of it."""
    patterns = getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = {
        name[start:]
        for name, _ in hf.named_buffers()
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name)))
    }
    return {n for n in names if n in buffers or any(re.search(each, n) for each in patterns)}
