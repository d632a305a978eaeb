"""Overrides that would make a run fit, or faster: each tried by the same plan, and told with what it costs."""

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from fsdp_trainer.config.check import Report
from fsdp_trainer.config.dimensions import batch_ranks, dimension_sizes
from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.rules import check_rules
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.plan.plan import RunPlan, make_plan

SAME, MOMENTS, WORLD, NUMBERS, ADAPTERS, TRAINING = range(6)
"""What a change touches: time alone; how moments are kept; how many ranks there are; what is
computed; what is trained; what is learnt from. Those from NUMBERS on may change what is learnt."""
MOST, ENOUGH = 8, 4  # suggestions; and how many make looking for longer ones needless
GAIN = 0.02  # below which a step is not called faster
LESS = 0.01  # below which a change is not said to save memory


class Suggestion(NamedTuple):
    """override: words of a command line. cost: how much more time of GPUs a token takes, 0.25 for a quarter; below 0 it takes less."""

    override: str
    peak_bytes: float
    cost: float
    why: str


class Change(NamedTuple):
    """What to type, the keys that this sets, what it is about, and its kind (SAME …)."""

    override: str
    keys: dict[str, Any]
    why: str
    kind: int = SAME


def suggest(cfg: TrainConfig, config: ModelConfig, world: int, device: Device) -> list[Suggestion]:
    """Return what makes a run fit that does not: first what leaves alone what is learnt, then what
    may change it, each by the time it costs. For one that fits: what makes it faster and still
    fits.
    """
    plan = make_plan(cfg, config, world, device)
    if plan.fits:
        better = [
            found
            for change in faster(cfg, world, device)
            if (found := tried(change, cfg, config, plan)) and found.cost < -GAIN
        ]
        return sorted(better, key=lambda found: found.cost)[:MOST]
    changes = list(smaller(cfg, world, device))
    enough: dict[frozenset[str], tuple[int, Suggestion]] = {}  # by what is typed
    for count in (1, 2, 3):
        for some in combinations(changes, count):
            words = frozenset(change.override for change in some)
            change = together(*some)
            if (
                change
                and not any(fewer < words for fewer in enough)
                and (found := tried(change, cfg, config, plan))
            ):
                enough[words] = change.kind, found
        if len(enough) >= ENOUGH:
            break
    # of those that differ in a number the one that costs least, or changes least
    best: dict[str, tuple[int, Suggestion]] = {}
    for kind, found in sorted(enough.values(), key=_by_kind):
        best.setdefault(re.sub(r"=\d+\b", "=", found.override), (kind, found))
    more = [(WORLD, found) for found in larger(cfg, config, plan)]
    adapted = [(ADAPTERS, found) for found in with_adapters(cfg, config, plan)]
    here = [one for one in best.values() if one[0] < ADAPTERS]
    here = here[: MOST - 1 - len(more) - len(adapted)]
    training = [one for one in best.values() if one[0] == TRAINING]
    chosen = [*here, *more, *adapted, *training][:MOST]
    return [found for _, found in sorted(chosen, key=_by_cost)]


def _by_kind(suggestion: tuple[int, Suggestion]) -> tuple:
    kind, found = suggestion
    return kind, found.cost, -found.peak_bytes


def _by_cost(suggestion: tuple[int, Suggestion]) -> tuple:
    kind, found = suggestion
    return kind >= NUMBERS, found.cost, kind, -found.peak_bytes


def changed(cfg: TrainConfig, keys: dict[str, Any]) -> TrainConfig:
    """`cfg` with other values, e.g. {"optim.state_dtype": "8bit"}."""
    for key, value in keys.items():
        node, name = key.split(".")
        cfg = replace(cfg, **{node: replace(getattr(cfg, node), **{name: value})})
    return cfg


