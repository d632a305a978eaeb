"""Recorder of a proof's ranks: a callback that is imported in them, as by --import.

Every rank writes its own parts, without a message, so that a copy which differs from the others
shows.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.proof.recordings import FOLDER, GRADIENTS, NUDGE
from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.extensions import Callback, RunInfo, register
from fsdp_trainer.models.decoder import stored_buffers


@register("callback", "recorder of prove")
class Recorder(Callback):
    """Writes weights at the start and the end, and the gradients of some steps."""

    def start(self, run: RunInfo) -> None:
        if share := float(os.environ.get(NUDGE, "0")):
            nudge(run, share)
        write(run, "start", all_weights(run))

    def gradients(self, run: RunInfo, step: int) -> None:
        if step not in GRADIENTS:
            return
        trained = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained}
        write(run, f"gradients-{step}", {name: (True, g) for name, g in gradients.items()})

    def rollouts(self, run: RunInfo, step: int, rollouts: Sequence[Any]) -> None:
        answers = [
            {
                "row": one.row,
                "prompt": one.prompt,
                "tokens": one.answer.tokens,
                "own_turns": [(turn.start, turn.stop) for turn in one.answer.own_turns],
                "sampled": one.answer.log_probabilities,
                "finished": one.answer.finished,
                "reward": one.reward if one.is_used else None,
                "turn_rewards": one.turn_rewards,
            }
            for one in rollouts
        ]
        if run.rank == 0:
            file = Path(os.environ[FOLDER]) / f"rollouts-{step}.json"
            file.write_text(json.dumps(answers))

    def end(self, run: RunInfo, reason: str, exit_code: int) -> None:
        write(run, "end", all_weights(run))


def all_weights(run: RunInfo) -> dict[str, tuple[bool, Tensor]]:
    parameters = {name: (p.requires_grad, p) for name, p in run.model.named_parameters()}
    buffers = {name: (False, buffer) for name, buffer in stored_buffers(run.model).items()}
    return {**parameters, **buffers}


def write(run: RunInfo, name: str, tensors: dict[str, tuple[bool, Tensor]]) -> None:
    parts = {
        key: (trained, tuple(t.shape), [part.start for part in local_slice(t)], on_host(t))
        for key, (trained, t) in tensors.items()
    }
    torch.save(parts, Path(os.environ[FOLDER]) / f"{name}.rank{run.rank}.pt")


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's part of a tensor."""
    return local_part(tensor.detach()).to("cpu", copy=True)


@torch.no_grad()
def nudge(run: RunInfo, share: float) -> None:
    """Change each number of the trained weights by a share, up or down in turn."""
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            local = local_part(parameter)
            up = torch.arange(local.numel()).view_as(local) % 2
            local.mul_(1 + share * (2 * up - 1))
