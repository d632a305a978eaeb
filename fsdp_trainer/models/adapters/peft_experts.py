"""The two forms of experts' adapters in PEFT's folders. Does not import torch.

`separate`: each expert's matrix has an adapter, under the matrix's name in the model's Hugging Face
folder. vLLM and transformers before 5 read this form. `stacked`: the layout of experts in
transformers 5, PEFT's `target_parameters`. Gate and up are one matrix, and A and B of all experts
are one tensor each: A's rows are ordered by expert, B's columns by rank and then by expert.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[int, ...]
STACKED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Our matrices whose rows make up each stacked parameter of transformers. For GPT-OSS our matrices
are the same as those of transformers."""
BASE_LAYER = "base_layer"
"""PEFT's name for a wrapped module: of two adapted parameters, the first is the inner one."""


@dataclass(frozen=True)
class Stack:
    """The stacked matrices of all experts of a block. shape: [experts, out, in].

    layer: the parameter. names: each expert's module in a Hugging Face folder; empty if the folder
    has one tensor for all.
    """

    layer: str
    shape: Shape
    names: tuple[str, ...]

    @property
    def experts(self) -> str:
        return self.layer.rpartition(".")[0]

    @property
    def matrix(self) -> str:
        return self.layer.rpartition(".")[2]


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of transformers in which rows of some of our matrices are concatenated.

    module: of its adapter in PEFT's file. parts: our matrices.
    """

    name: str
    module: str
    parts: tuple[Stack, ...]

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (first[0], sum(part.shape[1] for part in self.parts), first[2])

    def first_row(self, layer: str) -> int:
        before = [part.shape[1] for part in self.parts]
        return sum(before[: [part.layer for part in self.parts].index(layer)])


def by_experts(stacks: Iterable[Stack]) -> dict[str, list[Stack]]:
    blocks: dict[str, list[Stack]] = {}
    for stack in stacks:
        blocks.setdefault(stack.experts, []).append(stack)
    return blocks


def stacked_parameters(stacks: list[Stack], adapted: set[str]) -> list[StackedParameter]:
    """Return the adapted ones of transformers' parameters of one block's experts.

    adapted: names of our matrices or of transformers' parameters.
    """
    experts = stacks[0].experts
    parameters = []
    by_matrix = {stack.matrix: stack for stack in stacks}
    for name, parts in STACKED_PARTS.items():
        if adapted & {name, *parts}:
            own = tuple(by_matrix[part] for part in ([name] if name in by_matrix else parts))
            parameters.append((f"{experts}.{name}", own))
    depth = len(parameters) - 1
    return [
        StackedParameter(name, experts + f".{BASE_LAYER}" * (depth - i), parts)
        for i, (name, parts) in enumerate(parameters)
    ]


def whole_parameters(stacks: list[Stack]) -> list[StackedParameter]:
    return stacked_parameters(stacks, set(STACKED_PARTS))


@dataclass(frozen=True)
class StackedRows:
    """Source of a stacked matrix that was trained in full: rows of a tensor in PEFT's file.

    row, rows: first row and number of rows in each expert's matrix.
    """

    tensor: str
    row: int
    rows: int


@dataclass(frozen=True)
class SeparateTensors:
    """Source of a stacked parameter: tensors in PEFT's file, one for each expert."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class StackedTensor:
    """Source of a stacked adapter matrix: a part of a tensor of all experts in PEFT's file.

    is_b: ranks are columns (B), else rows (A). whole: rank of each expert's adapter in the tensor.
    first, rank: the ranks to use. row, rows: the rows to use of B.
    """

    tensor: str
    is_b: bool
    experts: int
    whole: int
    first: int
    rank: int
    row: int = 0
    rows: int = 0
