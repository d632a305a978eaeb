"""NorMuon (Li et al. 2025, arXiv 2510.05491): normalises the rows of Muon's updates.

The rows of an update after Newton-Schulz differ in length, so that few neurons would get most of a
step. Each row is divided by the root of its running mean square, and the matrix is rescaled to its
norm.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part, to_device
from fsdp_trainer.base.torch_private import row_dtensor
from fsdp_trainer.optim.muon_owners import OwnMatrix, Round, round_of_rows, stacked

SECOND_MOMENT = "row_mean_square"
"""Name of an optimizer state: one number for each row of a matrix, sharded like the rows."""
EPSILON = 1e-8  # as in the paper
TINY = 1e-30
NUMBERS = 2  # numbers per row that owners return: running mean square and factor


class RowNorms:
    """The mean squares of the rows of a round's matrices, updated by their owners.

    A row's owner is the rank that orthogonalises its matrix.
    """

    def __init__(self, matrices: Round, beta: float):
        self.beta = beta
        self.rows = round_of_rows(matrices, NUMBERS)
        self.mean_squares: dict[OwnMatrix, Tensor] = {}
        self.columns = [layout.shape[2] for layout in matrices.layouts]

    def measure(self, orthogonal: Tensor, own: list[OwnMatrix]) -> None:
        """Store the rows' mean squares of complete matrices [count, rows, columns].

        own: identifiers of the matrices.
        """
        means = orthogonal.float().square().mean(-1)
        self.mean_squares |= dict(zip(own, means, strict=True))

    def update(self, states: list[Tensor], skip: Tensor) -> list[Tensor]:
        """Update the running mean squares of this rank's rows; return the rows' factors.

        states: this rank's part for each parameter, float32 [..., rows, 1]. skip: True: no bit of
        the states changes. Collective.
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
        """Return the new running mean square and the factor of each row: [count, rows, 2].

        rows: [count, rows, 2]; the first number is the old running mean square.
        """
        means = torch.stack([self.mean_squares[matrix] for matrix in own])
        widths = torch.tensor([self.columns[parameter] for parameter, _ in own], dtype=means.dtype)
        columns = to_device(widths, means.device)[:, None]
        running = torch.lerp(rows[..., 0], means, 1 - self.beta)
        inverse = 1 / (running.sqrt() + EPSILON)
        # the squared norm of an orthogonal matrix is the smaller of rows and columns
        wanted = columns.clamp(max=means.shape[1])
        squares = (means * columns * inverse.square()).sum(-1, keepdim=True)
        factor = inverse * (wanted / squares.clamp_min(TINY)).sqrt()
        return torch.stack([running, factor], -1)


def empty_rows(parameter: nn.Parameter) -> Tensor:
    """Return a zero for each row of a parameter, sharded like them: [..., rows, 1] float32."""
    local = local_part(parameter)
    rows = torch.zeros(*local.shape[:-1], 1, dtype=torch.float32, device=local.device)
    return row_dtensor(parameter, rows) if isinstance(parameter, DTensor) else rows


def scaled(result: Tensor, factor: Tensor) -> Tensor:
    return (stacked(result).float() * stacked(factor)).view_as(result)
