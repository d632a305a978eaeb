"""The figures of a run, for the head of the page, the terminal and scripts."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.preview.preview_text import heading
from fsdp_trainer.apps.report.goodput import OUTSIDE, PARTS, Goodput, goodput, phases_of
from fsdp_trainer.apps.report.read import RecordedRun, differing, is_finite, overrides
from fsdp_trainer.config.methods import METHODS
from fsdp_trainer.observe.metric_groups import OWN, VALIDATION, group_title, order_of, title_of

SPARKS, WIDTH = "▁▂▃▄▅▆▇█", 60
SHOWN = 12  # most runs with their own summary at the terminal, and most differing keys shown


class Confusion(NamedTuple):
    """Numbers of validation texts, or words, by their label and by the label that they are given.

    counts: a row for each label that they have.
    """

    labels: list[str]
    counts: list[list[int]]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        texts = ([f"{count:,}" if count else "·" for count in row] for row in self.counts)
        return [(label, *row) for label, row in zip(self.labels, texts, strict=True)]


@dataclass
class Summary:
    run: RecordedRun

    @cached_property
    def goodput(self) -> Goodput | None:
        return goodput(self.run)

    @cached_property
    def events(self) -> Counter:
        return Counter(event["event"] for event in self.run.events)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Mean seconds per step in each phase, the longest first; {} for runs of old versions."""
        means = {
            phase: spent / self.run.lines
            for phase, spent in phases_of(self.run).items()
            if phase not in OUTSIDE
        }
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def confusion(self) -> Confusion | None:
        """Which labels are taken for which, of the last validation; None for other methods."""
        events = (event for event in reversed(self.run.events) if event["event"] == "confusion")
        return next((Confusion(each["labels"], each["counts"]) for each in events), None)

    @property
    def about(self) -> list[str]:
        return next(
            (event["about"] for event in reversed(self.run.events) if event.get("about")), []
        )

    @property
    def objective(self) -> float | None:
        """The figure by which runs are ordered, the lowest first.

        It is the objective of a sweep's job, else the last validation loss, else the last loss.
        """
        if self.run.job:
            return self.run.job.get("objective")
        last = self.run.last("validation_loss")
        return self.run.last("loss") if last is None else last

    @cached_property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The last value of each metric of the method and of the user's own, by group and name."""
        by_group: dict[str, dict[str, float]] = {}
        groups = self.run.groups
        for name in sorted(groups, key=order_of):
            group = groups[name]
            value = self.run.last(name) if group else None
            if value is not None:
                by_group.setdefault(group, {})[name] = value
        return dict(sorted(by_group.items(), key=lambda item: item[0] == OWN))

    @property
    def seconds(self) -> float | None:
        """The seconds from the first start to the last line or event."""
        return self.goodput.wall if self.goodput else (self.run.job or {}).get("seconds")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The (name, text) pairs of the figures in the page's head and at the terminal."""
        run = self.run
        state = f"{run.state}: {run.explanation}" if run.explanation else run.state
        facts = [("state", state), *self._starts()]
        if self.goodput:
            attempts = f", {self.goodput.attempts} attempts" if self.goodput.attempts > 1 else ""
            facts.append(("took", f"{duration(self.goodput.wall)}{attempts}"))
        facts += self._progress()
        facts += [(group_title(group), in_words(last)) for group, last in self.metrics.items()]
        facts += self._world_and_speed()
        if self.goodput:
            facts.append(("goodput", goodput_in_words(self.goodput)))
        if run.certificate:
            facts.append(("certificate", run.certificate.verdict))
        return facts

    def _starts(self) -> list[tuple[str, str]]:
        starts = [e["time"] for e in self.run.events if e["event"] in ("start", "resume")]
        local = (time.localtime(at) for at in starts[:1])
        return [("started", time.strftime("%Y-%m-%d %H:%M:%S", at)) for at in local]

    def _progress(self) -> list[tuple[str, str]]:
        run, facts = self.run, []
        if run.lines:
            total = run.configuration.get("train.steps")
            steps = f" of {total:,}" if isinstance(total, int) else ""
            facts.append(("steps", f"{short(run.last('step'))}{steps}"))
            facts.append(("tokens", short(run.last("tokens"))))
        lowest = run.minimum("loss")
        if lowest:
            facts.append(("loss", f"{short(run.last('loss'))}, lowest {short(lowest[1])}"))
        best = run.minimum("validation_loss")
        if best:
            lowest_at = f"lowest {short(best[1])} after step {best[0]:,}"
            facts.append(("validation", f"{short(run.last('validation_loss'))}, {lowest_at}"))
        bits = run.last("validation_bits_per_byte")
        if bits is not None:
            facts.append(("bits per byte", short(bits)))
        tasks = [name for name in run.metrics if name.startswith("tasks/")]
        facts += [(name.removeprefix("tasks/"), short(run.last(name))) for name in tasks]
        return facts

    def _world_and_speed(self) -> list[tuple[str, str]]:
        run, facts = self.run, []
        starts = (e for e in run.events if e["event"] in ("start", "resume"))
        sizes = dict.fromkeys(e["world_size"] for e in starts if e.get("world_size"))
        if sizes:
            worlds = (f"{size} rank{'s' * (size != 1)}" for size in sizes)
            facts.append(("world", " → ".join(worlds)))
        speeds = run.columns.speeds
        if len(speeds):
            facts.append(("speed", f"{short(float(np.median(speeds)))} tokens/s (median)"))
        return facts

    def figures(self) -> dict[str, Any]:
        run, good = self.run, self.goodput
        names = (
            "step",
            "tokens",
            "loss",
            "validation_loss",
            "validation_bits_per_byte",
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
            "best_validation_loss": (run.minimum("validation_loss") or (None, None))[1],
            "objective": self.objective,
            "method": run.method,
            "method_metrics": self.metrics.get(str(run.method), {}),
            "own_metrics": self.metrics.get(OWN, {}),
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
    return sorted(summaries, key=lambda s: (s.objective is None, s.objective or 0.0))


def main_metrics(runs: Sequence[RecordedRun]) -> dict[str, list[float | None]]:
    """Return the last values of the main metrics of the runs' methods, by their names in words.

    None stands for a run without the metric, or with another metric of this name.
    """
    mains = [
        run.method for run in runs if run.method in METHODS and METHODS[run.method].main_metric
    ]
    columns: dict[str, list[float | None]] = {}
    for method in dict.fromkeys(mains):
        name = METHODS[method].main_metric
        title = title_of(name, method)
        columns[name.replace("_", " ")] = [
            run.last(name) if title_of(name, str(run.method)) == title else None for run in runs
        ]
    return columns


def in_words(metrics: dict[str, float]) -> str:
    """Return the values of metrics as text, those of the validation data after training's."""
    texts = []
    for name, value in metrics.items():
        if name.removeprefix(VALIDATION) in metrics and name.startswith(VALIDATION):
            continue
        validation = metrics.get(VALIDATION + name)
        more = f" (validation {short(validation)})" if validation is not None else ""
        texts.append(f"{name.replace('_', ' ')} {short(value)}{more}")
    return ", ".join(texts)


def goodput_in_words(good: Goodput) -> str:
    """Return the share of training, and of all other parts of at least 1%, in words."""
    parts = sorted(
        ((part, good.share(part)) for part in PARTS if part != "training"),
        key=lambda item: -item[1],
    )
    rest = ", ".join(f"{part} {share:.1%}" for part, share in parts if share >= 0.01)
    ran = f" ({good.while_running:.1%} while it ran)" if good.share("down") >= 0.01 else ""
    return f"{good.share('training'):.1%} training{ran}" + (f"; {rest}" if rest else "")


def duration(seconds: float | None) -> str:
    """Format a duration for people, e.g. 2 h 31 m."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} m"


def short(value: Any) -> str:
    """Format a number for people: four digits, or an integer with separated thousands.

    Anything else that a record may hold is shown as it is.
    """
    if value is None:
        return "–"
    if not is_finite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def sparkline(values: np.ndarray, counts: np.ndarray) -> str:
    """Draw a column in at most WIDTH characters, each for the mean of a part.

    counts: numbers of lines of which the values are means.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2:
        return ""
    parts = np.array_split(known, min(WIDTH, len(known)))
    means = np.array([np.average(values[part], weights=counts[part]) for part in parts])
    height = (means - means.min()) / ((means.max() - means.min()) or 1.0)
    return "".join(SPARKS[round(h * (len(SPARKS) - 1))] for h in height.tolist())


def show(summaries: list[Summary], console: Console) -> None:
    runs = [summary.run for summary in summaries]
    if len(summaries) > 1:
        console.print(table_of(summaries))
    if len(summaries) <= SHOWN:
        for summary in summaries:
            show_one(summary, console)
    different = differing(runs)
    if different:
        heading(console, "keys that differ")
        for key, values in list(different.items())[:SHOWN]:
            texts = filter(None, dict.fromkeys(map(str, values)))
            console.print(Text(f"{key}: {', '.join(texts)}"), soft_wrap=True)
        if len(different) > SHOWN:
            console.print(f"and {len(different) - SHOWN} more, in the page")


def table_of(summaries: list[Summary]) -> Table:
    summaries = by_objective(summaries)
    runs = [summary.run for summary in summaries]
    varied, mains = overrides(runs), main_metrics(runs)
    figures = ("state", "steps", "took", "goodput")
    columns = ["run", *map(escape, varied), "objective", *map(escape, mains), *figures]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1))
    for row, summary in enumerate(summaries):
        run, good = summary.run, summary.goodput
        table.add_row(
            Text(run.name),
            *(Text(run.given.get(key, "")) for key in varied),
            short(summary.objective),
            *("" if values[row] is None else short(values[row]) for values in mains.values()),
            Text(run.state),
            short(run.last("step")),
            duration(summary.seconds),
            f"{good.share('training'):.0%}" if good else "",
        )
    return table


def show_one(summary: Summary, console: Console) -> None:
    run = summary.run
    heading(console, run.name)
    rows = summary.facts
    curve = sparkline(run.means("loss"), run.columns.counts)
    if curve:
        rows.append(("", curve))
    if summary.phases:
        phases = list(summary.phases.items())[:6]
        rows.append(("a step", ", ".join(f"{phase} {spent:.3g} s" for phase, spent in phases)))
    if summary.events:
        kinds = summary.events.most_common()
        rows.append(("events", ", ".join(f"{count:,} {kind}" for kind, count in kinds)))
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, "dim"), Text(value))
    console.print(grid)
    if confusion := summary.confusion:
        table = Table("has \\ given", *map(escape, confusion.labels), box=box.SIMPLE_HEAD)
        for row in confusion.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for remark in run.remarks:
        console.print(Text(f"note: {remark}", "dim"), soft_wrap=True)
    if run.state == "nothing yet":
        console.print(Text("nothing is on record yet"))
