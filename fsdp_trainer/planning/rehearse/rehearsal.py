"""A rehearsal: the step of each kind of rank, and what it shows of the whole run."""

import gc
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import fsdp_trainer
from fsdp_trainer.data.records.labelled_texts import QUERIES
from fsdp_trainer.planning.plan.messages import (
    AGAIN,
    BLOCKS,
    FIRST,
    LAST,
    REDUCED,
    REPLICAS,
    WAITED,
    Group,
    Message,
)
from fsdp_trainer.planning.plan.work import Work, added, grown_work
from fsdp_trainer.planning.rehearse.collectives import Collective, joined_counts
from fsdp_trainer.planning.rehearse.kinds import Classes, RankKind, classes_of, kinds_of
from fsdp_trainer.planning.rehearse.order_check import Mismatch, mismatches
from fsdp_trainer.planning.rehearse.rank_step import RankParts, RankStep, step_of_rank, with_parts
from fsdp_trainer.planning.rehearse.rehearsed_run import Rehearsed

MOST_MICRO_BATCHES = 3
"""The first micro-batch of a step, one between, and the last: others between do the same."""
BEYOND_STAGES = 2
"""Micro-batches that a pipeline runs besides those that fill it.

With one the peak may be at another moment than in a longer step. With two it is that of a whole
step to the last byte, by 1f1b, zbv and dualpipev on 2, 3 and 4 ranks.
"""
PACKAGE = Path(fsdp_trainer.__file__).parent
OWNERS = "owners"
NAMES = {"experts/expert": "expert", "experts/eshard": "eshard", "experts/replicate": "replicate"}
"""A plan's names of groups on the mesh of experts."""
BLOCK = "*"
"""In place of a block's number in the name of a module."""
IN_BLOCKS = ("tensor", "context", "expert", "pipeline")
"""Dimensions whose ranks wait for each other inside of the computation."""
COPY = "copy"
"""Name of gathers from a second copy, whose ranks are a part of those that shard."""
EVERYONE = "all"
"""Name of sums over all ranks of few numbers, which a plan does not count."""


@dataclass(frozen=True)
class RehearsedKind:
    """A kind of ranks, and the step of its first rank.

    step: None if it was not run or did not finish; counts: how often each collective is called in
    a whole step; work: of a whole step; problem: why the step did not finish, "" if it did.
    """

    kind: RankKind
    step: RankStep | None = None
    counts: dict[Collective, int] = field(default_factory=dict)
    work: Work = field(default_factory=dict)
    problem: str = ""

    @property
    def peak(self) -> int:
        return self.step.peak.total if self.step else 0

    def dimension(self, one: Collective) -> str:
        """Return the dimension of the mesh along which a collective goes, as a plan names it."""
        assert self.step
        named = self.step.groups.get(one.ranks, EVERYONE)
        if one.op == "all_to_all" and one.module == "update":
            return OWNERS
        if one.op == "all_gather" and named == EVERYONE:
            return COPY
        if one.op in ("all_reduce", "broadcast") and named == "shard":
            return EVERYONE  # of a group that reduces only by scattering
        return NAMES.get(named, named)

    def sent(self) -> dict[str, float]:
        sizes: dict[str, float] = defaultdict(float)
        for one, count in self.counts.items():
            sizes[self.dimension(one)] += one.sent * count
        return dict(sizes)

    @property
    def calls(self) -> dict[Collective, int]:
        calls: Counter[Collective] = Counter()
        for one, count in self.counts.items():
            calls[one._replace(backward=False)] += count
        return calls

    def messages(self, per_node: int) -> Iterator[Message]:
        """Yield what the rank sends in a step, as a plan times it. per_node: ranks of a node."""
        gathers = (one.module for one in self.counts if one.op == "all_gather")
        first = next((module for module in gathers if BLOCK not in module), "")
        for one, count in self.counts.items():
            dimension = self.dimension(one)
            if dimension in (EVERYONE, OWNERS):
                continue
            across = count * _across(one, self.kind.rank, per_node)
            part = BLOCKS if BLOCK in one.module else FIRST if one.module == first else LAST
            lane = REDUCED[part] if one.op == "reduce_scatter" else AGAIN if one.backward else part
            lane = WAITED if dimension in IN_BLOCKS else lane
            lane = REPLICAS if dimension == "replicate" else lane
            reduces = "reduce" in one.op
            yield Message(dimension, lane, one.sent * count, across, reduces, len(one.ranks))

    def across(self, per_node: int) -> float:
        """Return the bytes that the rank sends to other nodes of `per_node` ranks in a step."""
        return sum(
            count * _across(one, self.kind.rank, per_node) for one, count in self.counts.items()
        )


@dataclass(frozen=True)
class Rehearsal:
    """The steps of all kinds of ranks, and in which their orders of collectives differ."""

    kinds: list[RehearsedKind]
    mismatches: list[Mismatch]

    @property
    def finishes(self) -> bool:
        """True if every kind finishes its step, and no group waits for ever."""
        return not self.mismatches and not any(one.problem for one in self.kinds)

    @property
    def largest(self) -> RehearsedKind:
        return max(self.kinds, key=lambda one: one.peak)

    @property
    def busiest(self) -> RehearsedKind:
        """The kind that sends most, among those that finished."""
        done = [one for one in self.kinds if one.step] or self.kinds
        return max(done, key=lambda one: sum(one.sent().values()) if one.step else 0.0)


