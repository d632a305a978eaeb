"""Compare the plan with speeds and memory that others published: benchmarks/published_runs.json.

    python -m benchmarks.plan_published [--check] [--names TEXT] [--plain [--write]]

Prints a table in Markdown, the same by GPU and by kind of run, and a summary. With --check the
exit code is 1 if a goal is missed. Needs no GPU: the plans are the same on every machine.
--plain plans without rehearsals, --write stores these speeds: benchmarks/results/planned_runs.json.

Runs marked `held_out` were not looked at when the plan's rates were chosen: half of the runs that
were collected later, every second one, marked before any of them was planned.

Speed is in tokens per second and GPU. Memory is without the GiB that the plan adds for memory
outside of torch's allocator, and with the other trainer's logits in place of ours:

- memory_kind: `reserved` is torch's max_memory_reserved, `active` is tensors alone;
- head_bytes: bytes per logit of a micro-batch that the other trainer held at its peak; absent if
  its head works in chunks, as ours does;
- block_bytes: bytes per token and channel of the residual stream that a block of the other
  trainer's model keeps from forward to backward, if it differs from ours: an MPT block has no gate
  and keeps 34, the gated block that represents it in the plan 45;
- `assumed` marks a run whose source does not state batch, recomputation or number of GPUs.
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fsdp_trainer.apps.plan.rehearsed_plan import rehearsed_plan
from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import device, gpu_names
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.planning.plan.block_memory import trace_blocks
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.memory import BESIDE, GIB, ROUNDING, Moment
from fsdp_trainer.planning.plan.plan import RunPlan
from fsdp_trainer.planning.plan.plan_inputs import architecture, target
from fsdp_trainer.planning.plan.planned_run import PlannedRun

RUNS = Path(__file__).parent / "published_runs.json"
PLAIN = Path(__file__).parent / "results/planned_runs.json"
"""Of each run with a speed: GPU, slow and fast end, planned without a rehearsal."""
MEDIAN_WIDTH = 1.4  # largest ratio of a range's fast end to its slow end, in the median
MEMORY_WITHIN = 0.08
SPEEDS, AT_LEAST = 0.9, 0.85
"""Smallest share of speeds inside their range, and of held-out ones and of memories within
MEMORY_WITHIN."""
HELD_OUT = ("seen when they were chosen", "held out")


class InMemory(Store):
    """Answers of this process: runs that differ only in their GPU share a rehearsal."""

    answers: ClassVar[dict[str, dict[str, Any]]] = {}

    def get(self, key: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        name = json.dumps(key)
        if name not in self.answers:
            self.answers[name] = make()
        return self.answers[name]


@dataclass(frozen=True)
class Comparison:
    """A published run and its plan. Speeds in tokens per second and GPU, memory in GiB."""

    run: dict[str, Any]
    kind: str
    gpu: str
    slow: float
    fast: float
    fits: bool = True
    memory: float | None = None

    @property
    def inside(self) -> bool | None:
        """True if the published speed is in the planned range; None if no speed is published."""
        speed = self.run.get("tokens_per_second")
        return self.slow <= speed <= self.fast if speed else None

    @property
    def speed_off(self) -> float | None:
        """Middle of the planned range over the published speed, less 1."""
        speed = self.run.get("tokens_per_second")
        return math.sqrt(self.slow * self.fast) / speed - 1 if speed else None

    @property
    def memory_off(self) -> float | None:
        """Planned memory over the published one, less 1."""
        return self.memory / self.run["memory_gib"] - 1 if self.memory else None

    @property
    def fits_as_published(self) -> bool:
        """False if the plan contradicts the source on whether the run fits in memory."""
        return self.run["fits"] is None or self.run["fits"] == self.fits


def published_runs() -> list[dict[str, Any]]:
    """Return the runs, each with the `source` that published it and the `trainer`."""
    sources = json.loads(RUNS.read_text())["sources"]
    return [
        {**run, "source": source["source"], "trainer": source["trainer"]}
        for source in sources
        for run in source["runs"]
    ]


def stored() -> list[Comparison]:
    """Return the runs with a speed, as they were planned without rehearsals."""
    plans = json.loads(PLAIN.read_text())
    runs = [run for run in published_runs() if run["name"] in plans]
    return [Comparison(run, "", *plans[run["name"]]) for run in runs]


def compare(run: dict[str, Any], rehearse: bool = True) -> Comparison:
    """Plan a published run with its settings, and compare."""
    cfg = compose("plan", run["overrides"].split(), inputs=False)
    world, config = cfg.plan.world_size, architecture(cfg)[0]
    assert isinstance(world, int)
    candidate = Candidate(cfg, config, world, target(cfg, world))
    plan = candidate.plan()
    if rehearse:
        plan, _ = rehearsed_plan(candidate, plan, InMemory(cfg))
    tokens = cfg.batch.micro_rows * cfg.batch.seq_len
    logits = tokens * config.vocab_size
    less = 0.0
    if "block_bytes" in run:
        ours = sum(
            block.saved for block in trace_blocks(PlannedRun.of(cfg, config, 1).model, "cuda")[0]
        )
        stream = tokens * config.hidden_size * config.num_hidden_layers
        less = ours - run["block_bytes"] * stream
    return Comparison(
        run,
        kind=kind_of(cfg, config),
        gpu=device_name(cfg),
        fits=plan.memory.peak.total - less <= plan.memory_bytes,
        slow=plan.tokens / plan.slow.step / world,
        fast=plan.tokens / plan.fast.step / world,
        memory=memory_as_published(run, plan, logits) / GIB if run.get("memory_gib") else None,
    )


def kind_of(cfg: PlanConfig, config: ModelConfig) -> str:
    """Return the kind of a run: the first of these properties that it has."""
    sharding = cfg.sharding
    kinds = {
        "experts": EXPERTS in config.feed_forwards,
        "adapters": cfg.adapter.name != "none",
        "split matrices, rows or stages": sharding.tensor * sharding.context * sharding.pipeline
        > 1,
        "rows of 32k tokens and more": cfg.batch.seq_len >= 32768,
        "float8": bool(cfg.precision.float8),
        "compiled": cfg.compile.enabled,
        "uncompiled": True,
    }
    return next(kind for kind, holds in kinds.items() if holds)


def device_name(cfg: PlanConfig) -> str:
    """Return the name of the GPU that a run is planned for."""
    return device(gpu_names(cfg.plan.gpu)[0]).name


def memory_as_published(run: dict[str, Any], plan: RunPlan, logits: int) -> float:
    """Return the bytes of the peak as the source counts them, with the source's logits."""
    others = run.get("head_bytes", 0) * logits
    tensors_alone = run["memory_kind"] == "active"
    return max(_as_counted(moment, others, tensors_alone) for moment in plan.memory.moments)


