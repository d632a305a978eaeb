"""A step of a real training as `rehearse` records one, and that of the rehearsal."""

import math
import pickle
import time
from pathlib import Path
from unittest.mock import patch

import inject
import torch.distributed as dist

from fsdp_trainer.apps.rehearse.comparison import compare
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.parallel import gloo_messages
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.plan_inputs import architecture, single_target
from fsdp_trainer.planning.rehearse.rank_step import hold_states, names_of_groups
from fsdp_trainer.planning.rehearse.step_recorder import StepRecorder

RECORDED = 2
"""The step that is recorded: in the first one, optimizers make their state."""
PATIENCE = 20.0
"""Seconds in a step that gloo's threads get to release tensors which nothing else holds."""


class SettledRecorder(StepRecorder):
    """A recorder that, above `limit` bytes, waits for gloo's threads to release what they hold."""

    def __init__(self, limit):
        super().__init__(gloo=True)
        self.limit = limit
        self.waited = 0.0

    def _judge(self, passing):
        while self.total + passing > self.limit and self.waited < PATIENCE:
            began = time.monotonic()
            time.sleep(0.001)
            self.waited += time.monotonic() - began
        super()._judge(passing)


@inject.fault
def recording(folder, limits):
    """Record RECORDED on every rank, into a file for each in `folder`, which is made.

    limits: bytes that are expected of some ranks, and a little more.
    """

    def record(real, runner, step, *others):
        if step.plan.step != RECORDED:
            return real(runner, step, *others)
        recorder = SettledRecorder(limits.get(dist.get_rank(), math.inf))
        hold_states([runner.model], runner.optimizer, recorder)
        # the plan and the rehearsal know messages by the names that FSDP2 calls
        named = patch.object(gloo_messages, "is_gloo", lambda _group: False)
        with named, recorder.watching(runner.model):
            result = real(runner, step, *others)
        called = calls(recorder.collectives, names_of_groups(runner.dims))
        file = Path(folder) / str(dist.get_rank())
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps((called, recorder.peak, dict(recorder.work))))
        return result

    with inject.around("train_step", record):
        yield


def recorded(folder, ranks):
    """Return the calls, the peak and the work of each rank."""
    return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def calls(collectives, groups):
    """Return of each collective what is the same on all ranks of a kind."""
    return [
        (groups.get(one.ranks, "world"), len(one.ranks), one.op, one.bytes, one.dtype, one.module)
        for one in collectives
    ]


def passed(step):
    """Return the bytes of all that a rank sends to other stages and receives; 0 without stages."""
    return sum(one.bytes for one in step.collectives if one.peer is not None)


def run_of(words, ranks):
    """Return a run on a CPU, configured by overrides."""
    words = [*words, "launch.device=cpu", f"plan.world_size={ranks}"]
    cfg = compose("rehearse", words, None, inputs=False)
    config, _ = architecture(cfg)
    return Candidate(cfg, config, *single_target(cfg, ""))


def rehearsal_of(words, ranks):
    """Return the PlanComparison of a run on a CPU, configured by overrides."""
    return compare(run_of(words, ranks), lambda line: None)
