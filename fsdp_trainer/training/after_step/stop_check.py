"""The agreement of the ranks, after each step and during long work, on whether to go on."""

from dataclasses import dataclass

from fsdp_trainer.base import phases
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.step_log import StepLog
from fsdp_trainer.training.after_step.saving import CheckpointManager
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import StopSignals

SLOW_DISK = 200e6
"""Assumed write speed of each rank in bytes per second, until a checkpoint has been measured."""


def assumed_save_seconds(model: Decoder, ranks: int) -> float:
    """Return the assumed seconds of a save until one has been measured: weights and two moments."""
    size = sum(p.numel() * p.element_size() for p in model.whole.parameters())
    return size * 3 / ranks / SLOW_DISK


@dataclass
class StopCheck:
    """Exchanges the ranks' reasons to stop and their failures. Its methods are collective."""

    signals: StopSignals
    checkpoints: CheckpointManager
    step_log: StepLog
    first_save_seconds: float
    """Assumed seconds of a save until one has been measured."""

    def sync(self, progress: Progress) -> None:
        """Exchange the ranks' reasons to stop and their failures.

        If any rank has no data for the step, which has then changed nothing, raises DataLost, or
        the Stop that interrupted its wait.
        """
        phases.enter("agree")
        agreement = self.signals.sync(self.seconds_to_stop(), self.checkpoints.store.failed)
        if agreement.save_failed:
            phases.enter("staging")  # other ranks may still be writing their part
            self.checkpoints.settle(progress)
        if agreement.data_missing:
            self.signals.raise_data_error()
            self.signals.raise_if_agreed()
            raise AssertionError("a rank has no data, and none knows why")

    def stop_if_agreed(self, progress: Progress) -> None:
        self.sync(progress)
        self.signals.raise_if_agreed()

    def within(self, phase: str, progress: Progress) -> None:
        """Raise Stop or DataLost if needed in a phase that can be interrupted, else re-enter it."""
        self.stop_if_agreed(progress)
        phases.enter(phase)

    def seconds_to_stop(self) -> float:
        """Return an upper estimate of the seconds for the next step and a checkpoint after it.

        It is the longest step so far, plus 1.25 times the longest save so far (twice that with
        checkpoint.mode=async), plus two seconds. On the rank that uploads, the longest upload is
        part of a save.
        """
        store = self.checkpoints.store
        seconds = store.longest_save or self.first_save_seconds
        if store.mirror:
            seconds += store.mirror.longest
        saves = 2 if store.cfg.mode == "async" else 1  # one may already be in progress
        return self.step_log.longest_interval + 1.25 * saves * seconds + 2.0
