"""NorMuon (Li et al. 2025, arXiv 2510.05491): the rows of an orthogonal update move equally far.

Newton-Schulz leaves rows of different length: few neurons would take most of a step. Each row is
divided by the root of its running mean square, and the matrix brought back to its norm.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.distributed import local_part
from fsdp_trainer.optim.owners import OwnMatrix, Round, round_of_rows, stacked
from fsdp_trainer.torch_private import row_dtensor

SECOND_MOMENT = "row_mean_square"
"""The optimizer's state of a matrix: a number for each row, sharded as the rows are."""
EPSILON = 1e-8  # the paper's
TINY = 1e-30
NUMBERS = 2  # of a row on its way back: its mean square, and its factor


class RowNorms:
    """The mean squares of the rows of a round's matrices, which their owners bring up to date.

    A row's owner is the rank that makes its matrix orthogonal.
    """

    def __init__(self, matrices: Round, beta: float):
        self.beta = beta
        self.rows = round_of_rows(matrices, NUMBERS)
        self.mean_squares: dict[OwnMatrix, Tensor] = {}
        self.columns = [layout.shape[2] for layout in matrices.layouts]

    def measure(self, orthogonal: Tensor, own: list[OwnMatrix]) -> None:
        """Take note of the rows of whole matrices [count, rows, columns]."""
        means = orthogonal.float().square().mean(-1)
        self.mean_squares |= dict(zip(own, means, strict=True))

    def update(self, states: list[Tensor], skip: Tensor) -> list[Tensor]:
        """Update this rank's rows of the running mean squares; return their factors. Collective.

        states: of each parameter, float32 [..., rows, 1] on this rank. skip: they stay as they
        were, to the last bit.
        """
        outgoing = [torch.cat([state, torch.zeros_like(state)], -1) for state in states]
        answers = self.rows.compute(outgoing, self.updated)
        self.mean_squares.clear()
        factors = []
        for state, answer in zip(states, answers, strict=True):
            new, factor = answer.split(1, -1)
            torch.where(skip, state, new, out=state)
            factors.append(factor)
        return factors

    def updated(self, rows: Tensor, own: list[OwnMatrix]) -> Tensor:
        """Return the new running mean squares of whole matrices, and each row's factor.

        rows: [count, rows, 2], the old ones first.
        """
        means = torch.stack([self.mean_squares[matrix] for matrix in own])
        columns = means.new_tensor([self.columns[parameter] for parameter, _ in own])[:, None]
        running = torch.lerp(rows[..., 0], means, 1 - self.beta)
        inverse = 1 / (running.sqrt() + EPSILON)
        # of an orthogonal matrix the squared norm is the smaller of its sizes
        wanted = columns.clamp(max=means.shape[1])
        squares = (means * columns * inverse.square()).sum(-1, keepdim=True)
        factor = inverse * (wanted / squares.clamp_min(TINY)).sqrt()
        return torch.stack([running, factor], -1)


def empty_rows(parameter: nn.Parameter) -> Tensor:
    """Return a zero for each row of a parameter, placed as its rows are: [..., rows, 1] float32."""
    local = local_part(parameter)
    rows = torch.zeros(*local.shape[:-1], 1, dtype=torch.float32, device=local.device)
    return row_dtensor(parameter, rows) if isinstance(parameter, DTensor) else rows


def scaled(result: Tensor, factor: Tensor) -> Tensor:
    """Return this rank's part of an update with each row times its factor: float32."""
    return (stacked(result).float() * stacked(factor)).view_as(result)
