"""Where a run's wall time went, from its first start to its last sign of life. docs/report.md defines each part."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp_trainer.phases import CHECKPOINT
from fsdp_trainer.report.read import RecordedRun

PARTS = {
    "training": "steps that count",
    "data": "waiting for data",
    "validation": "validation and samples",
    "checkpoint": "training stands still for a checkpoint",
    "compile": "compiling",
    "startup": "the first start, until the first step",
    "restart": "later starts and rewinds, until their first step",
    "redone": "steps whose work a crash or a rewind lost",
    "down": "nothing ran between two attempts",
    "other": "the rest: logging, agreeing, profiles, export, leaving",
}
OF_PHASE = (
    {
        "data": "data",
        "compile": "compile",
        "start": "startup",
        "rewind": "restart",
        "validation": "validation",
        "samples": "validation",
    }
    | dict.fromkeys(("forward", "backward", "clip", "update", "read"), "training")
    | dict.fromkeys(CHECKPOINT, "checkpoint")
)
OUTSIDE = ("start", "rewind")  # phases that are no part of a step


@dataclass
class Attempt:
    """From a start, a resume or a rewind to the next. began: when its process did; ready: its first step; step: from which it goes on.

    kept: the last of its steps that no later attempt did again; ended: its last sign of life; lines: where its metrics are.
    """

    event: dict[str, Any]
    began: float
    ready: float
    step: int
    events: list[dict[str, Any]] = field(default_factory=list)
    kept: float = np.inf
    ended: float = 0.0
    lines: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def end(self) -> dict[str, Any]:
        """Its last event, if it left in order."""
        return next((e for e in reversed(self.events) if e["event"] == "end"), {})


@dataclass
class Goodput:
    """seconds: of each of PARTS, which sum to `wall`; lost_steps: done twice."""

    seconds: dict[str, float]
    wall: float
    attempts: int
    lost_steps: int

    def share(self, part: str) -> float:
        """Of the wall time."""
        return self.seconds[part] / self.wall if self.wall else 0.0

    @property
    def while_running(self) -> float:
        """Training's share of the time in which something ran."""
        ran = self.wall - self.seconds["down"]
        return self.seconds["training"] / ran if ran else 0.0


def attempts_of(run: RecordedRun) -> list[Attempt]:
    """In their order. Words of a command that trained nothing, such as that a run is already finished, belong to none."""
    attempts: list[Attempt] = []
    for event in run.events:
        if event["event"] in ("start", "resume", "rewind"):
            began = event["time"] - float(event.get("seconds") or 0.0)
            step = int(event.get("to" if event["event"] == "rewind" else "step") or 0)
            attempts.append(Attempt(event, began, event["time"], step))
        if attempts and not attempts[-1].end:
            attempts[-1].events.append(event)
    steps, times = run.column("step"), run.column("time")
    for i, attempt in enumerate(attempts):
        later = attempts[i + 1 :]
        attempt.kept = min((a.step for a in later), default=np.inf)
        attempt.lines = slice(
            int(np.searchsorted(steps, attempt.step, "right")),
            int(np.searchsorted(steps, attempt.kept, "right")),
        )
        signs = [event["time"] for event in attempt.events] + times[attempt.lines][
            ~np.isnan(times[attempt.lines])
        ].tolist()
        if later:
            rewound = later[0].event["event"] == "rewind"
            reached = (
                later[0].began
                if rewound
                else float((later[0].event.get("reached") or {}).get("time") or 0.0)
            )
            signs.append(min(reached, later[0].began))
        attempt.ended = max(signs)
    return attempts


def goodput(run: RecordedRun) -> Goodput | None:
    """None of a run without an attempt on record, or whose version wrote no phase times."""
    attempts = attempts_of(run)
    if not attempts or (run.lines and not phases_of(run)):
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    for i, attempt in enumerate(attempts):
        again = attempts[i + 1 : i + 2]
        if i:
            seconds["down"] += max(0.0, attempt.began - attempts[i - 1].ended)
        startup = "restart" if attempt.event["event"] == "rewind" else "startup"
        _add(
            seconds,
            _by_part(phases_of(run, attempt.lines)) or {startup: attempt.ready - attempt.began},
            first=not i,
        )
        known = run.column("time")[attempt.lines]
        last = float(known[-1]) if len(known) else attempt.ready
        rest = attempt.ended - last
        told = _by_part(attempt.end.get("phases") or {})
        if not told:
            told = {
                "checkpoint": sum(
                    _stall(e)
                    for e in attempt.events
                    if e["event"] == "checkpoint" and e["time"] > last
                )
            }
        told = {
            part: min(value, max(0.0, rest))
            for part, value in told.items()
            if part not in ("startup", "restart")
        }  # which is above
        _add(seconds, told, first=not i)
        if again and attempt.end.get("exit_code") != 75:
            seconds["redone"] += max(0.0, rest - sum(told.values()))
    wall = attempts[-1].ended - attempts[0].began
    seconds["other"] = wall - sum(value for part, value in seconds.items() if part != "other")
    if seconds["other"] < 0:  # clocks that were set, and rounding
        seconds["training"] += seconds["other"]
        seconds["other"] = 0.0
    lost = sum(
        max(0, int((a.event.get("reached") or {}).get("step") or a.event["step"]) - a.step)
        for a in attempts[1:]
    )
    return Goodput(seconds, wall, len(attempts), lost)


def phases_of(run: RecordedRun, lines: slice = slice(None)) -> dict[str, float]:
    """Seconds in each phase, over some lines of the metrics; {} where an older version wrote them."""
    columns = {phase: values[lines] for phase, values in run.phases.items()}
    return {
        phase: float(np.nansum(values))
        for phase, values in columns.items()
        if not np.isnan(values).all()
    }


def _by_part(phases: dict[str, float]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for phase, spent in phases.items():
        part = OF_PHASE.get(phase, "other")
        parts[part] = parts.get(part, 0.0) + float(spent)
    return parts


def _stall(event: dict[str, Any]) -> float:
    return float(event.get("stall_seconds") or event.get("seconds") or 0.0)


def _add(seconds: dict[str, float], parts: dict[str, float], first: bool) -> None:
    for part, spent in parts.items():
        seconds["restart" if part == "startup" and not first else part] += spent
