"""A rehearsal of a few blocks of each kind, extended to all blocks of the model.

Blocks that repeat add the same bytes and the same messages each. So two rehearsals that differ by
one such period tell what any number of them holds and sends, at each place of a step: the largest
of the places with all blocks may be another one than with few.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from fsdp_trainer.base.live_bytes import Moments, Peak
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Precision
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods import reference_model
from fsdp_trainer.models.config import Json, ModelConfig
from fsdp_trainer.parallel import parallelize, pipeline
from fsdp_trainer.parallel.memory_check import stays_gathered
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.fsdp_units import ModelParts
from fsdp_trainer.planning.plan.pipeline_stages import classes_of_stages
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.rollout_cost import rows_of_answers
from fsdp_trainer.planning.plan.work import grown_work
from fsdp_trainer.planning.rehearse.collectives import Collective
from fsdp_trainer.planning.rehearse.fused_graphs import KeptGraphs
from fsdp_trainer.planning.rehearse.rehearsal import Rehearsal, RehearsedKind, rehearse, sizeless
from fsdp_trainer.planning.rehearse.rehearsed_run import rehearsed_run
from fsdp_trainer.planning.rehearse.rows import full_rows
from fsdp_trainer.planning.rehearse.step_recorder import module_hooks

REPEATED = 3
"""Repeated units of a stage in the shorter rehearsal: one at each end, and one between."""
MOVING = 2
"""Blocks more whose activations are still on the device, on their way to the host."""
LONGEST_PERIOD = 16
DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""Names of the number of blocks in transformers' config.json, the usual one first."""


@dataclass(frozen=True)
class Division:
    """Number of blocks of each stage in a rehearsal: without a pipeline there is one stage.

    alone: how many of them, the first ones, come before those that repeat; period: after how many
    they do; times: how often the difference of the two short rehearsals is to be added to the
    first.
    """

    blocks: tuple[int, ...]
    alone: tuple[int, ...]
    period: int
    times: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        return [sum(self.blocks[:stage]) for stage in range(len(self.blocks))]

    def parts(self) -> list[list[int]]:
        pairs = zip(self.starts, self.blocks, strict=True)
        return [list(range(start, start + count)) for start, count in pairs]


def short_rehearsal(run: Candidate) -> Rehearsal:
    """Return the rehearsal of a run, by few blocks of each kind where they repeat.

    run: without what a rehearsal leaves out. Rows are full. Raises UserError if no rank can be
    built.
    """
    planned = PlannedModel.of(rows_of_answers(run.cfg), run.config, run.world, run.known)
    whole, layout = planned.whole, planned.layout
    classes = classes_of_stages(whole, layout)
    rows = full_rows(run)
    divided = divisions(run, whole, layout)

    def whole_rehearsal() -> Rehearsal:
        return rehearse(rehearsed_run(run, rows), classes)

    if divided is None:
        return whole_rehearsal()
    graphs = KeptGraphs()
    with module_hooks():
        few, more = (rehearsed(run, each, rows, classes, graphs) for each in divided)
    if [one.kind for one in few.kinds] == [one.kind for one in more.kinds]:
        prefix = run.config.names.blocks
        return Extension(layout, *divided, stages_of(whole, layout), prefix).rehearsal(few, more)
    return whole_rehearsal()


def rehearsed(
    run: Candidate, division: Division, rows: Rows, classes: list[int], graphs: KeptGraphs
) -> Rehearsal:
    """Return the rehearsal of a run with fewer blocks.

    rows: of a micro-batch; classes: see kinds_of; graphs: of compiled blocks.
    """
    whole, count = run.config, sum(division.blocks)
    shorter = replace(run, config=with_blocks(whole, count))

    def stays(layout: Layout, config: ModelConfig, precision: Precision) -> bool:
        """Return the decision for all blocks, which few of them might not take."""
        if (config.hidden_size, config.num_hidden_layers) == (whole.hidden_size, count):
            depth, types = whole.num_hidden_layers, whole.layer_types
            config = replace(config, num_hidden_layers=depth, layer_types=types)
        return stays_gathered(layout, config, precision)

    with ExitStack() as patches:
        patches.enter_context(
            patch.object(pipeline, "blocks_by_stage", lambda *_: division.parts())
        )
        for module in (parallelize, reference_model):
            patches.enter_context(patch.object(module, "stays_gathered", stays))
        return rehearse(rehearsed_run(shorter, rows, graphs), classes)


