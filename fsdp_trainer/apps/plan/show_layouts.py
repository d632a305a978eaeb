"""Output of a search for layouts, as text or JSON."""

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.plan.search import PlannedLayout, Search
from fsdp_trainer.apps.plan.show import NARROW, UNTIMED, one_world, show_head, suggestion_json
from fsdp_trainer.apps.plan.show import table_of as table_of_suggestions
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.planning.plan.plan import GIB
from fsdp_trainer.planning.plan.suggest import Suggestion

SHOWN = 15
"""Maximum number of layouts in the table, which then fits a screen."""
FIGURES = (
    "tokens_per_second", "tokens_per_second_per_gpu", "step_seconds", "mfu_palm", "peak_gib",
    "host_gib_per_node", "micro_batches", "empty_rows_share", "bytes_per_step", "rehearsed",
)  # fmt: skip
"""Figures of a layout, with the same names as those of a single plan."""


def layouts_as_json(
    cfg: PlanConfig, search: Search, assumed: list[str], ways: list[Suggestion]
) -> dict[str, Any]:
    """Return the layouts, fastest first. nearest: the layout with least memory, if none fits.

    ways: changes with which that layout fits, or needs least memory.
    """
    nearest = None
    if search.nearest and not search.layouts:
        nearest = layout_as_json(cfg, search.nearest)
    layouts = [layout_as_json(cfg, layout) for layout in search.layouts]
    return {
        "layouts": layouts,
        "nearest": nearest,
        "suggestions": [suggestion_json(way) | {"why": way.reason} for way in ways],
        "tried": search.tried,
        "gpu": search.device.name,
        "memory_gib": round(search.device.memory_gib, 2),
        "world_size": search.world,
        "assumed": assumed,
    }


def layout_as_json(cfg: PlanConfig, layout: PlannedLayout) -> dict[str, Any]:
    figures = one_world(cfg, layout.plan, [], None)
    return {"overrides": layout.overrides} | {name: figures[name] for name in FIGURES}


def show_layouts(
    cfg: PlanConfig,
    config: ModelConfig,
    search: Search,
    assumed: list[str],
    ways: list[Suggestion],
) -> None:
    """Print the fastest layouts and their overrides or, if none fits, the one with least memory.

    ways: changes with which that layout fits, or needs least memory.
    """
    console = Terminal()
    show_head(console, cfg, config, assumed)
    device = search.device
    where = f"{search.world:,} × {device.name}, {device.memory_gib:,.1f} GiB each"
    rehearsed = sum(layout.plan.rehearsed for layout in search.layouts)
    may_fit = rehearsed < len(search.layouts)
    fitting = f"{len(search.layouts)} of" if search.layouts else "as it is, none of"
    summary = f"{fitting} {search.tried} layouts {'may fit' if may_fit else 'fit'} {where}"
    console.print(Text(summary, "bold green" if search.layouts else "bold red"))
    if search.layouts:
        console.print(table_of(search.layouts[:SHOWN]))
        if len(search.layouts) > SHOWN:
            console.print(f"{len(search.layouts) - SHOWN} slower ones:  plan.format=json")
        if not rehearsed:
            console.print("not rehearsed: each needs at least this much")
        elif may_fit:
            console.print(f"rehearsed: the first {rehearsed}; the others need at least this much")
        if device.flops is None:
            console.print(f"{UNTIMED}; they are sorted as on an H100")
    elif search.nearest:
        plan = search.nearest.plan
        needed = f"{plan.at_least}{plan.peak_bytes / GIB:,.1f} GiB with  {typed(search.nearest)}"
        console.print(f"The nearest needs {needed}")
        fits = all(way.peak_bytes <= plan.memory_bytes for way in ways)
        console.print(
            Text("with one of these it would fit" if fits else "least, with this", "bold")
        )
        console.print(table_of_suggestions(ways, narrow=console.width < NARROW))


def typed(layout: PlannedLayout) -> str:
    return " ".join(layout.overrides)


def table_of(layouts: list[PlannedLayout]) -> Table:
    columns = ["overrides", "peak", "host", "tokens/s", "a GPU", "micro-\nbatches"]
    table = Table(*columns, box=box.SIMPLE_HEAD)
    table.columns[0].overflow = "fold"  # never cut: the user types them
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for layout in layouts:
        plan = layout.plan
        rate = plan.tokens / plan.seconds
        rates = (short(rate), short(rate / plan.world_size)) if plan.step_seconds else ("–", "–")
        host = f"{plan.host_bytes_per_node / GIB:,.0f} GiB" if plan.memory.host else ""
        memory = f"{plan.peak_bytes / GIB:,.1f} GiB"
        table.add_row(typed(layout), memory, host, *rates, f"{plan.micro_batches:,}")
    return table
