"""Computation on complete matrices whose parameters are sharded.

Each matrix has an owner. One all-to-all sends the shards to the owners, another one returns the
results. Matrices are distributed over all ranks of a group, including those that hold the same
shards (replicas, ddp), so that no work is repeated. The group is a pipeline stage, or all ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_trainer.base.distributed import gather, local_slice
from fsdp_trainer.optim.footprint import ROUND

Range = tuple[int, int]
"""Start and end (exclusive)."""
Part = tuple[Range, Range, Range]
"""Ranges of matrices, rows and columns of a stack of matrices."""
OwnMatrix = tuple[int, int]
"""Identifier of a matrix: index of the parameter in its round, index of the matrix in its stack."""


class MatrixPiece(NamedTuple):
    """Part of a matrix that one rank holds.

    parameter: index of the parameter in its round; matrix: index of the matrix in its stack.
    """

    parameter: int
    matrix: int
    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        return length(self.rows), length(self.columns)


Pieces = list[list[MatrixPiece]]


class ShardLayout:
    """The part of a parameter that each rank holds. shape: (matrices, rows, columns)."""

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]):
        self.shape, self.parts = tuple(shape), list(parts)

    @cached_property
    def holders(self) -> dict[Part, list[int]]:
        holders: dict[Part, list[int]] = {}
        for rank, part in enumerate(self.parts):
            if all(length(piece) for piece in part):
                holders.setdefault(part, []).append(rank)
        return holders

    def sender(self, part: Part, owner: int) -> int:
        """Return the rank that sends a part to `owner`, among those that hold it.

        It is the rank in the owner's replica, so that nothing is sent between replicas.
        """
        peers = self.holders.get(self.parts[owner], [owner])
        ranks = self.holders[part]
        return ranks[peers.index(owner) % len(ranks)]

    def piece(self, parameter: int, matrix: int, rank: int) -> MatrixPiece | None:
        part = self.parts[rank]
        (start, stop), rows, columns = part
        if part in self.holders and start <= matrix < stop:
            return MatrixPiece(parameter, matrix, rows, columns)
        return None


class Round:
    """Parameters whose matrices are computed at the same time by their owners.

    layouts: layouts of the parameters; first: owner of the first matrix; rank: this rank. Ranks are
    numbered within `group`; None: all ranks.
    own: this rank's matrices by shape.
    to_owners, from_holders, to_holders, from_owners: pieces by the rank at the other end.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        layouts: list[ShardLayout],
        first: int,
        rank: int,
        group: dist.ProcessGroup | None = None,
    ):
        ranks = len(layouts[0].parts)
        self.parameters, self.layouts = parameters, layouts
        self.first, self.rank, self.group = first, rank, group
        self.starts = [layout.parts[rank][0][0] for layout in layouts]
        self.own: dict[tuple[int, int], list[OwnMatrix]] = {}
        self.to_owners: Pieces = [[] for _ in range(ranks)]
        self.from_holders: Pieces = [[] for _ in range(ranks)]
        self.to_holders: Pieces = [[] for _ in range(ranks)]
        self.from_owners: Pieces = [[] for _ in range(ranks)]
        owner = first
        for parameter, layout in enumerate(layouts):
            for matrix in range(layout.shape[0]):
                self._add_held(parameter, matrix, layout, owner, rank)
                if owner == rank:
                    self._add_owned(parameter, matrix, layout, owner)
                owner = (owner + 1) % ranks
        self.next = owner

    def _add_held(
        self, parameter: int, matrix: int, layout: ShardLayout, owner: int, rank: int
    ) -> None:
        piece = layout.piece(parameter, matrix, rank)
        if piece:
            self.from_owners[owner].append(piece)
            if layout.sender(layout.parts[rank], owner) == rank:
                self.to_owners[owner].append(piece)

    def _add_owned(self, parameter: int, matrix: int, layout: ShardLayout, owner: int) -> None:
        _, rows, columns = layout.shape
        self.own.setdefault((rows, columns), []).append((parameter, matrix))
        for rank, part in enumerate(layout.parts):
            piece = layout.piece(parameter, matrix, rank)
            if piece:
                self.to_holders[rank].append(piece)
                if layout.sender(part, owner) == rank:
                    self.from_holders[rank].append(piece)

    def compute(
        self, parts: list[Tensor], function: Callable[[Tensor, list[OwnMatrix]], Tensor]
    ) -> list[Tensor]:
        """Apply `function` to complete matrices; return this rank's parts of the results.

        parts: this rank's part of each parameter, in one number format. function: called with
        matrices of one shape, [count, rows, columns], and their identifiers. Collective.
        """
        outgoing = [self._local(parts, piece) for pieces in self.to_owners for piece in pieces]
        incoming = exchange(outgoing, self.to_owners, self.from_holders, parts[0], self.group)
        wholes: dict[tuple[int, int], Tensor] = {}
        for shape, own in self.own.items():
            matrices = parts[0].new_empty(len(own), *shape)
            wholes |= dict(zip(own, matrices, strict=True))
        for piece, numbers in incoming:
            place(wholes[piece.parameter, piece.matrix], piece).copy_(numbers)
        for own in self.own.values():
            computed = function(torch.stack([wholes.pop(matrix) for matrix in own]), own)
            wholes |= dict(zip(own, computed, strict=True))
        answers = [
            place(wholes[piece.parameter, piece.matrix], piece)
            for pieces in self.to_holders
            for piece in pieces
        ]
        results = [torch.empty_like(part) for part in parts]
        incoming = exchange(answers, self.to_holders, self.from_owners, parts[0], self.group)
        for piece, numbers in incoming:
            self._local(results, piece).copy_(numbers)
        return results

    def _local(self, parts: list[Tensor], piece: MatrixPiece) -> Tensor:
        stack = stacked(parts[piece.parameter])
        return stack[piece.matrix - self.starts[piece.parameter]]