def with_blocks(config: ModelConfig, count: int) -> ModelConfig:
    shorter = replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
    if not config.by_transformers:
        return shorter
    experts = tuple(number for number in config.expert_blocks if number < count)
    source = shortened(config.source, config.num_hidden_layers, count)
    return replace(shorter, source=source, expert_blocks=experts)


def shortened(raw: Json, whole: int, count: int) -> Json:
    """Return a config.json of transformers for the first `count` blocks of `whole`.

    Entries that there are for each block, such as `layer_types` and `hybrid_override_pattern`, are
    cut.
    """
    if "text_config" in raw:
        return {**raw, "text_config": shortened(raw["text_config"], whole, count)}
    depths = [name for name in DEPTHS if name in raw] or [DEPTHS[0]]
    cut = {
        name: value[:count]
        for name, value in raw.items()
        if isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
        if len(value) == whole
    }
    return raw | cut | dict.fromkeys(depths, count)


def stages_of(whole: ModelParts, layout: Layout) -> list[list[int]]:
    if layout.stages.ranks == 1:
        return [list(range(len(whole.kind_of)))]
    return pipeline.blocks_by_stage(whole.model, layout.stages.count)


def divisions(
    run: Candidate, whole: ModelParts, layout: Layout
) -> tuple[Division, Division] | None:
    """Return the two short rehearsals; None if the blocks do not repeat often enough.

    The second has a period more in each stage of which the first has less than all.
    """
    cfg, kinds = run.cfg, signatures(whole)
    first, period = repetition(kinds)
    period = math.lcm(period, cfg.sharding.blocks_per_unit, cfg.activation_checkpoint.every)
    repeated = REPEATED + MOVING * cfg.activation_checkpoint.offload
    shortest = max(repeated, cfg.sharding.prefetch + 2) * cfg.sharding.blocks_per_unit
    parts = stages_of(whole, layout)
    lengths = [len(part) for part in parts]
    alone = tuple(sum(i < first for i in part) for part in parts)
    left_out = [
        max(0, (length - before - shortest) // period)
        for length, before in zip(lengths, alone, strict=True)
    ]
    for rank in range(layout.stages.ranks):  # both stages of a rank grow together
        own = layout.stages.of_rank(rank)
        for stage in own:
            left_out[stage] = min(left_out[other] for other in own)
    few = tuple(n - period * out for n, out in zip(lengths, left_out, strict=True))
    more = tuple(n + period * (out > 0) for n, out in zip(few, left_out, strict=True))
    if sum(few) + sum(more) >= sum(lengths):
        return None
    try:
        short = run.known.parts(with_blocks(run.config, sum(more)), cfg.adapter, cfg.train.freeze)
    except UserError:  # transformers' class has other keys for each block
        return None
    if signatures(short) != kinds[: sum(more)]:
        return None  # patterns name blocks by numbers
    division = Division(few, alone, period, tuple(left_out))
    return division, replace(division, blocks=more)


def signatures(whole: ModelParts) -> list[str]:
    """Return for each block what tells its kind: its weights, and which tokens it sees."""
    config = whole.model.config
    types: Sequence[Any] = config.windows
    if config.by_transformers:
        # imports transformers
        from fsdp_trainer.models.hf.hf_config import config_object

        described = config_object(config.source, config.folder).get_text_config()
        types = getattr(described, "layer_types", None) or types
    if len(types) != len(whole.kind_of):  # of other parts of the model too
        types = [None] * len(whole.kind_of)
    each = zip(whole.kind_of, types, strict=True)
    return [f"{whole.kinds[kind].signature} {seen}" for kind, seen in each]


def repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the number of the first block from which kinds repeat, and how many make a period."""
    periods = []
    for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1):
        first = len(kinds) - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        periods.append((first + 2 * period, first, period))
    return min(periods)[1:]


@dataclass(frozen=True)
class Extension:
    """Adds to a short rehearsal what the blocks that it leaves out hold and send.

    few, more: the two short rehearsals; stages: numbers of all blocks of each stage; prefix: of the
    names of blocks.
    """

    layout: Layout
    few: Division
    more: Division
    stages: list[list[int]]
    prefix: str

    def rehearsal(self, few: Rehearsal, more: Rehearsal) -> Rehearsal:
        pairs = zip(few.kinds, more.kinds, strict=True)
        return Rehearsal([self.kind(*pair) for pair in pairs], more.mismatches)

    def kind(self, few: RehearsedKind, more: RehearsedKind) -> RehearsedKind:
        if few.step is None or more.step is None:
            return more if few.step else few
        stages = self.layout.stages.of_rank(few.kind.rank // self.layout.stage_ranks)
        times = self.few.times[stages[0]]
        moments = self.moments(few.step.moments, more.step.moments, stages, times)
        counts = extended_counts(few.counts, more.counts, times)
        (phase, place), held = max(moments.items(), key=lambda each: sum(each[1].values()))
        staged = few.step.staged + times * (more.step.staged - few.step.staged)
        step = replace(
            more.step,
            peak=Peak(held, place, more.step.peak.operator, phase),
            moments=moments,
            curve=[],
            staged=staged,
        )
        return RehearsedKind(few.kind, step, counts, grown_work(few.work, more.work, times))

    def moments(self, few: Moments, more: Moments, stages: Sequence[int], times: int) -> Moments:
        """Return the most bytes at each place with all blocks.

        Each block is told by its distance from the first and from the last of its stage.
        """
        before, after = self.by_place(few, self.few, stages), self.by_place(more, self.more, stages)
        moments: Moments = {}
        for (phase, place), held in before.items():
            if (phase, place) in after:
                grown = after[phase, place]
                whole = {name: held[name] + times * (grown[name] - held[name]) for name in held}
                moments[phase, self.name_of(place)] = whole
        return moments

    def by_place(self, moments: Moments, division: Division, stages: Sequence[int]) -> Moments:
        """Return moments by places that do not depend on the number of blocks."""
        return {
            (phase, place): held
            for (phase, name), held in moments.items()
            for place in self.places(name, division, stages)
        }

    def places(self, name: str, division: Division, stages: Sequence[int]) -> Iterator[str]:
        """Yield a module's name with its block's distance from the nearer end of its stage.

        The block in the middle of those that repeat is told by both.
        """
        head, last, _ = self.prefix.rpartition(self.prefix.split(".")[-2])
        blocks = re.compile(rf"(?<![\w.])((?:{re.escape(head)})?{last}\.)(\d+)")
        numbers = [int(match[2]) for match in blocks.finditer(name)]
        for side in "+-":
            ends = [self.distance(number, division, stages, side) for number in numbers]
            if all(end is not None for end in ends):
                yield blocks.sub(partial(with_distance, iter(ends)), name)

    def distance(
        self, number: int, division: Division, stages: Sequence[int], side: str
    ) -> str | None:
        """Return a block's distance from the first or the last of its stage; None if it is far."""
        stage = max(stage for stage in stages if division.starts[stage] <= number)
        before = division.alone[stage]
        repeated = self.few.blocks[stage] - before
        period = self.few.period
        half = period * math.ceil(repeated / period / 2) - 1
        own, limit = number - division.starts[stage], before + half
        if side == "-":
            own, limit = division.blocks[stage] - 1 - own, half
        return None if own > limit else f"<{stage}{side}{own}>"

    def name_of(self, place: str) -> str:
        """Return the name of a place with all blocks."""

        def number(match: re.Match[str]) -> str:
            part = self.stages[int(match[1])]
            return str(part[int(match[3])] if match[2] == "+" else part[-1 - int(match[3])])

        return re.sub(r"<(\d+)([+-])(\d+)>", number, place)


def with_distance(distances: Iterator[str | None], match: re.Match[str]) -> str:
    """Return the name of a block with the next distance in place of its number."""
    return f"{match[1]}{next(distances)}"


def extended_counts(
    few: dict[Collective, int], more: dict[Collective, int], times: int
) -> dict[Collective, int]:
    """Return how often each collective is called with all blocks.

    A message that has another size with more blocks, such as one with a number for each parameter,
    grows by the same at each.
    """
    counts: dict[Collective, int] = {}
    sized: dict[Collective, list[Collective]] = defaultdict(list)
    for one in few:
        if one not in more:
            sized[sizeless(one)].append(one)
    for one, count in more.items():
        if one in few:
            counts[one] = few[one] + times * (count - few[one])
        elif shorter := sized[sizeless(one)]:
            counts[grown_message(shorter.pop(0), one, times)] = count
        else:
            counts[one] = count
    return counts


def grown_message(one: Collective, longer: Collective, times: int) -> Collective:
    size = one.bytes + times * (longer.bytes - one.bytes)
    return one._replace(bytes=size, sent=one.sent + times * (longer.sent - one.sent))