def _as_counted(moment: Moment, others: float, tensors_alone: bool) -> float:
    """Return a moment's bytes as the source counts them.

    others: bytes of the other trainer's logits, in place of ours in the head's moment; 0: none.
    """
    more = 0.0
    if others and moment.when == "head and loss":
        more = others - moment.bytes["logits"]
    if tensors_alone:
        return moment.total + more - moment.bytes["allowance"]
    return moment.total + more * (1 + ROUNDING["cuda"]) - BESIDE["cuda"]


def table(rows: list[Comparison]) -> str:
    """Return the comparison in Markdown."""
    lines = [
        "| run | tokens/s and GPU | planned | middle off | inside | GiB | planned | off | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = row.run
        speed = run.get("tokens_per_second")
        speeds = ("", "", "", "")
        if speed:
            inside = "yes" if row.inside else "**no**"
            planned = f"{row.slow:,.0f} – {row.fast:,.0f}"
            speeds = (f"{speed:,.0f}", planned, f"{row.speed_off:+.0%}", inside)
        memory = ("", "", "")
        if row.memory:
            memory = f"{run['memory_gib']:.1f}", f"{row.memory:.1f}", f"{row.memory_off:+.1%}"
        fits = ("yes" if row.fits else "no") if row.fits_as_published else "**wrong**"
        name = run["name"] + (" °" if run.get("assumed") else "")
        lines.append("| " + " | ".join([name, *speeds, *memory, fits]) + " |")
    return "\n".join(lines)


def groups(rows: list[Comparison], name: str, group: Callable[[Comparison], str]) -> str:
    """Return a table in Markdown of the speeds by a property of the runs, most runs first.

    name: the head of its first column; group: returns the property of a run.
    """
    timed = [row for row in rows if row.inside is not None]
    counts = Counter(group(row) for row in timed)
    lines = [
        f"| {name} | runs | inside | median width | median planned ÷ published | furthest |",
        "|---|---|---|---|---|---|",
    ]
    for key, count in counts.most_common():
        own = [row for row in timed if group(row) == key]
        off = [1 + row.speed_off for row in own if row.speed_off is not None]
        furthest = max(own, key=lambda row: abs(math.log(1 + (row.speed_off or 0.0))))
        inside = sum(bool(row.inside) for row in own)
        width = statistics.median(row.fast / row.slow for row in own)
        lines.append(
            f"| {key} | {count} | {inside} | {width:.2f} | {statistics.median(off):.2f} | "
            f"{furthest.run['name']} {furthest.speed_off:+.0%} |"
        )
    return "\n".join(lines)


def tables(rows: list[Comparison]) -> str:
    """Return the speeds by GPU, by kind of run, and of held-out runs apart from the others."""
    return "\n\n".join(
        [
            groups(rows, "GPU", lambda row: row.gpu),
            groups(rows, "kind of run", lambda row: row.kind),
            groups(rows, "rates", lambda row: HELD_OUT[bool(row.run.get("held_out"))]),
        ]
    )


def summary(rows: list[Comparison]) -> dict[str, Any]:
    """Return the figures that have goals, and the plan's errors."""
    timed = [row for row in rows if row.speed_off is not None]
    held_out = [row for row in timed if row.run.get("held_out")]
    measured = [abs(row.memory_off) for row in rows if row.memory_off is not None]
    logs = [math.log(1 + row.speed_off) for row in timed if row.speed_off is not None]
    return {
        "speeds": len(timed),
        "inside": sum(bool(row.inside) for row in timed),
        "held-out speeds": len(held_out),
        "held-out inside": sum(bool(row.inside) for row in held_out),
        "median width": round(statistics.median(row.fast / row.slow for row in timed), 3),
        "rms of log(middle / published)": round(
            math.sqrt(statistics.fmean(x * x for x in logs)), 3
        ),
        "memories": len(measured),
        "memories within 8%": sum(off <= MEMORY_WITHIN for off in measured),
        "memory, median off": round(statistics.median(measured), 3) if measured else None,
        "fits is wrong": [row.run["name"] for row in rows if not row.fits_as_published],
    }


def goals_missed(figures: dict[str, Any]) -> list[str]:
    """Return a line for each goal that the figures miss."""
    missed = []
    if figures["inside"] < SPEEDS * figures["speeds"]:
        missed.append(f"{figures['inside']} of {figures['speeds']} speeds are inside the range")
    if figures["held-out inside"] < AT_LEAST * figures["held-out speeds"]:
        missed.append(f"of held-out ones {figures['held-out inside']} are inside the range")
    if figures["median width"] > MEDIAN_WIDTH:
        missed.append(f"ranges are {figures['median width']} wide in the median")
    if figures["memories within 8%"] < AT_LEAST * figures["memories"]:
        missed.append(f"{figures['memories within 8%']} of {figures['memories']} memories are near")
    if figures["fits is wrong"]:
        missed.append(f"fits is wrong for {' '.join(figures['fits is wrong'])}")
    return missed


def write(rows: list[Comparison]) -> None:
    """Store the planned speeds of runs that have a published one, a line a run."""
    lines = [
        f"{json.dumps(row.run['name'])}: {json.dumps([row.gpu, round(row.slow), round(row.fast)])}"
        for row in rows
        if row.inside is not None
    ]
    PLAIN.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def main() -> None:
    """Plan every run, print the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--names", default="", help="only runs whose name contains this")
    parser.add_argument("--plain", action="store_true", help="plan without rehearsals")
    parser.add_argument("--write", action="store_true", help="store the speeds of plain plans")
    given = parser.parse_args()
    runs = [run for run in published_runs() if given.names in run["name"]]
    rows = [compare(run, rehearse=not given.plain) for run in runs]
    figures = summary(rows)
    if given.plain and given.write:
        write(rows)
    print(table(rows), tables(rows), sep="\n\n", end="\n\n")
    print(json.dumps(figures, indent=1))
    missed = goals_missed(figures)
    for line in missed:
        print(f"plan_published: {line}", file=sys.stderr)
    sys.exit(1 if given.check and missed else 0)


if __name__ == "__main__":
    main()
