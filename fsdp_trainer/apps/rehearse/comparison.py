"""A rehearsal beside the plan of the same run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fsdp_trainer.apps.plan.rehearsed_plan import shown_by, with_facts
from fsdp_trainer.config.devices import Device
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.pipeline_stages import classes_of_stages
from fsdp_trainer.planning.plan.plan import RunPlan
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.rehearse.rehearsal import EVERYONE, Rehearsal, rehearse
from fsdp_trainer.planning.rehearse.rehearsed_run import rehearsed_run, without_left_out
from fsdp_trainer.planning.rehearse.rows import rows_of_run


@dataclass(frozen=True)
class PlanComparison:
    """A rehearsal, and two plans.

    plan: of the run as configured, with what the rehearsal shows; same: of the run as rehearsed,
    without what is left out, by arithmetic alone; left_out: a sentence for each such key; seconds:
    how long the rehearsal took.
    """

    rehearsal: Rehearsal
    plan: RunPlan
    same: RunPlan
    left_out: list[str]
    seconds: float

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def tensors(self) -> int:
        return self.rehearsal.largest.peak

    @property
    def fits(self) -> bool:
        """True if the device has enough memory for the peak; False if no kind finished a step."""
        return self.tensors > 0 and self.plan.fits

    @property
    def passes(self) -> bool:
        return self.rehearsal.finishes and self.fits

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that the busiest rank sends, by dimension."""
        sent = self.rehearsal.busiest.sent() if self.tensors else {}
        return {name: size for name, size in sent.items() if name != EVERYONE}

    @property
    def planned(self) -> dict[str, float]:
        """The same by arithmetic; a rehearsal has one group of ranks."""
        sent = self.same.bytes_sent.items()
        return {name: size for name, size in sent if name != "groups" and size}

    @property
    def across(self) -> float:
        """Bytes that the busiest rank sends to other nodes."""
        return self.rehearsal.busiest.across(self.device.linked_gpus) if self.tensors else 0.0


def compare(run: Candidate, report: Callable[[str], None]) -> PlanComparison:
    """Rehearse a run and plan it. report: gets lines on progress. Raises UserError."""
    started = time.perf_counter()
    rehearsed, left_out = without_left_out(run)
    same = rehearsed.plan()
    planned = PlannedRun.of(rehearsed.cfg, run.config, run.world, run.known)
    stages = classes_of_stages(planned.model.whole, planned.layout)
    labelled, rows, notes = rows_of_run(rehearsed)
    rehearsal = rehearse(rehearsed_run(labelled, rows), stages, report)
    seconds = time.perf_counter() - started
    plan = run.plan() if left_out else same
    if rehearsal.largest.step:
        plan = with_facts(run, plan, same, shown_by(rehearsal, run))
    return PlanComparison(rehearsal, plan, same, [*left_out, *notes], seconds)
