"""The parts of a run's wall time, from its first start to its last line or event.

docs/report.md defines each part.
"""

from dataclasses import dataclass, field

import numpy as np

from fsdp_trainer.apps.report.read import RecordedRun, continued_from
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.phases import CHECKPOINT

PARTS = {
    "training": "steps that count",
    "data": "waiting for data",
    "validation": "validation, samples and tasks",
    "checkpoint": "training waits for a checkpoint",
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
        "evaluation": "validation",
    }
    | dict.fromkeys(("forward", "backward", "clip", "update", "read"), "training")
    | dict.fromkeys(("rollouts", "environments", "rewards"), "training")
    | dict.fromkeys(CHECKPOINT, "checkpoint")
)
OUTSIDE = ("start", "rewind")  # phases outside steps


@dataclass
class RunAttempt:
    """The part of a run from a start, a resume or a rewind to the next one. Times in Unix seconds.

    event: the event that began it. began: start of its process, or of the rewind. ready: start of
    its first step. step: the step that it continues from. events: its events. last_step: its last
    step that no later attempt repeats. ended: time of its last line or event. lines: its rows of
    the metrics.
    """

    event: Json
    began: float
    ready: float
    step: int
    events: list[Json] = field(default_factory=list)
    last_step: float = np.inf
    ended: float = 0.0
    lines: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def end(self) -> Json:
        return next((e for e in reversed(self.events) if e["event"] == "end"), {})

    @property
    def is_rewind(self) -> bool:
        return self.event["event"] == "rewind"

    def reached(self, figure: str) -> float:
        """Return the `step` or `time` that the previous attempt had reached; 0 if not recorded."""
        return float((self.event.get("reached") or {}).get(figure) or 0)


@dataclass
class Goodput:
    """The division of a run's wall time.

    seconds: of each of PARTS; they sum to `wall`. lost_steps: number of steps that were done twice.
    """

    seconds: dict[str, float]
    wall: float
    attempts: int
    lost_steps: int

    def share(self, part: str) -> float:
        return self.seconds[part] / self.wall if self.wall else 0.0

    @property
    def while_running(self) -> float:
        """Training's share of the time during which an attempt was running."""
        ran = self.wall - self.seconds["down"]
        return self.seconds["training"] / ran if ran else 0.0


def attempts_of(run: RecordedRun) -> list[RunAttempt]:
    """Return a run's attempts in order.

    Events after an attempt's end belong to no attempt. A command that finds the run finished writes
    such an event and trains nothing.
    """
    attempts: list[RunAttempt] = []
    for event in run.events:
        step = continued_from(event)
        if step is not None:
            began = event["time"] - float(event.get("seconds") or 0.0)
            attempts.append(RunAttempt(event, began, event["time"], step))
        if attempts and not attempts[-1].end:
            attempts[-1].events.append(event)
    for i, attempt in enumerate(attempts):
        _find_end(attempt, attempts[i + 1 :], run)
    return attempts


def _find_end(attempt: RunAttempt, later: list[RunAttempt], run: RecordedRun) -> None:
    attempt.last_step = min((a.step for a in later), default=np.inf)
    first, stop = np.searchsorted(run.column("step"), [attempt.step, attempt.last_step], "right")
    attempt.lines = slice(int(first), int(stop))
    times = run.column("time")[attempt.lines]
    signs = [event["time"] for event in attempt.events] + times[~np.isnan(times)].tolist()
    if later:
        following = later[0]
        reached = following.began if following.is_rewind else following.reached("time")
        signs.append(min(reached, following.began))
    attempt.ended = max(signs)


def goodput(run: RecordedRun) -> Goodput | None:
    """Return the division of a run's time; None without a recorded attempt or phase times."""
    attempts = attempts_of(run)
    if not attempts or (run.lines and not phases_of(run)):
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    for i, attempt in enumerate(attempts):
        if i:
            seconds["down"] += max(0.0, attempt.began - attempts[i - 1].ended)
        parts = _seconds_of(run, attempt, is_last=attempt is attempts[-1])
        for part, spent in parts:
            seconds["restart" if part == "startup" and i else part] += spent
    wall = attempts[-1].ended - attempts[0].began
    del seconds["other"]
    seconds["other"] = wall - sum(seconds.values())
    if seconds["other"] < 0:  # rounding, or a clock that was adjusted
        seconds["training"] += seconds["other"]
        seconds["other"] = 0.0
    lost = sum(max(0, int(a.reached("step") or a.event["step"]) - a.step) for a in attempts[1:])
    return Goodput(seconds, wall, len(attempts), lost)


def _seconds_of(run: RecordedRun, attempt: RunAttempt, is_last: bool) -> list[tuple[str, float]]:
    startup = "restart" if attempt.is_rewind else "startup"
    steps = _by_part(phases_of(run, attempt.lines)) or {startup: attempt.ready - attempt.began}
    times = run.column("time")[attempt.lines]
    last_line = float(times[-1]) if len(times) else attempt.ready
    rest = attempt.ended - last_line
    after_steps = _after_steps(attempt, last_line, limit=max(0.0, rest))
    parts = [*steps.items(), *after_steps.items()]
    if not is_last and attempt.end.get("exit_code") != 75:
        parts.append(("redone", max(0.0, rest - sum(after_steps.values()))))
    return parts


def _after_steps(attempt: RunAttempt, last_line: float, limit: float) -> dict[str, float]:
    """Return the seconds of each part after the last line of the metrics, each at most `limit`."""
    parts = _by_part(attempt.end.get("phases") or {})
    if not parts:
        saves = (e for e in attempt.events if e["event"] == "checkpoint" and e["time"] > last_line)
        stalls = (e.get("stall_seconds") or e.get("seconds") or 0 for e in saves)
        parts = {"checkpoint": sum(map(float, stalls))}
    counted_before = ("startup", "restart")
    return {p: min(value, limit) for p, value in parts.items() if p not in counted_before}


def phases_of(run: RecordedRun, lines: slice = slice(None)) -> dict[str, float]:
    """Return the seconds in each phase over some rows of the metrics; {} for old versions' runs."""
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