def smaller(cfg: TrainConfig, world: int, device: Device) -> Iterator[Change]:
    """Single changes that take less memory on the same devices."""
    asked, sharding, formats = cfg.activation_checkpoint, cfg.sharding, cfg.precision
    if asked.mode not in ("full", "selective"):
        why = "all but attention and every second product is computed again"
        yield Change(
            "activation_checkpoint=selective", {"activation_checkpoint.mode": "selective"}, why
        )
    if asked.mode != "full":
        yield Change(
            "activation_checkpoint=full",
            {"activation_checkpoint.mode": "full"},
            "blocks are computed again in backward",
        )
    if asked.every > 1:
        yield Change(
            "activation_checkpoint.every=1",
            {"activation_checkpoint.every": 1},
            "every block is computed again",
        )
    if device.name != "cpu" and not asked.offload:
        why = "what blocks keep for backward waits in host memory"
        yield Change(
            "activation_checkpoint.offload=true", {"activation_checkpoint.offload": True}, why
        )
    rows = cfg.batch.micro_rows
    for fewer in sorted({rows // 2**i for i in range(1, rows.bit_length())}):
        yield Change(
            f"batch.micro_rows={fewer}",
            {"batch.micro_rows": fewer},
            "more micro-batches, more communication",
        )
    yield from _sharded_more(cfg, world)
    if device.name != "cpu" and sharding.strategy != "ddp" and not sharding.cpu_offload:
        why = "the host holds and updates the states"
        yield Change("sharding.cpu_offload=true", {"sharding.cpu_offload": True}, why)
    if device.name != "cpu" and (cfg.loss.chunk_mib or math.inf) > 128:
        yield Change(
            "loss.chunk_mib=128",
            {"loss.chunk_mib": 128},
            "the head's products are smaller, and slower by what is not reckoned",
        )
    if (held := moments_format(cfg.optim, formats.master_dtype)) == "float32":
        yield Change(
            "optim=adamw_bf16",
            {"optim.state_dtype": "bfloat16"},
            "moments are kept in bfloat16",
            MOMENTS,
        )
    if held != "8bit":
        yield Change(
            "optim=adamw_8bit", {"optim.state_dtype": "8bit"}, "moments are kept in 8 bits", MOMENTS
        )
    if formats.param_dtype == "float32":
        bf16 = {
            "precision.param_dtype": "bfloat16",
            "precision.reduce_dtype": "float32",
            "precision.master_dtype": "float32",
        }
        yield Change(
            "precision=bf16",
            bf16,
            "forward and backward compute in bfloat16: other numbers",
            NUMBERS,
        )
    if formats.master_dtype == "float32":
        pure = {
            "precision.param_dtype": "bfloat16",
            "precision.reduce_dtype": "float32",
            "precision.master_dtype": "bfloat16",
        }
        why = "weights, gradients and moments are kept in bfloat16: other numbers, which may learn less"
        yield Change("precision=pure_bf16", pure | {"precision.float8": None}, why, NUMBERS)
    if formats.reduce_dtype == "float32" and world > 1:
        why = "gradients are summed over ranks in bfloat16: other numbers"
        yield Change(
            "precision.reduce_dtype=bfloat16", {"precision.reduce_dtype": "bfloat16"}, why, NUMBERS
        )
    length = cfg.batch.seq_len
    for shorter in (length // 2, length // 4):
        if shorter >= 512:
            yield Change(
                f"batch.seq_len={shorter}",
                {"batch.seq_len": shorter},
                "fewer tokens a step: another training",
                TRAINING,
            )


def _sharded_more(cfg: TrainConfig, world: int) -> Iterator[Change]:
    sharding = cfg.sharding
    if sharding.strategy != "fsdp" and world > 1:
        words = "sharding=fsdp" + (" sharding.replicas=1" if sharding.replicas > 1 else "")
        keys = {"sharding.strategy": "fsdp", "sharding.replicas": 1}
        yield Change(words, keys, "all ranks share one copy of the states")
    if sharding.strategy != "ddp" and keeps_gathered(sharding):
        why = "blocks are gathered again in backward"
        yield Change(
            "sharding.reshard_after_forward=true", {"sharding.reshard_after_forward": True}, why
        )
    for name, least, why in (
        ("prefetch", 1, "fewer blocks are gathered ahead"),
        ("blocks_per_unit", 1, "blocks are gathered one at a time"),
    ):
        if getattr(sharding, name) > least:
            yield Change(f"sharding.{name}={least}", {f"sharding.{name}": least}, why)
    if sharding.accumulate == "unsharded":
        why = "every micro-batch reduces its gradients"
        yield Change("sharding.accumulate=sharded", {"sharding.accumulate": "sharded"}, why)


def faster(cfg: TrainConfig, world: int, device: Device) -> Iterator[Change]:
    """Single changes that take more memory, or none, and may take less time. The numbers stay the same."""
    asked, sharding, rows = cfg.activation_checkpoint, cfg.sharding, cfg.batch.micro_rows
    readers = batch_ranks(dimension_sizes(sharding, world))
    if device.name != "cpu" and not cfg.compile.enabled:
        yield Change(
            "compile=enabled",
            {"compile.enabled": True},
            "blocks are compiled, which takes a minute or so first",
        )
    for mode in ("none", "selective"):
        if asked.mode not in ("none", mode):
            why = (
                "backward computes nothing again"
                if mode == "none"
                else "backward computes less again"
            )
            yield Change(f"activation_checkpoint={mode}", {"activation_checkpoint.mode": mode}, why)
    if asked.offload:
        change = "activation_checkpoint.offload=false"
        why = "nothing is copied to the host and back"
        yield Change(change, {"activation_checkpoint.offload": False}, why)
    if rows > 1 and cfg.batch.rows % (rows * readers):
        fewer = [rows // 2**i for i in range(1, rows.bit_length())]
        why = "fewer rows that ranks compute are empty"
        for some in fewer:
            yield Change(f"batch.micro_rows={some}", {"batch.micro_rows": some}, why)
    for more in (2 * rows, 4 * rows):
        if more * readers <= cfg.batch.rows:
            yield Change(
                f"batch.micro_rows={more}",
                {"batch.micro_rows": more},
                "fewer micro-batches, less communication",
            )
    if world > 1 and sharding.strategy == "fsdp":
        yield Change(
            "sharding=ddp",
            {"sharding.strategy": "ddp"},
            "nothing is gathered; every rank holds all",
        )
        if not keeps_gathered(sharding):
            why = "blocks stay gathered until backward"
            yield Change(
                "sharding.reshard_after_forward=false",
                {"sharding.reshard_after_forward": False},
                why,
            )
        if world > device.per_node and not world % device.per_node:
            nodes = world // device.per_node
            keys = {"sharding.strategy": "hsdp", "sharding.replicas": nodes}
            yield Change(
                f"sharding=hsdp sharding.replicas={nodes}", keys, "blocks are gathered inside nodes"
            )


def larger(cfg: TrainConfig, config: ModelConfig, plan: RunPlan) -> list[Suggestion]:
    """Return the smallest world that fits, with as little else changed as that takes, or nothing."""
    for some in basic_changes(cfg, plan):
        keys = {key: value for change in some for key, value in change.keys.items()}
        settings = changed(cfg, keys)
        world = None if refused(settings) else smallest_world(settings, config, plan)
        if world is None:
            continue
        units = "ranks" if plan.device.name == "cpu" else "GPUs"
        why = f"{world} {units} instead of {plan.world_size}"
        more = Change(f"plan.world_size={world}", {}, why)
        new = make_plan(settings, config, world, plan.device)
        change = together(more, *some) or more
        why = change.why + _empty_rows(new)
        return [Suggestion(change.override, new.memory.peak.total, cost(new, plan), why)]
    return []


def basic_changes(cfg: TrainConfig, plan: RunPlan) -> list[tuple[Change, ...]]:
    """Return combinations of the usual ways to save memory, the shortest first."""
    possible = smaller(cfg, plan.world_size, plan.device)
    by_name = {change.override.split()[0]: change for change in possible}
    usual = ("sharding=fsdp", "activation_checkpoint=full", "batch.micro_rows=1")
    changes = [by_name[name] for name in usual if name in by_name]
    return [some for count in range(len(changes) + 1) for some in combinations(changes, count)]


def with_adapters(cfg: TrainConfig, config: ModelConfig, plan: RunPlan) -> list[Suggestion]:
    """Return adapters with which it fits, in 16 and in 4 bits, as little else changed as that
    takes."""
    suggestions = []
    for adapter in adapters(cfg):
        changes = (together(adapter, *some) for some in basic_changes(cfg, plan))
        fitting = (tried(change, cfg, config, plan) for change in changes if change)
        suggestions += [found for found in fitting if found][:1]
    return suggestions


def least(cfg: TrainConfig, config: ModelConfig, plan: RunPlan) -> Suggestion:
    """Return the changes with which a rank holds least on as many devices, fitting or not.

    One after the other, each time the one that saves most. Rows stay as long as they are.
    """
    every = [*smaller(cfg, plan.world_size, plan.device), *adapters(cfg)]
    possible = [change for change in every if change.kind != TRAINING]
    best, chosen = plan, Change("", {}, "")
    while True:
        longer = [together(chosen, change) for change in possible]
        tries = [planned(change, cfg, config, plan) for change in longer if change]
        valid = [one for one in tries if one and not refused(changed(cfg, one[1].keys))]
        new, change = min(valid, key=lambda one: one[0].memory.peak.total, default=(best, chosen))
        if new.memory.peak.total > (1 - LESS) * best.memory.peak.total:
            break
        best, chosen = new, change
    return Suggestion(chosen.override.strip(), best.memory.peak.total, cost(best, plan), "")


def adapters(cfg: TrainConfig) -> Iterator[Change]:
    """Changes for a fine-tuning: from all weights to an adapter, from 16 bits to 4."""
    if cfg.model.init_from is None or cfg.train.freeze:
        return
    four_bits = {"adapter.base": "nf4"}
    if cfg.adapter.name == "none":
        why = (
            "low-rank matrices are trained, the weights are frozen; optim.lr about 10 times as high"
        )
        lora = {"adapter.name": "lora"}
        yield Change("adapter=lora", lora, why, ADAPTERS)
        why = f"{why}, on weights of 4 bits"
        yield Change("adapter=qlora", lora | four_bits, why, ADAPTERS)
    elif cfg.adapter.base != "nf4":
        why = "frozen weights are kept in 4 bits"
        yield Change("adapter.base=nf4", four_bits, why, ADAPTERS)


def _empty_rows(plan: RunPlan) -> str:
    """Return how much of a larger world has nothing to do, and what would give it rows."""
    if not plan.empty_share:
        return ""
    return f"; {plan.empty_share:.0%} of their rows are empty: batch.rows={plan.computed_rows}"


def smallest_world(cfg: TrainConfig, config: ModelConfig, plan: RunPlan) -> int | None:
    """The fewest ranks beyond the plan's on which `cfg` fits: whole nodes, once one is full."""
    replicas = cfg.sharding.replicas
    node = math.lcm(plan.device.per_node, replicas)

    def fits(world: int) -> bool:
        return make_plan(cfg, config, world, plan.device).fits

    within = (2**i for i in range(10) if plan.world_size < 2**i < node and not 2**i % replicas)
    if found := next(filter(fits, within), None):
        return found
    low = plan.world_size // node  # nodes that are too few
    high = next((nodes for i in range(16) if fits((nodes := (low + 1) * 2**i) * node)), None)
    while high and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * node) else (middle, high)
    return high * node if high else None


def together(*changes: Change) -> Change | None:
    """One change of several; None where they are about the same key."""
    keys = {key: value for change in changes for key, value in change.keys.items()}
    if len(keys) < sum(len(change.keys) for change in changes):
        return None
    whys = "; ".join(change.why for change in changes)
    return Change(
        " ".join(change.override for change in changes),
        keys,
        whys,
        max(change.kind for change in changes),
    )


def planned(
    change: Change, cfg: TrainConfig, config: ModelConfig, plan: RunPlan
) -> tuple[RunPlan, Change] | None:
    """Return the plan with a change, and the change; None if an adapter does not fit the model."""
    settings = changed(cfg, change.keys)
    try:
        return make_plan(settings, config, plan.world_size, plan.device), change
    except UserError:
        return None


def tried(
    change: Change, cfg: TrainConfig, config: ModelConfig, plan: RunPlan
) -> Suggestion | None:
    """What a change does, if it fits with it and no rule between keys forbids it."""
    result = planned(change, cfg, config, plan)
    if result is None or not result[0].fits or refused(changed(cfg, change.keys)):
        return None
    new, _ = result
    host = ""
    if new.memory.host and not plan.memory.host:
        a_node = new.host_bytes_per_node / 2**30
        host = f" ({new.memory.host / 2**30:,.0f} GiB a rank, {a_node:,.0f} a node)"
    return Suggestion(change.override, new.memory.peak.total, cost(new, plan), change.why + host)


def cost(new: RunPlan, old: RunPlan) -> float:
    """Return how much more time of all devices together a token takes than it would in the old
    plan, if that fitted: 0.25 for a quarter. Two digits, which is more than the plan knows."""
    a_token = new.seconds * new.world_size / new.tokens
    before = old.seconds * old.world_size / old.tokens
    return round(a_token / before - 1, 2)


def refused(cfg: TrainConfig) -> bool:
    """Whether some rule between keys forbids it."""
    report = Report({}, [], set())
    check_rules(deepcopy(cfg), report)
    return bool(report.problems)
