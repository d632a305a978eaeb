"""The length of a run: its steps, and a check that its learning rate has time to rise."""

import math
from dataclasses import dataclass

from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.schema import Batch, Optim, Schedule, Train
from fsdp_trainer.data.order.epoch_ends import EpochEnds
from fsdp_trainer.data.store.findings import Finding
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate, warmup_steps

FEW_STEPS = 50


@dataclass(frozen=True)
class RunLength:
    """The length of a new run. rows_per_epoch: counts only without train.steps."""

    train: Train
    batch: Batch
    optim: Optim
    schedule: Schedule
    rows_per_epoch: int = 0

    @property
    def rows(self) -> int:
        if self.train.steps is not None:
            steps, rows = self.train.steps, self.batch.rows
            return self.ends.row_after(steps, rows, 0) if self.ends else steps * rows
        return math.ceil((self.train.epochs or 1) * self.rows_per_epoch)

    @property
    def steps(self) -> int:
        if self.train.steps is None and self.ends:
            return self.ends.steps(self.batch.rows, 0, self.rows)
        return math.ceil(self.rows / self.batch.rows)

    @property
    def ends(self) -> EpochEnds | None:
        is_cut = not self.batch.across_epochs and self.rows_per_epoch
        return EpochEnds(0, self.rows_per_epoch) if is_cut else None

    def highest_rate(self, first: int, steps: int, warmup: int) -> tuple[float, int]:
        last = warmup + (self.schedule.from_zero and warmup > 0)
        step = max(first, min(max(1, last), steps))
        peak = peak_learning_rate(self.optim, self.batch)
        return learning_rate(self.schedule, peak, step, steps, warmup), step

    def findings(self) -> list[Finding]:
        return [*self._rate_findings(), *self._length_findings()]

    def _rate_findings(self) -> list[Finding]:
        peak, highest = peak_learning_rate(self.optim, self.batch), self.optim.spec.highest_lr
        if peak <= highest:
            return []
        text = f"the learning rate is {peak:g}: with {self.optim.name} no model learns above "
        text += f"{highest:g}"
        return [Finding(text, "use  optim.lr=1e-5  for a trained model,  optim.lr=3e-4  for a new")]

    def _length_findings(self) -> list[Finding]:
        """Return the finding that all steps of the run are warm-up, or few.

        Few steps are one only where the data decides their number.
        """
        steps, warmup = self.steps, warmup_steps(self.schedule, self.steps)
        is_few = self.train.steps is None and steps < FEW_STEPS
        more = self.more_steps() if is_few else ""
        if warmup >= max(2, steps):
            rate, _ = self.highest_rate(1, steps, warmup)
            text = f"the warm-up takes {counted(warmup, 'step')} and the run has {steps:,}: "
            text += f"the learning rate only rises, to {rate:.3g}"
            if rate < (peak := peak_learning_rate(self.optim, self.batch)):
                text += f", below {peak:g}"
            return [Finding(text, f"use  schedule.warmup=0.03{f' , and  {more}' if more else ''}")]
        text = f"the run has {counted(steps, 'step')}, too few to change the weights much"
        return [Finding(text, f"use  {more}")] if is_few else []

    def more_steps(self) -> str:
        """Return overrides that give enough steps, and how many these are."""
        rows = self.rows
        fewer = 1 << max(0, (rows // FEW_STEPS).bit_length() - 1)
        words = [f"batch.rows={fewer}"] if fewer != self.batch.rows else []
        if fewer < self.batch.micro_rows:
            words.append("batch.micro_rows=1")
        if rows < FEW_STEPS:
            times = math.ceil(FEW_STEPS / rows)
            words.append(f"train.epochs={(self.train.epochs or 1) * times:g}")
            rows *= times
        return f"{' '.join(words)}  for {math.ceil(rows / fewer):,} steps"