def rehearse(
    run: Rehearsed, stages: list[int], report: Callable[[str], None] = lambda line: None
) -> Rehearsal:
    """Run one step of each kind of rank. stages: see kinds_of. report: gets lines on progress.

    Raises UserError if no rank can be built.
    """
    layout = run.layout
    ranks_of_stage = layout.stage_ranks
    firsts = [stages.index(kind) * ranks_of_stage for kind in sorted(set(stages))]
    classes = [classes_of_rank(run, rank) for rank in firsts]
    kinds = kinds_of(layout, stages, classes)
    running = sum(kind.runs for kind in kinds)
    results: list[RehearsedKind] = []
    gc.freeze()  # each collection below would look at all that is imported
    for kind in kinds:
        if kind.runs:
            done = sum(one.kind.runs for one in results) + 1
            report(f"rehearsing rank {kind.rank:,} ({done} of {running} kinds)")
        results.append(rehearsed_kind(run, kind) if kind.runs else RehearsedKind(kind))
        gc.collect()
    gc.unfreeze()
    return Rehearsal(results, mismatches([one.step for one in results if one.step]))


def classes_of_rank(run: Rehearsed, rank: int) -> Classes:
    def classes(parts: RankParts) -> Classes:
        return classes_of([each for model in parts.models for each in model.parameters()])

    return with_parts(run, rank, classes)


def rehearsed_kind(run: Rehearsed, kind: RankKind) -> RehearsedKind:
    """Run the step of a kind's first rank, with as few micro-batches as show all that happens."""
    count = run.layout.micro_batches
    few, more = micro_batches_to_run(run)
    try:
        step = step_of_rank(run.with_micro_batches(few), kind.rank)
        counts = Counter(joined_counts(step.collectives))
        work = step.work
        if few < count and more:
            longer = step_of_rank(run.with_micro_batches(few + more), kind.rank)
            for one, times in more_often(longer.collectives, step.collectives).items():
                counts[one] += times * (count - few) // more
            work = grown_work(work, longer.work, (count - few) / more)
            step = grown(step, longer, (count - few) / more)
        elif few < count:
            between = joined_counts(step.collectives[step.marks[1] : step.marks[2]])
            for one, times in between.items():
                counts[one] += times * (count - few)
            of_one = added(step.worked[2], step.worked[1], -1)
            work = added(work, of_one, count - few)
    except Exception as error:  # whatever the program raises is the answer
        return RehearsedKind(kind, problem=described(error))
    return RehearsedKind(kind, step, dict(counts), work)


def more_often(longer: list[Collective], shorter: list[Collective]) -> dict[Collective, int]:
    """Return how much more often each collective is called in the longer of two sequences.

    A message that only has another size, such as the losses of all micro-batches, is left out.
    """
    more = Counter(joined_counts(longer))
    more.subtract(joined_counts(shorter))
    calls: Counter[Collective] = Counter()
    for one, times in more.items():
        calls[sizeless(one)] += times
    return {one: times for one, times in more.items() if times > 0 < calls[sizeless(one)]}


def grown(step: RankStep, longer: RankStep, times: float) -> RankStep:
    """Return a step to whose moments the difference of a longer step is added `times`.

    A pipeline holds the tokens and the scores of all its micro-batches.
    """
    more = round(times * (longer.peak.total - step.peak.total))

    def with_more(held: dict[str, int]) -> dict[str, int]:
        return {**held, "activations": held["activations"] + more}

    moments = {place: with_more(held) for place, held in step.moments.items()}
    return replace(step, peak=step.peak._replace(bytes=with_more(step.peak.bytes)), moments=moments)


def micro_batches_to_run(run: Rehearsed) -> tuple[int, int]:
    """Return the micro-batches of a step to run, and those that a second run has in addition.

    Without a pipeline the second of three stands for all between, and no second run is needed. A
    pipeline must be full for a while; the second run shows what each further micro-batch sends.
    """
    count, stages = run.layout.micro_batches, run.layout.stages
    if stages.ranks == 1 and run.cfg.objective.method.reads in ("unpaired", QUERIES):
        # the baseline, or all vectors, are computed first, from all micro-batches
        few, more = MOST_MICRO_BATCHES, 1
        return (few, more) if few + more < count else (count, 0)
    if stages.ranks == 1:
        return min(count, MOST_MICRO_BATCHES), 0
    if stages.schedule == "gpipe":  # each forward waits until all are done
        return count, 0
    if stages.schedule == "interleaved":
        of_round = count // max(1, count // stages.ranks)
        few, more = 3 * of_round, of_round
    else:
        few, more = stages.order.stages * stages.ranks + BEYOND_STAGES, 1
    return (few, more) if few + more < count else (count, 0)


def described(error: Exception) -> str:
    """Return an error with the last of our own lines that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    inside = [f for f in own if not Path(f.filename).is_relative_to(PACKAGE / "planning/rehearse")]
    place = ""
    if inside:
        file = Path(inside[-1].filename).relative_to(PACKAGE)
        place = f" ({file}:{inside[-1].lineno}, {inside[-1].name})"
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {first}{place}"


def sizeless(one: Collective) -> Collective:
    return one._replace(bytes=0, sent=0.0)


def _across(one: Collective, rank: int, per_node: int) -> float:
    node = rank // per_node
    if one.peer is not None:
        return one.sent * (one.peer // per_node != node)
    size, on_node = len(one.ranks), _on_node(one.ranks, node, per_node)
    if size == on_node:
        return 0.0
    if one.op == "all_to_all":
        return one.sent * (size - on_node) / (size - 1)
    group = Group(size, on_node)
    return one.sent / group.sent * group.across


def _on_node(ranks: Iterable[int], node: int, per_node: int) -> int:
    return sum(rank // per_node == node for rank in ranks)
