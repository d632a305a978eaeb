"""Which charts the page has: every number in metrics.jsonl has a line, in the section of its group.

A number of the validation data is drawn with the one of training, if there is one. Metrics of
several methods share a chart if they have the same title, and these methods share a section.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fsdp_trainer.apps.report.read import RecordedRun
from fsdp_trainer.config.methods import METHODS
from fsdp_trainer.observe.metric_groups import (
    COURSE,
    EXPERTS,
    GENERAL,
    OWN,
    SPEED,
    VALIDATION,
    Title,
    general_title,
    group_title,
    order_of,
    title_of,
)

WIDE_RANGE = 100
"""Ratio of a metric's largest and smallest value from which a logarithmic axis is offered."""


class Line(NamedTuple):
    """A line of a chart. run: index of the run. style: index among the lines of its run."""

    run: int
    column: str
    label: str
    style: int
    is_validation: bool = False


@dataclass
class Chart:
    """A chart. groups: those of its numbers; [] for general ones.

    name: identifies the chart. If it ends with /, the chart has a line for each number below it, as
    for each source of the data.
    """

    name: str
    title: Title
    groups: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def has_many(self) -> bool:
        """True if the lines are those of an object's entries."""
        return self.name.endswith("/")

    def offers_log(self, runs: Sequence[RecordedRun]) -> bool:
        """Return True if a logarithmic axis makes sense.

        For numbers without a title of their own: if all are positive and of different magnitudes.
        """
        if self.title.log or self.title.is_share or not self.groups:
            return self.title.log
        values = np.concatenate([runs[line.run].metrics[line.column] for line in self.lines])
        values = values[np.isfinite(values)]
        return bool(values.size and values.min() > 0 and values.max() > WIDE_RANGE * values.min())


def curves(run: RecordedRun) -> list[str]:
    return [name for name, group in run.groups.items() if group or general_title(name)]


def varying(run: RecordedRun) -> list[str]:
    """Return the columns of a run whose lines are smoothed, because steps vary much."""
    columns = []
    for name, group in run.groups.items():
        title = general_title(name)
        if title.is_smoothed if title else group and training_name(name, run) == name:
            columns.append(name)
    return columns


def sections(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Chart]]]:
    charts = charts_of_groups(runs)
    own = [chart for chart in charts if OWN in chart.groups]
    general = {section: list(general_charts(section, runs)) for section in GENERAL}
    ordered = [
        (COURSE, general[COURSE]),
        *sections_of_methods([chart for chart in charts if OWN not in chart.groups]),
        (group_title(OWN), own),
        (SPEED, general[SPEED]),
        (EXPERTS, general[EXPERTS]),
    ]
    return [(heading, charts) for heading, charts in ordered if charts]


def sections_of_methods(charts: Sequence[Chart]) -> list[tuple[str, list[Chart]]]:
    together: list[set[str]] = []
    for chart in charts:
        others = [methods for methods in together if methods.isdisjoint(chart.groups)]
        joined = [methods for methods in together if methods not in others]
        together = [*others, set(chart.groups).union(*joined)]
    position = {method: number for number, method in enumerate(METHODS)}
    titled = []
    for methods in together:
        ordered = sorted(methods, key=lambda method: position.get(method, len(position)))
        *first, last = map(group_title, ordered)
        heading = f"{', '.join(first)} and {last}" if first else last
        titled.append((heading, [c for c in charts if not methods.isdisjoint(c.groups)]))
    return titled


def general_charts(section: str, runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    for name, title in GENERAL[section].items():
        chart = Chart(name, title)
        for index, run in enumerate(runs):
            if chart.has_many:
                columns = [column for column in run.metrics if column.startswith(name)]
            else:
                columns = [name] if name in run.metrics else []
            chart.lines.extend(
                Line(index, column, column[len(name) :], style)
                for style, column in enumerate(columns)
            )
        if chart.lines:
            yield chart


def charts_of_groups(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the charts of the methods' and the user's own metrics."""
    charts: dict[tuple[str, str, bool], Chart] = {}
    for index, run in enumerate(runs):
        groups = run.groups
        for column in sorted((name for name, group in groups.items() if group), key=order_of):
            group, metric = groups[column], training_name(column, run)
            beginning, slash, part = metric.partition("/")
            title = title_of(beginning + slash, group)
            key = title.text, slash, group == OWN
            chart = charts.setdefault(key, Chart(f"{group}/{beginning + slash}", title))
            if group not in chart.groups:
                chart.groups.append(group)
            add_line(chart, index, column, metric, part or title.line)
    return sorted(charts.values(), key=lambda chart: order_of(chart.lines[0].column))


def add_line(chart: Chart, run: int, column: str, metric: str, label: str) -> None:
    """Add a column's line to a chart.

    metric: the column's name without VALIDATION. label: of the line; "": there is only one.
    """
    styles = {line.column: line.style for line in chart.lines if line.run == run}
    if column == metric:
        chart.lines.append(Line(run, column, label, len(set(styles.values()))))
        return
    style = styles.get(metric, len(set(styles.values())))
    text = f"{label}, validation" if label else "validation"
    chart.lines.append(Line(run, column, text, style, is_validation=True))


def training_name(column: str, run: RecordedRun) -> str:
    """Return the name of the metric of training that a column of the validation data belongs to.

    Of any other column it is its own name.
    """
    metric = column.removeprefix(VALIDATION)
    return metric if run.groups.get(metric) == run.groups[column] else column


def as_data(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the sections as JSON for the page's script."""
    return [
        {
            "title": heading,
            "charts": [
                {
                    "name": chart.name,
                    "title": chart.title.text,
                    "log": chart.offers_log(runs),
                    "share": chart.title.is_share,
                    "many": chart.has_many,
                    "smoothed": bool(chart.groups) or chart.title.is_smoothed,
                    "lines": [line._asdict() for line in chart.lines],
                }
                for chart in charts
            ],
        }
        for heading, charts in sections(runs)
    ]
