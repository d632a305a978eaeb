"""Faults in the processes of a proof, which import this module: PLANTED names the fault.

CHECK names the module of the only check that is asked.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from planted_faults import PLANTS, weighed

from fsdp_trainer.apps.prove.registry import OF_A_RUN
from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.extensions import CALLBACKS, Callback
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


PLANTS |= {
    "eos that is never learnt": lambda: weighed(learn_no_end),
    "divisor by local weight": divide_by_own_weight,
    "off by one after resume": resume_a_step_late,
}
PLANTS.get(PLANTED, lambda: CALLBACKS.update(fault=Gradients()))()
OF_A_RUN[:] = [check for check in OF_A_RUN if check.__module__.endswith(os.environ["CHECK"])]
