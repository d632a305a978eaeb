"""Groups and titles of the numbers in metrics.jsonl, for the report and the trackers.

A number is a general one (see GENERAL), or of the user's own metrics if `own_metrics` of its line
names it, or else of the run's training method. So the metrics of a new method need no entry here;
TITLES only has better titles than their names. Imports no torch.
"""

from collections.abc import Collection
from typing import NamedTuple

from fsdp_trainer.config.methods import METHODS
from fsdp_trainer.config.yaml_text import table_beside

OWN = "own"
"""The group of the user's own metrics."""
OWN_METRICS = "own_metrics"
"""The entry of a line of metrics.jsonl that names those of the user's own metrics."""
VALIDATION = "validation_"
"""Beginning of the names of metrics that were computed on the validation data."""


class Title(NamedTuple):
    """The title of a metric's chart.

    line: label of the metric's line, if several metrics share a chart. log: whether a logarithmic
    axis is offered. is_share: whether it is between 0 and 1. is_smoothed: whether steps vary much.
    """

    text: str
    line: str = ""
    log: bool = False
    is_share: bool = False
    is_smoothed: bool = False


TABLE = table_beside(__file__, "metric_titles.yaml")
EVENTS: dict[str, str] = table_beside(__file__, "events.yaml")
GENERAL: dict[str, dict[str, Title]] = {
    section: {name: Title(**row) for name, row in rows.items()}
    for section, rows in TABLE["general"].items()
}
"""Numbers that runs of any method have, by section. A name that ends with / is the beginning of
several numbers' names."""
COURSE, SPEED, EXPERTS = GENERAL
WITHOUT_CURVE = {
    "step": "Steps so far",
    "time": "Seconds since 1970",
    "tokens": "Tokens so far, padding not counted",
    "supervised_tokens": "Supervised tokens so far",
    "phases/": "Seconds of rank 0 in each phase since the last write",
    "expert_load": "Load of each expert, as a digit or letter",
    OWN_METRICS: "Names of your own metrics",
}
"""What a line has without a curve: an axis of the others, or what has a picture of its own."""
TITLES = {name: Title(**row) for name, row in TABLE["methods"].items()}
"""Titles of the methods' metrics, in the order of their charts; METHOD/NAME is for one method."""
ORDER = {name: order for order, name in enumerate(TITLES)}


def general_title(name: str) -> Title | None:
    for titles in GENERAL.values():
        for known, title in titles.items():
            if name == known or is_below(name, known):
                return title
    return None


def group_of(name: str, method: str | None, own: Collection[str]) -> str:
    """Return the group of a number of metrics.jsonl: "" (general), OWN, or the method's name.

    name: as `records.numbers` gives it. method: its name; None: not known. own: the names in
    OWN_METRICS.
    """
    if any(name == metric or name.startswith(f"{metric}/") for metric in own):
        return OWN
    if general_title(name) or any(name == one or is_below(name, one) for one in WITHOUT_CURVE):
        return ""
    # older versions did not name the user's own metrics
    has_metrics = method is not None and (method not in METHODS or METHODS[method].main_metric)
    return str(method) if has_metrics else OWN


def is_below(name: str, beginning: str) -> bool:
    return beginning.endswith("/") and name.startswith(beginning)


def group_title(group: str) -> str:
    if group == OWN:
        return "Your own metrics"
    return METHODS[group].title if group in METHODS else group


def title_of(name: str, group: str) -> Title:
    """Return the title of a metric of a method or of the user's own.

    name: without VALIDATION; as the beginning of several names it ends with /.
    """
    if group != OWN:
        for known in (f"{group}/{name}", name):
            if known in TITLES:
                return TITLES[known]
    words = name.rstrip("/").replace("_", " ").strip() or name
    return Title(words[:1].upper() + words[1:])


def order_of(name: str) -> tuple[int, bool, str]:
    """Return the sort key of a metric: the order of TITLES, then training before validation."""
    metric = name.removeprefix(VALIDATION)
    beginning, slash, _ = metric.partition("/")
    return ORDER.get(beginning + slash, len(ORDER)), metric != name, name


def tracked_name(name: str, method: str | None, own: Collection[str]) -> str:
    """Return the name of a number in a tracker, which groups charts by what precedes the slash.

    General numbers keep their names; others get their group: `dpo/reward_margin`. For parameters
    see group_of.
    """
    group = group_of(name, method, own)
    return f"{group}/{name}" if group else name
