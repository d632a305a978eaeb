"""A run in figures: for the head of the page, for the terminal, and for scripts."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fsdp_trainer.data.preview_text import heading
from fsdp_trainer.report.goodput import OUTSIDE, PARTS, Goodput, goodput, phases_of
from fsdp_trainer.report.read import RecordedRun, differing, overrides

SPARKS, WIDTH = "▁▂▃▄▅▆▇█", 60
SHOWN = 12  # runs with a summary of their own at the terminal, and keys that differ


@dataclass
class Summary:
    """Figures of one run."""

    run: RecordedRun

    @cached_property
    def goodput(self) -> Goodput | None:
        """None where nothing was started."""
        return goodput(self.run)

    @cached_property
    def events(self) -> Counter:
        """How many there are of each kind."""
        return Counter(event["event"] for event in self.run.events)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Mean seconds a step in each phase; {} of old runs."""
        found = {
            phase: spent / self.run.lines
            for phase, spent in phases_of(self.run).items()
            if phase not in OUTSIDE
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def about(self) -> list[str]:
        """Model, world and data, as the last start told them."""
        return next(
            (event["about"] for event in reversed(self.run.events) if event.get("about")), []
        )

    @property
    def objective(self) -> float | None:
        """What a sweep compares: the job's own, else the last validation loss, else the last loss."""
        if self.run.job:
            return self.run.job.get("objective")
        last = self.run.last("validation_loss")
        return self.run.last("loss") if last is None else last

    @property
    def seconds(self) -> float | None:
        """From the first start to the last sign of life."""
        return self.goodput.wall if self.goodput else (self.run.job or {}).get("seconds")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the page's head and the terminal say."""
        run, last, good = self.run, self.run.last, self.goodput
        starts = [event for event in run.events if event["event"] in ("start", "resume")]
        total, best = run.configuration.get("train.steps"), run.least("validation_loss")
        speed = run.column("tokens_per_second")
        facts = [
            ("state", f"{run.state}: {run.why}" if run.why else run.state),
            (
                "started",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(starts[0]["time"]))
                if starts
                else None,
            ),
            (
                "took",
                f"{duration(good.wall)}{f', {good.attempts} attempts' if good.attempts > 1 else ''}"
                if good
                else None,
            ),
            (
                "steps",
                f"{short(last('step'))}{f' of {total:,}' if isinstance(total, int) else ''}"
                if run.lines
                else None,
            ),
            ("tokens", short(last("tokens")) if run.lines else None),
            (
                "loss",
                f"{short(last('loss'))}, lowest {short(lowest[1])}"
                if (lowest := run.least("loss"))
                else None,
            ),
            (
                "validation",
                f"{short(last('validation_loss'))}, lowest {short(best[1])} after step {best[0]:,}"
                if best
                else None,
            ),
            (
                "world",
                " → ".join(
                    dict.fromkeys(
                        f"{count} rank{'s' * (count != 1)}"
                        for event in starts
                        if (count := event.get("world_size"))
                    )
                )
                or None,
            ),
            (
                "speed",
                f"{short(float(np.nanmedian(speed)))} tokens/s (median)"
                if not np.isnan(speed).all()
                else None,
            ),
            ("goodput", goodput_in_words(good) if good else None),
        ]
        return [(name, value) for name, value in facts if value is not None]

    def figures(self) -> dict[str, Any]:
        """For scripts."""
        run, good = self.run, self.goodput
        names = (
            "step",
            "tokens",
            "loss",
            "validation_loss",
            "tokens_per_second",
            "memory_gib",
            "mfu_palm",
            "mfu_causal",
        )
        return {
            "name": run.name,
            "folder": str(run.folder),
            "state": run.state,
            "reason": run.reason,
            **{name: run.last(name) for name in names},
            "best_validation_loss": (run.least("validation_loss") or (None, None))[1],
            "objective": self.objective,
            "wall_seconds": good and good.wall,
            "goodput": good and good.share("training"),
            "goodput_while_running": good and good.while_running,
            "goodput_seconds": good and good.seconds,
            "attempts": good and good.attempts,
            "lost_steps": good and good.lost_steps,
            "phases": self.phases,
            "events": dict(self.events),
            "overrides": (run.job or {}).get("overrides"),
            "remarks": run.remarks,
        }


