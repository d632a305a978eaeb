"""Output of a rehearsal: one screen of text, or JSON."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.rehearse.comparison import PlanComparison
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.verbs import RehearseConfig
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.planning.plan.plan import GIB
from fsdp_trainer.planning.rehearse.rank_step import RankStep
from fsdp_trainer.planning.rehearse.rehearsal import RehearsedKind


def as_json(answer: PlanComparison, assumed: list[str]) -> Json:
    """Return the figures: GiB and bytes of one rank in one step."""
    rehearsal = answer.rehearsal
    return {
        "fits": answer.fits,
        "finishes": rehearsal.finishes,
        "gpu": answer.device.name,
        "memory_gib": round(answer.device.memory_gib, 2),
        "world_size": answer.plan.world_size,
        "micro_batches": answer.same.micro_batches,
        "peak_gib": round(answer.plan.peak_bytes / GIB, 3) if answer.tensors else None,
        "plan_peak_gib": round(answer.same.peak_bytes / GIB, 3),
        "tensors_gib": round(answer.tensors / GIB, 3),
        "plan_tensors_gib": round(answer.same.memory.tensors / GIB, 3),
        "bytes_sent": {name: round(sent) for name, sent in answer.sent.items()},
        "plan_bytes_sent": {name: round(sent) for name, sent in answer.planned.items()},
        "bytes_across_nodes": round(answer.across),
        "plan_bytes_across_nodes": round(sum(wire.across for wire in answer.same.wire.values())),
        "kinds": [kind_json(one) for one in rehearsal.kinds],
        "collectives": collectives_json(rehearsal.busiest),
        "mismatches": [str(one) for one in rehearsal.mismatches],
        "left_out": answer.left_out,
        "assumed": assumed,
        "seconds": round(answer.seconds, 1),
    }


def kind_json(one: RehearsedKind) -> Json:
    kind, step = one.kind, one.step
    peak = step.peak if step else None
    return {
        "rank": kind.rank,
        "ranks": kind.count,
        "place": kind.place,
        "runs": kind.runs,
        "finishes": step is not None if kind.runs else None,
        "problem": one.problem or None,
        "tensors_gib": round(one.peak / GIB, 3) if step else None,
        "by_category": {k: round(v / GIB, 3) for k, v in peak.bytes.items()} if peak else None,
        "where": peak.where if peak else None,
        "operator": peak.operator if peak else None,
        "phase": peak.phase if peak else None,
        "bytes_sent": {k: round(v) for k, v in one.sent().items()} if step else None,
        "staged_gib": round(step.staged / GIB, 3) if step else None,
    }


def collectives_json(one: RehearsedKind) -> list[Json]:
    """Return the collectives of a kind's step, in the order of their first calls."""
    return [
        {
            "group": one.dimension(each),
            "ranks": len(each.ranks),
            "op": each.op,
            "bytes": each.bytes,
            "dtype": each.dtype,
            "count": count,
            "module": each.module,
        }
        for each, count in one.calls.items()
    ]


def show(cfg: RehearseConfig, answer: PlanComparison, assumed: list[str]) -> None:
    console, rehearsal = Terminal(), answer.rehearsal
    for line in assumed:
        console.print(Text(f"assumed: {line}", "dim"))
    for line in answer.left_out:
        console.print(Text(f"left out: {line}", "dim"))
    console.print(verdict(answer))
    for one in rehearsal.kinds:
        if one.problem:
            console.print(
                Text(f"  rank {one.kind.rank:,} ({one.kind.place}): {one.problem}", "red")
            )
    for mismatch in rehearsal.mismatches:
        console.print(Text(f"  {mismatch}", "red"))
    console.print(table_of_kinds(rehearsal.kinds))
    if largest := rehearsal.largest.step:
        console.print(at_the_peak(largest))
        console.print(f"sent a step: {sizes(sent_of(answer)) or 'nothing'}")
        console.print(table_of_collectives(rehearsal.busiest))
    console.print(Text(f"{answer.seconds:.0f} s", "dim"))


def verdict(answer: PlanComparison) -> Text:
    if not answer.rehearsal.finishes:
        return Text("does not finish", "bold red")
    words, style = ("fits", "bold green") if answer.fits else ("does not fit", "bold red")
    where = f"{answer.plan.world_size:,} × {answer.device.name}"
    peak = f"{answer.plan.peak_bytes / GIB:,.1f} of {answer.device.memory_gib:,.1f} GiB"
    return Text.assemble(("finishes and " + words, style), f": {peak} on each of {where}")


def table_of_kinds(kinds: Iterable[RehearsedKind]) -> Table:
    table = new_table("rank→", "ranks alike→", "place", "peak→", "at")
    for one in kinds:
        peak, at = "–", "between others: only counted"
        if one.step:
            where = one.step.peak
            peak, at = (
                f"{one.peak / GIB:,.2f} GiB",
                f"{where.phase} of {where.where}, {where.operator}",
            )
        elif one.problem:
            at = "did not finish"
        kind = one.kind
        table.add_row(f"{kind.rank:,}", f"{kind.count:,}", kind.place or "–", peak, at)
    return table


def sent_of(answer: PlanComparison) -> dict[str, float]:
    return answer.sent | ({"to other nodes": answer.across} if answer.across else {})


def at_the_peak(step: RankStep) -> str:
    return f"at the peak: {sizes(step.peak.bytes)}; a save copies {size(step.staged)} to the host"


def sizes(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(each)}" for name, each in held.items() if each)


def new_table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table. Columns whose names end with an arrow are aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name.rstrip("→"), justify="right" if name.endswith("→") else "left")
    return table


def size(number: float) -> str:
    """Return bytes in GiB, or if they are few in MiB or KiB."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if number >= unit / 10:
            return f"{number / unit:,.2f} {name}"
    return f"{number / 2**10:,.2f} KiB"


def table_of_collectives(one: RehearsedKind) -> Table:
    title = f"collectives of rank {one.kind.rank:,}, in the order of their first calls"
    table = new_table("group", "op", "message→", "format", "calls→", "for", title=title)
    for each, count in one.calls.items():
        group = f"{one.dimension(each)} of {len(each.ranks):,}"
        row = (group, each.op, size(each.bytes), each.dtype, f"{count:,}", each.module)
        table.add_row(*row)
    return table
