"""The costs and savings of groups of ranks that share a run, in the output of `plan`."""

from typing import Any, NamedTuple

from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.observe.console import duration
from fsdp_trainer.optim.schedules import steps_between
from fsdp_trainer.planning.plan.memory import GIB
from fsdp_trainer.planning.plan.plan import RunPlan

START_SECONDS = 600.0
"""Assumed seconds from a failure until all ranks train again."""
LEFT_OUT_SECONDS = 5.0
"""Seconds after which a lost group is left out, see docs/replicas.md."""


class Lost(NamedTuple):
    """Seconds that a failure takes from the ranks: with groups from the others, else from all."""

    with_groups: float
    without: float


class GroupMessages(NamedTuple):
    """The messages of a rank to other groups, in every so many steps.

    sent: bytes; seconds: at `gbps` Gbit/s.
    """

    steps: int
    sent: float
    gbps: float
    seconds: float


def exchange_of(cfg: PlanConfig, plan: RunPlan) -> GroupMessages:
    steps = cfg.replicas.every if cfg.replicas.method == "diloco" else 1
    sent = plan.wire["groups"].reduced * steps
    gbps = cfg.plan.groups_gbps or plan.device.network * 8 / 1e9
    return GroupMessages(steps, sent, gbps, sent / (gbps / 8 * 1e9))


def lost_to_failure(cfg: PlanConfig, plan: RunPlan) -> Lost | None:
    """Return what a failure costs; None if the device's speed is unknown.

    Without groups it is half the time between two checkpoints, and a start.
    """
    if plan.step_seconds is None:
        return None
    between = (steps_between(cfg.checkpoint.every, cfg.train.steps) or 0) * plan.seconds
    return Lost(LEFT_OUT_SECONDS + plan.seconds, START_SECONDS + between / 2)


def groups_json(cfg: PlanConfig, plan: RunPlan) -> dict[str, Any] | None:
    if plan.groups == 1:
        return None
    exchange, lost = exchange_of(cfg, plan), lost_to_failure(cfg, plan)
    return {
        "groups": plan.groups,
        "every": exchange.steps,
        "bytes_per_exchange": round(exchange.sent),
        "gbps": exchange.gbps,
        "seconds_per_exchange": exchange.seconds,
        "lost_seconds_with_groups": lost.with_groups if lost else None,
        "lost_seconds_without": lost.without if lost else None,
    }


def groups_rows(cfg: PlanConfig, plan: RunPlan) -> list[tuple[str, str]]:
    if plan.groups == 1:
        return []
    exchange, lost = exchange_of(cfg, plan), lost_to_failure(cfg, plan)
    often = "in each step" if exchange.steps == 1 else f"every {exchange.steps:,} steps"
    text = (
        f"this is one of {plan.groups}, {plan.devices:,} ranks in all. To the others a rank sends "
        f"{exchange.sent / GIB:.2f} GiB {often}: {exchange.seconds:.2f} s at {exchange.gbps:g} "
        "Gbit/s"
    )
    if lost:
        text += (
            f". A failure costs the others {duration(lost.with_groups)}; without groups, all "
            f"ranks {duration(lost.without)}, {duration(START_SECONDS)} of them to start"
        )
    return [("groups", text)]
