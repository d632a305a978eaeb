"""Faults in the processes of a proof, which import this module: PLANTED names the fault.

CHECK names the module of the only check that is asked.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from planted_faults import PLANTS, weighed

from fsdp_trainer.apps.prove.run_certificate import OF_A_RUN
from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.extensions import CALLBACKS, Callback
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.moe import SigmoidRouter
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import Batches
from fsdp_trainer.training.step import ForwardBackward

PLANTED = os.environ["PLANTED"]


def ranks() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def learn_no_end(builder, sample) -> None:
    """Learn no token that ends an answer."""
    sample.weights[[int(token) in builder.tokenizer.stop_ids for token in sample.tokens]] = 0


class Gradients(Callback):
    """Drops the gradients of a rank, or moves what is frozen."""

    @torch.no_grad()
    def gradients(self, run, step) -> None:
        """Change a rank's own part."""
        for parameter in run.model.parameters():
            if PLANTED == "frozen tensor that moves" and not parameter.requires_grad:
                local_part(parameter).add_(1e-3)
            elif PLANTED == "dropped gradient of one rank" and run.rank and parameter.requires_grad:
                local_part(parameter.grad).zero_()


def divide_by_own_weight() -> None:
    """Divide each micro-batch's loss by its own weight, in place of the step's."""
    compute = ForwardBackward.compute

    def local(self, plan, batch):
        own = float(batch.weights.sum()) * ranks()
        return compute(self, replace(plan, weight=own) if ranks() > 1 else plan, batch)

    ForwardBackward.compute = local


def resume_a_step_late() -> None:
    """Leave the rows of one step out after a resume."""
    plans = Batches.plans

    def late(self, rows, last_row, step=0, start=0, *args, **options):
        return plans(self, rows, last_row, step, start + rows * bool(step), *args, **options)

    Batches.plans = late


def other_signs(signs) -> None:
    """Move routers' biases by other signs. signs: a function of counts."""

    @torch.no_grad()
    def move(self, counts, speed, skip):
        self.e_score_correction_bias += speed * signs(counts)

    SigmoidRouter.move_bias = move


def count_own_tokens() -> None:
    """Move each rank's biases by the tokens of that rank alone."""
    sum_over_tokens, move_biases, own = Dims.sum_over_tokens, Balance.move_biases, []

    def kept(self, sums):
        own[:] = [sums.clone()]
        sum_over_tokens(self, sums)

    def by_own(self, blocks, counts, skip):
        first = counts.storage_offset()
        move_biases(self, blocks, own[0][first : first + counts.numel()], skip)

    Dims.sum_over_tokens, Balance.move_biases = kept, by_own


PLANTS |= {
    "eos that is never learnt": lambda: weighed(learn_no_end),
    "divisor by local weight": divide_by_own_weight,
    "off by one after resume": resume_a_step_late,
    "biases by the wrong sign": lambda: other_signs(lambda n: (len(n) * n - n.sum()).sign()),
    "biases by a mean over ranks": lambda: other_signs(
        lambda n: (n.sum() / ranks() - len(n) * n).sign()
    ),
    "biases of a rank's own counts": count_own_tokens,
}
PLANTS.get(PLANTED, lambda: CALLBACKS.update(fault=Gradients()))()
OF_A_RUN[:] = [check for check in OF_A_RUN if check.__module__.endswith(os.environ["CHECK"])]
