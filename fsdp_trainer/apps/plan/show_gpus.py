"""Output of plans for several GPUs: a table with a row for each GPU and world size."""

from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.plan.device_plans import DevicePlans
from fsdp_trainer.apps.plan.show import cost_text, show_head, yes_or_no
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.planning.plan.plan import GIB, RunPlan
from fsdp_trainer.planning.plan.suggest import Suggestion

WIDE = 115  # characters; a terminal this wide shows changes in the same table


class GpuRow(NamedTuple):
    """The cells for one GPU and world size.

    change: an override, and its peak and cost; empty if the run fits.
    """

    device: str
    figures: list[str | Text]
    change: list[str | Text]


def show_gpus(cfg: PlanConfig, config: ModelConfig, answers: list[DevicePlans]) -> None:
    """Print a table of the GPUs, with the best change for each that does not fit.

    In a narrow terminal the changes are below the table.
    """
    console = Terminal()
    assumed = [line for answer in answers for line in answer.assumed]
    show_head(console, cfg, config, list(dict.fromkeys(assumed)))
    rows = []
    for answer in answers:
        for plan, suggestions in zip(answer.plans, answer.suggestions, strict=True):
            rows.append(row_of(plan, suggestions))
    wide = console.width >= WIDE
    console.print(table_of(rows, with_changes=wide))
    changes = [row for row in rows if row.change]
    if changes and not wide:
        console.print(Text("what would make them fit", "bold"))
        console.print(changes_of(changes))


def row_of(plan: RunPlan, suggestions: list[Suggestion]) -> GpuRow:
    rate = plan.tokens / plan.seconds / plan.world_size
    figures: list[str | Text] = [
        f"{plan.peak_bytes / GIB:,.1f} of {plan.device.memory_gib:,.1f}",
        yes_or_no(plan),
        short(rate) if plan.step_seconds else "–",
    ]
    change: list[str | Text] = []
    if not plan.fits and suggestions:
        best = suggestions[0]
        peak = f"{best.peak_bytes / GIB:,.1f} GiB"
        change = [Text(best.override, "bold"), peak, cost_text(best.cost)]
    elif not plan.fits:
        change = [Text("nothing that a key changes", "dim")]
    return GpuRow(f"{plan.world_size:,} × {plan.device.name}", figures, change)


def table_of(rows: list[GpuRow], with_changes: bool) -> Table:
    """Return the table of GPUs. with_changes: True to include a change that makes each run fit."""
    table = Table("GPUs", "peak, GiB", "fits", "tokens/s\na GPU", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    if with_changes:
        add_change_columns(table, "would fit with")
    for row in rows:
        table.add_row(row.device, *row.figures, *(row.change if with_changes else []))
    return table


def changes_of(rows: list[GpuRow]) -> Table:
    table = Table("GPUs", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    add_change_columns(table, "override")
    for row in rows:
        table.add_row(row.device, *row.change)
    return table


def add_change_columns(table: Table, name: str) -> None:
    """Add the columns of a change: its override, which is never cut, and its figures."""
    table.add_column(name, overflow="fold")
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("GPU time", justify="right", no_wrap=True)
