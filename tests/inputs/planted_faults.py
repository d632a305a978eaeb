"""Faults in the processes of a proof, which import this module: PLANTED names the fault.

The program itself is changed, as a mistake in it would change it. CHECK names the module of the
only check that is asked.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from fsdp_trainer.apps.generate import Asked, Speaker
from fsdp_trainer.apps.prove.registry import OF_A_RUN
from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.extensions import CALLBACKS, Callback
from fsdp_trainer.training.batches import Assembler, Batches
from fsdp_trainer.training.step import ForwardBackward

PLANTED = os.environ.get("PLANTED")


def ranks() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def leak() -> None:
    """Let all documents of a row see each other."""
    layout = Assembler.layout

    def joined(self, documents, length):
        return layout(self, [[sum(row)] if row else [] for row in documents], length)

    Assembler.layout = joined


def weighed(change) -> None:
    """Change the weights of tokenized samples."""
    weigh = SampleBuilder._weigh

    def changed(self, encoding, text):
        sample = weigh(self, encoding, text)
        change(self, sample)
        return sample

    SampleBuilder._weigh = changed


def learn_questions(builder, sample) -> None:
    """Learn all tokens."""
    sample.weights[:] = 1


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


def chat_otherwise() -> None:
    """Write a space after what chat asks with."""
    ask = Speaker.ask

    def changed(self, messages, text_of=None):
        return Asked(ask(self, messages, text_of).text + " ")

    Speaker.ask = changed


PLANTS = {
    "leak between documents": leak,
    "wrong mask": lambda: weighed(learn_questions),
    "eos that is never learnt": lambda: weighed(learn_no_end),
    "divisor by local weight": divide_by_own_weight,
    "off by one after resume": resume_a_step_late,
    "template that differs in chat": chat_otherwise,
}
CHANGED = [
    (Assembler, "layout"), (SampleBuilder, "_weigh"), (ForwardBackward, "compute"),
    (Batches, "plans"), (Speaker, "ask"),
]  # fmt: skip
"""What the plants change."""
if PLANTED:
    PLANTS.get(PLANTED, lambda: CALLBACKS.update(fault=Gradients()))()
    OF_A_RUN[:] = [check for check in OF_A_RUN if check.__module__.endswith(os.environ["CHECK"])]
