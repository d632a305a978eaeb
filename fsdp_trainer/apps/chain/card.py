"""The report card of a chain: the results of all stages, as a Markdown page and an HTML page."""

import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from fsdp_trainer.apps.chain.chain_record import ChainRecord
from fsdp_trainer.apps.chain.stages import Chain
from fsdp_trainer.apps.report.read import read_run
from fsdp_trainer.apps.report.run_summary import Summary, duration, short

HERE = Path(__file__).parent
SHOWN = 8  # maximum number of questions on the card
COLUMNS = ("stage", "steps", "tokens", "loss", "validation", "bits per byte", "time", "cost")


@dataclass
class StageResult:
    """The results of a stage. seconds: its running time; gpus: number of GPUs, 0 on a CPU."""

    name: str
    seconds: float
    gpus: int = 0
    summary: Summary | None = None
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)

    def last(self, figure: str) -> float | None:
        return self.summary.run.last(figure) if self.summary else None

    @cached_property
    def samples(self) -> list[tuple[str, str]]:
        samples = self.summary.run.samples if self.summary else []
        end = max((line.get("step", 0) for line in samples), default=0)
        return [(line["prompt"], line["text"]) for line in samples if line.get("step") == end]


@dataclass
class Card:
    name: str
    results: list[StageResult]
    questions: list[dict[str, Any]]
    price: float

    def cost(self, seconds: float) -> str:
        """Return the estimated cost of `seconds` in dollars; empty if no stage used a GPU."""
        # the GPUs are also paid for during stages that run on the CPU
        gpus = max((result.gpus for result in self.results), default=0)
        return f"${seconds / 3600 * gpus * self.price:,.2f}" if gpus else ""

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row for each stage, and a last row with the totals; see COLUMNS."""
        rows = [
            (
                result.name,
                *("" if value is None else short(value) for value in map(result.last, FIGURES)),
                duration(result.seconds),
                self.cost(result.seconds),
            )
            for result in self.results
        ]
        total = sum(result.seconds for result in self.results)
        empty = ("",) * len(FIGURES)
        return [*rows, ("all", *empty, duration(total), self.cost(total))]

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS

    @property
    def tasks(self) -> list[tuple[str, ...]]:
        """A row for each metric of each task: its value after each stage that was evaluated."""
        evaluated = [result for result in self.results if result.tasks]
        names = {
            (task, metric): None
            for result in evaluated
            for task, metrics in result.tasks.items()
            for metric in metrics
            if "stderr" not in metric
        }
        return [
            (
                f"{task} {metric}",
                *(number(result.tasks.get(task, {}).get(metric)) for result in evaluated),
            )
            for task, metric in names
        ]

    @property
    def evaluated(self) -> list[str]:
        return [result.name for result in self.results if result.tasks]

    @property
    def right(self) -> int:
        """Number of questions whose answer equals the wanted one word for word."""
        return sum(row["right"] for row in self.questions)

    @property
    def shown(self) -> list[dict[str, Any]]:
        return self.questions[:SHOWN]


FIGURES = ("step", "tokens", "loss", "validation_loss", "validation_bits_per_byte")
"""Metrics of metrics.jsonl, in the order of COLUMNS."""


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def write_card(planned: Chain, record: ChainRecord) -> str:
    card = Card(
        planned.cfg.name,
        [result_of(planned, stage.name, record) for stage in planned.stages],
        read_json(planned.folder_of("evaluation") / "questions.json", []),
        planned.cfg.price,
    )
    texts = {}
    for suffix, escape in (("md", False), ("html", True)):
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE),
            autoescape=escape,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["line"] = one_line
        template = environment.get_template(f"card.{suffix}.jinja")
        texts[suffix] = template.render(card=card, written=time.strftime("%Y-%m-%d %H:%M"))
        file = planned.folder / f"card.{suffix}"
        file.write_text(texts[suffix], encoding="utf-8", errors="replace")
    return texts["md"]


def result_of(planned: Chain, name: str, record: ChainRecord) -> StageResult:
    seconds = record.seconds(name)
    folder = planned.folder_of(name)
    if name not in [stage.name for stage in planned.trainings]:
        return StageResult(name, seconds)
    summary = Summary(read_run(folder, name))
    if summary.goodput:  # includes attempts that were killed, which the chain's record lacks
        ran = summary.goodput.wall - summary.goodput.seconds["down"]
        seconds = max(seconds, ran)
    tasks = read_json(planned.folder_of("evaluation") / f"{name}.json", {})
    return StageResult(name, seconds, gpus_of(summary), summary, tasks)


def gpus_of(summary: Summary) -> int:
    """Return the largest number of GPUs that a run had at any start; 0 if it ran on a CPU."""
    starts = [event for event in summary.run.events if event["event"] in ("start", "resume")]
    if not any(line.startswith("world") and "× cuda" in line for line in summary.about):
        return 0
    return max((int(event.get("world_size") or 0) for event in starts), default=0)


def read_json(file: Path, default: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else default


def one_line(text: str) -> str:
    """Return a text on one line with `|` escaped, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