def round_of_rows(matrices: Round, numbers: int) -> Round:
    """Return a round with the same matrices and owners, but with `numbers` numbers per row.

    Ranks that hold different columns of the same rows hold equal numbers.
    """
    layouts = [
        ShardLayout(
            (*layout.shape[:2], numbers),
            [(stack, rows, (0, numbers)) for stack, rows, _ in layout.parts],
        )
        for layout in matrices.layouts
    ]
    return Round(matrices.parameters, layouts, matrices.first, matrices.rank, matrices.group)


def exchange(
    outgoing: list[Tensor],
    sent: Pieces,
    received: Pieces,
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> Iterable[tuple[MatrixPiece, Tensor]]:
    """Send pieces to all ranks of a group, and return the received pieces. Collective.

    outgoing: tensors of the pieces in `sent`. like: a tensor with number format and device.
    """
    sizes_out, sizes_in = (
        [sum(math.prod(piece.shape) for piece in pieces) for pieces in lists]
        for lists in (sent, received)
    )
    flat = [numbers.reshape(-1) for numbers in outgoing]
    message = torch.cat(flat) if flat else like.new_empty(0)
    if len(sent) > 1:
        arrived = message.new_empty(sum(sizes_in))
        dist.all_to_all_single(arrived, message, sizes_in, sizes_out, group=group)
        message = arrived
    pieces = [piece for some in received for piece in some]
    numbers = message.split([math.prod(piece.shape) for piece in pieces])
    return zip(pieces, [n.view(p.shape) for p, n in zip(pieces, numbers, strict=True)], strict=True)


def deal(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None) -> list[Round]:
    """Distribute the matrices of parameters over the ranks of a group, in rounds. Collective.

    Largest matrices first. parameters: [rows, columns] or stacks [matrices, rows, columns], the
    same on every rank of the group.
    """
    layouts = layouts_of(parameters, group)
    ranks = len(layouts[0].parts)
    rank = dist.get_rank(group) if ranks > 1 else 0
    rounds: list[Round] = []
    first = 0
    for chosen in rounds_of([stack_shape(layout.shape) for layout in layouts], ranks):
        some = [parameters[i] for i in chosen], [layouts[i] for i in chosen]
        rounds.append(Round(*some, first, rank, group))
        first = rounds[-1].next
    return rounds


def rounds_of(shapes: Sequence[tuple[int, int, int]], ranks: int) -> list[list[int]]:
    """Return the indices of the parameters of each round, largest matrices first.

    shapes: (matrices, rows, columns) of each parameter.
    """
    order = sorted(range(len(shapes)), key=lambda i: shapes[i][1:], reverse=True)
    order.sort(key=lambda i: work(shapes[i]), reverse=True)
    rounds: list[list[int]] = []
    chosen: list[int] = []
    matrices, numbers = 0, 0
    for i in order:
        chosen.append(i)
        matrices += shapes[i][0]
        numbers += math.prod(shapes[i])
        if i == order[-1] or (matrices >= ranks and numbers >= ROUND * ranks):
            rounds.append(chosen)
            chosen, matrices, numbers = [], 0, 0
    return rounds


def layouts_of(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[ShardLayout]:
    """Return the layout of each parameter. Collective.

    Parameters of the same shape and placements are gathered once.
    """
    kinds = [(tuple(p.shape), str(getattr(p, "placements", ""))) for p in parameters]
    own = {kind: part_of(p) for kind, p in zip(kinds, parameters, strict=True)}
    everyone = gather(own, group) if dist.is_initialized() else [own]
    known = {
        kind: ShardLayout(stack_shape(kind[0]), [parts[kind] for parts in everyone]) for kind in own
    }
    return [known[kind] for kind in kinds]


def part_of(parameter: Tensor) -> Part:
    ranges = [(piece.start, piece.stop) for piece in local_slice(parameter)]
    matrices, rows, columns = ranges if len(ranges) == 3 else [(0, 1), *ranges]
    return matrices, rows, columns


def stack_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    matrices, rows, columns = shape if len(shape) == 3 else (1, *shape)
    return matrices, rows, columns


def stacked(part: Tensor) -> Tensor:
    return part if part.ndim == 3 else part[None]


def place(whole: Tensor, piece: MatrixPiece) -> Tensor:
    return whole[slice(*piece.rows), slice(*piece.columns)]


def work(shape: tuple[int, int, int]) -> int:
    """Return the cost of Newton-Schulz for one matrix, up to a factor."""
    _, rows, columns = shape
    few = min(rows, columns)
    return few * few * (2 * max(rows, columns) + few)


def length(piece: Range) -> int:
    return max(0, piece[1] - piece[0])
