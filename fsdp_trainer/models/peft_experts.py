"""Adapters of experts in PEFT's folders, which know two forms of them. No torch.

`separate`: each expert's matrix has an adapter, under the matrix's name in the model's Hugging Face
folder. So do vLLM and transformers before 5 read them. `stacked`: as transformers 5 keeps experts
in memory, `target_parameters` of PEFT: gate and up are one matrix, A and B of all experts are one
tensor, A with its rows by expert, B with its columns by rank and then by expert.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[int, ...]
STACKED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stacked parameters of transformers, and which of our matrices are their rows. GPT-OSS's are
ours."""
BASE_LAYER = "base_layer"
"""PEFT's name for what it has wrapped: of two adapted parameters the first is the inner one."""


@dataclass(frozen=True)
class Stack:
    """A matrix of all experts of a block. shape: [experts, out, in].

    layer: the parameter's name. names: of each expert's module in a Hugging Face folder, none where
    one tensor holds all.
    """

    layer: str
    shape: Shape
    names: tuple[str, ...]

    @property
    def experts(self) -> str:
        """Name of the module of the experts."""
        return self.layer.rpartition(".")[0]

    @property
    def matrix(self) -> str:
        """Name of the matrix."""
        return self.layer.rpartition(".")[2]


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of transformers' that holds some of our matrices, one behind the other.

    name: with its module. module: of its adapter, in PEFT's file.
    """

    name: str
    module: str
    parts: tuple[Stack, ...]

    @property
    def shape(self) -> Shape:
        """Experts, rows of all parts, columns."""
        first = self.parts[0].shape
        return (first[0], sum(part.shape[1] for part in self.parts), first[2])

    def first_row(self, layer: str) -> int:
        """Return where the rows of a part begin."""
        before = [part.shape[1] for part in self.parts]
        return sum(before[: [part.layer for part in self.parts].index(layer)])


def by_experts(stacks: Iterable[Stack]) -> dict[str, list[Stack]]:
    """Return the matrices of the experts of each block, by the experts' module."""
    blocks: dict[str, list[Stack]] = {}
    for stack in stacks:
        blocks.setdefault(stack.experts, []).append(stack)
    return blocks


def stacked_parameters(stacks: list[Stack], adapted: set[str]) -> list[StackedParameter]:
    """Return transformers' parameters of a block's experts that are adapted.

    stacks: of one block. adapted: names of our matrices, or of transformers' parameters.
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
    """Return all of transformers' parameters of a block's experts. stacks: of one block."""
    return stacked_parameters(stacks, set(STACKED_PARTS))


@dataclass(frozen=True)
class StackedRows:
    """Rows of each matrix of a stack in PEFT's file, trained in full, that are one of ours.

    row, rows: of each matrix.
    """

    tensor: str
    row: int
    rows: int


@dataclass(frozen=True)
class SeparateTensors:
    """Tensors in PEFT's file, one for each expert, that are a stacked parameter of ours."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class StackedTensor:
    """Numbers of a tensor in PEFT's file, of all experts, that are a stacked parameter of ours.

    is_b: its columns are those of the ranks, else its rows. whole: ranks of an expert in it;
    rank, first: of these how many are ours, and from which on. row, rows: of B.
    """

    tensor: str
    is_b: bool
    experts: int
    whole: int
    first: int
    rank: int
    row: int = 0
    rows: int = 0