def by_objective(summaries: Sequence["Summary"]) -> list["Summary"]:
    """Return the runs with the best first; those without a figure come last."""
    return sorted(summaries, key=lambda s: (s.objective is None, s.objective or 0.0))


def goodput_in_words(good: Goodput) -> str:
    """The share of training, and of what cost more than 1%."""
    parts = sorted(
        ((part, good.share(part)) for part in PARTS if part != "training"),
        key=lambda item: -item[1],
    )
    rest = ", ".join(f"{part} {share:.1%}" for part, share in parts if share >= 0.01)
    ran = f" ({good.while_running:.1%} while it ran)" if good.share("down") >= 0.01 else ""
    return f"{good.share('training'):.1%} training{ran}" + (f"; {rest}" if rest else "")


def duration(seconds: float | None) -> str:
    """For people, e.g. 2 h 31 m."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {left:02} s"
    return f"{minutes // 60} h {minutes % 60:02} m"


def short(value: float | None) -> str:
    """A number for people: four digits, and the thousands apart."""
    if value is None:
        return "–"
    if value == int(value) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def sparkline(values: np.ndarray) -> str:
    """A column in WIDTH characters, each the mean of its part."""
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return ""
    means = np.array([part.mean() for part in np.array_split(known, min(WIDTH, len(known)))])
    height = (means - means.min()) / ((means.max() - means.min()) or 1.0)
    return "".join(SPARKS[round(h * (len(SPARKS) - 1))] for h in height.tolist())


def show(summaries: list[Summary], console: Console) -> None:
    """Print it: a table of all runs, and of a few each on its own."""
    runs = [summary.run for summary in summaries]
    if len(summaries) > 1:
        varied = overrides(runs)
        table = Table(
            "run",
            *map(escape, varied),
            "objective",
            "state",
            "steps",
            "took",
            "goodput",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        for summary in by_objective(summaries):
            good = f"{summary.goodput.share('training'):.0%}" if summary.goodput else ""
            run, steps = summary.run, summary.run.last("step")
            settings = [Text(run.given.get(key, "")) for key in varied]
            table.add_row(
                Text(run.name),
                *settings,
                short(summary.objective),
                Text(run.state),
                short(steps),
                duration(summary.seconds),
                good,
            )
        console.print(table)
    for summary in summaries[: SHOWN if len(summaries) <= SHOWN else 0]:
        show_one(summary, console)
    if different := differing(runs):
        heading(console, "keys that differ")
        for key, values in list(different.items())[:SHOWN]:
            console.print(
                Text(f"{key}: {', '.join(filter(None, dict.fromkeys(map(str, values))))}"),
                soft_wrap=True,
            )
        if len(different) > SHOWN:
            console.print(f"and {len(different) - SHOWN} more, in the page")


def show_one(summary: Summary, console: Console) -> None:
    """One run."""
    run, grid = summary.run, Table.grid(padding=(0, 2))
    heading(console, run.name)
    for name, value in summary.facts:
        grid.add_row(Text(name, "dim"), Text(value))
    if line := sparkline(run.column("loss")):
        grid.add_row(Text("", "dim"), Text(line))
    if summary.phases:
        grid.add_row(
            Text("a step", "dim"),
            Text(
                ", ".join(
                    f"{phase} {spent:.3g} s" for phase, spent in list(summary.phases.items())[:6]
                )
            ),
        )
    if summary.events:
        grid.add_row(
            Text("events", "dim"),
            Text(", ".join(f"{count:,} {kind}" for kind, count in summary.events.most_common())),
        )
    console.print(grid)
    for remark in run.remarks:
        console.print(Text(f"note: {remark}", "dim"), soft_wrap=True)
    if run.state == "nothing yet":
        console.print(Text("nothing is on record yet"))
