"""A rehearsal beside the plan of the same run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fsdp_trainer.config.devices import Device
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.pipeline_stages import classes_of_stages
from fsdp_trainer.plan.plan import RunPlan
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.wire import Wire
from fsdp_trainer.rehearse.rehearsal import EVERYONE, Rehearsal, rehearse
from fsdp_trainer.rehearse.rehearsed_run import rehearsed_run, without_left_out
from fsdp_trainer.rehearse.rows import rows_of_run


@dataclass(frozen=True)
class PlanComparison:
    """A rehearsal, and two plans.

    plan: of the run as configured; same: of the run as rehearsed, without what is left out;
    left_out: a sentence for each such key; seconds: how long the rehearsal took.
    """

    rehearsal: Rehearsal
    plan: RunPlan
    same: RunPlan
    left_out: list[str]
    seconds: float

    @property
    def device(self) -> Device:
        """The device of each rank."""
        return self.plan.device

    @property
    def planned_tensors(self) -> float:
        """Bytes of tensors at the peak of the plan of the run as rehearsed."""
        return self.same.memory.tensors

    @property
    def tensors(self) -> int:
        """Bytes of tensors at the largest peak of all kinds."""
        return self.rehearsal.largest.peak

    @property
    def peak_bytes(self) -> float:
        """Peak of a rank: the plan's, corrected by the difference that the rehearsal shows."""
        return self.plan.peak_bytes + self.tensors - self.planned_tensors

    @property
    def fits(self) -> bool:
        """True if the device has enough memory for that peak; False if no kind finished a step."""
        return self.tensors > 0 and self.peak_bytes <= self.plan.memory_bytes

    @property
    def passes(self) -> bool:
        """True if every rank finishes its step and fits."""
        return self.rehearsal.finishes and self.fits

    @property
    def sent(self) -> dict[str, tuple[float, float]]:
        """Bytes that the busiest rank sends, rehearsed and planned, by dimension."""
        busiest = self.rehearsal.busiest
        rehearsed = busiest.sent() if busiest.step else {}
        wires = self._planned_wires.items()
        planned = {name: wire.gathered + wire.reduced for name, wire in wires}
        names = [name for name in {**planned, **rehearsed} if name != EVERYONE]
        both = {name: (rehearsed.get(name, 0.0), planned.get(name, 0.0)) for name in names}
        return {name: pair for name, pair in both.items() if any(pair)}

    @property
    def across(self) -> tuple[float, float]:
        """Bytes that the busiest rank sends to other nodes, rehearsed and planned."""
        busiest = self.rehearsal.busiest
        rehearsed = busiest.across(self.device.linked_gpus) if busiest.step else 0.0
        return rehearsed, sum(wire.across for wire in self._planned_wires.values())

    @property
    def _planned_wires(self) -> dict[str, Wire]:
        """What a rank sends in each dimension; a rehearsal has one group of ranks."""
        return {name: wire for name, wire in self.same.wire.items() if name != "groups"}

    @property
    def figures(self) -> list[tuple[str, float, float]]:
        """Names of figures in bytes, each rehearsed and planned."""
        rows = [("peak of tensors", float(self.tensors), self.planned_tensors)]
        rows += [(f"sent: {name}", *pair) for name, pair in self.sent.items()]
        if any(self.across):
            rows.append(("sent to other nodes", *self.across))
        return rows


def compare(run: Candidate, report: Callable[[str], None]) -> PlanComparison:
    """Rehearse a run and plan it. report: gets lines on progress. Raises UserError."""
    started = time.perf_counter()
    rehearsed, left_out = without_left_out(run)
    same = rehearsed.plan()
    planned = PlannedRun.of(rehearsed.cfg, run.config, run.world, run.known)
    stages = classes_of_stages(planned.model.whole, planned.layout)
    rows, notes = rows_of_run(rehearsed)
    rehearsal = rehearse(rehearsed_run(rehearsed, rows), stages, report)
    seconds = time.perf_counter() - started
    plan = run.plan() if left_out else same
    return PlanComparison(rehearsal, plan, same, [*left_out, *notes], seconds)
