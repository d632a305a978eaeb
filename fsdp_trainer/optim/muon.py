"""Muon (Jordan 2024): the blocks' matrices are updated by orthogonalised momentum."""

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.config.parts.optimizers import Optim
from fsdp_trainer.optim.compact import CompactOptimizer, MomentKind
from fsdp_trainer.optim.muon_owners import OwnMatrix, Round, deal, stack_shape
from fsdp_trainer.optim.newton_schulz import orthogonalize
from fsdp_trainer.optim.normuon import SECOND_MOMENT, RowNorms, empty_rows, scaled
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer

SCALES = {
    # Liu et al. 2025 (arXiv 2502.16982, §2.2): the update's root mean square is that of AdamW
    "adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # Jordan 2024
    "keller": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Functions from (rows, columns) to the factor of an orthogonal update, by optim.scale."""


class Muon(CompactOptimizer):
    """Muon for matrices and stacks of matrices; `others` updates all other parameters.

    The momentum is sharded like its weight. Both optimizers share `param_groups` and `state`, so
    that they can be used as one.
    """

    moments: ClassVar = {"momentum_buffer": MomentKind(signed=True, stochastic=True)}

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: TrainerOptimizer | None,
        cfg: Optim,
        *formats: Any,
        ranks: dist.ProcessGroup | None = None,
    ):
        """Create the optimizer. Collective.

        matrices: parameter groups with names; formats: state_format, stochastic and seed of
        CompactOptimizer. ranks: group over which matrices are distributed; None: all ranks.
        """
        super().__init__(matrices, *formats, lr=cfg.lr)
        self.cfg = cfg
        self.others = others
        self.ns_dtype = getattr(torch, cfg.ns_dtype)
        self.group_of = {p: group for group in self.param_groups for p in group["params"]}
        self.rounds = deal(list(self.group_of), ranks)
        self.row_norms = [
            RowNorms(matrices, cfg.normuon_beta) if cfg.normuon else None
            for matrices in self.rounds
        ]
        if others is not None:
            self.skips_on_device = others.skips_on_device
            self.param_groups += others.param_groups
            self.state = others.state

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self.others is not None and parameter not in self.group_of:
            return self.others.empty_state(parameter)
        rows = {SECOND_MOMENT: empty_rows(parameter)} if self.cfg.normuon else {}
        return super().empty_state(parameter) | rows

    def fuse(self) -> None:
        """Update the parameters of `others` in fewer passes. They are clipped with the matrices."""
        if self.others is not None:
            self.others.fuse()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter, or none if `found_inf` is not 0. Collective."""
        super().step()
        if self.others is not None:
            self.others.found_inf = self.found_inf
            self.others.step()

    def update(self, count: Tensor, skip: Tensor) -> None:
        for matrices, norms in zip(self.rounds, self.row_norms, strict=True):
            self.update_round(matrices, norms, count, skip)

    def update_round(
        self, matrices: Round, norms: RowNorms | None, count: Tensor, skip: Tensor
    ) -> None:
        directions = [self.direction(p, count, skip) for p in matrices.parameters]

        def orthogonal(wholes: Tensor, own: list[OwnMatrix]) -> Tensor:
            computed = orthogonalize(wholes, self.cfg.ns_coefficients, self.cfg.ns_steps)
            if norms:
                norms.measure(computed, own)
            return computed

        results = matrices.compute(directions, orthogonal)
        if norms:
            states = [local_part(self.state[p][SECOND_MOMENT]) for p in matrices.parameters]
            factors = norms.update(states, skip)
            results = [scaled(*pair) for pair in zip(results, factors, strict=True)]
        for parameter, result in zip(matrices.parameters, results, strict=True):
            group = self.group_of[parameter]
            _, rows, columns = stack_shape(parameter.shape)
            step = group["lr"] * SCALES[self.cfg.scale](rows, columns)
            decay = 1 - group["lr"] * group["weight_decay"]
            flat = result.view(-1, self.block(parameter))
            for chunk in self.chunks(parameter, count, skip):
                moved = flat[chunk.numbers].float()
                chunk.write((chunk.weight.float() * decay).sub_(moved, alpha=step))

    def direction(self, parameter: nn.Parameter, count: Tensor, skip: Tensor) -> Tensor:
        """Update the momentum; return this rank's part of the matrices to orthogonalise."""
        momentum = self.cfg.momentum
        local = local_part(parameter)
        direction = torch.zeros(local.shape, dtype=self.ns_dtype, device=local.device)
        flat = direction.view(-1, self.block(parameter))
        for chunk in self.chunks(parameter, count, skip):
            gradient = chunk.gradient.float()
            mean = torch.lerp(chunk.load("momentum_buffer"), gradient, 1 - momentum)
            flat[chunk.numbers] = gradient.lerp(mean, momentum) if self.cfg.nesterov else mean
            chunk.store("momentum_buffer", mean)
        return direction
