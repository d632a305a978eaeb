"""The links between groups of ranks, whose doctors meet at the same lighthouse."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_trainer.apps.doctor import speed
from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.launch.facts import Check, gigabytes, judge
from fsdp_trainer.launch.group_secret import TOKEN
from fsdp_trainer.launch.world import World
from fsdp_trainer.replicas.exchange import sum_over_groups

COME_SECONDS = 60.0
"""Seconds that groups wait for others to come."""
SUM_SECONDS = 60.0
"""Longest time of a sum."""
TURNS = 3
"""Sums that are measured: a fixed number, since all groups must call equally often."""
TOGETHER = (
    "Start the doctor in each group at the same time, each with its replicas.id and the same"
    " replicas.lighthouse; replicas.min is the number of groups to wait for"
)


def group_links(cfg: DoctorConfig, world: World, timeout: float) -> list[Check]:
    """Measure sums over all groups, and the link between each group and the next one. Collective.

    Ranks with the same number exchange at the same time, as in training.
    """
    if cfg.replicas.method == "none":
        return []
    if cfg.replicas.lighthouse is None:
        return [Check("note", "groups", "not measured: there is no lighthouse", TOGETHER)]
    # imports torchft
    from fsdp_trainer.replicas.membership import Membership

    settings = {"verb": "doctor", "ranks": str(world.size)}
    secret = os.environ.get(TOKEN, "").encode()  # a doctor has no state to guard
    membership = Membership(
        cfg.replicas, world, world.device, timeout, settings, secret, dict, lambda _: None
    )
    try:
        wanted, began = max(2, cfg.replicas.min), time.monotonic()
        membership.meet(0)
        while (
            membership.present < wanted and speed.largest(time.monotonic() - began) < COME_SECONDS
        ):
            time.sleep(0.2)
            membership.meet(0)
        count, place = membership.present, membership.place
        if count < wanted:
            text = f"{counted(count, 'group')} of {wanted} came within {COME_SECONDS:g} s"
            return [Check("warning", "groups", text, TOGETHER)]
        return [
            Check("ok", "groups", f"{count} met at {cfg.replicas.lighthouse}; this is {place}"),
            *sums(membership.group.parent, world),
            *neighbours(membership.group.parent, world, cfg.doctor.slow),
        ]
    finally:
        membership.shutdown(wait=False)


def sums(group: dist.ProcessGroup, world: World) -> list[Check]:
    """Measure sums over all groups, of the slowest rank. Collective."""
    findings = []
    for size in speed.SIZES:
        tensor = torch.zeros(size // 4, device=world.device)
        seconds = []
        for _ in range(TURNS + 1):
            speed.finish(world.device)
            began = time.perf_counter()
            sum_over_groups(group, [tensor], timedelta(seconds=SUM_SECONDS))
            speed.finish(world.device)
            seconds.append(speed.largest(time.perf_counter() - began))
        rate = size / min(seconds[1:])  # the first one also makes the connections
        text = f"{size // speed.MIB:>2} MiB a rank: {gigabytes(rate)} for each rank"
        findings.append(Check("ok", "sum over groups", text))
    return findings


def neighbours(group: dist.ProcessGroup, world: World, slow: float) -> list[Check]:
    """Measure from each group to the next one and back, of the slowest rank. Collective."""
    count = group.size()
    buffer = torch.zeros(speed.LINK_BYTES // 4, device=world.device)
    rates = torch.zeros(count - 1, dtype=torch.float64)
    for first in range(count - 1):
        if group.rank() in (first, first + 1):
            rate = speed.there_and_back(buffer, first, first + 1, group)
            slowest = -speed.largest(-rate)
            rates[first] = slowest if group.rank() == first else 0.0
    # on the device: NCCL sums no others
    shared = rates.to(world.device)
    sum_over_groups(group, [shared], timedelta(seconds=SUM_SECONDS))
    named = {f"group {i} ↔ group {i + 1}": rate for i, rate in enumerate(shared.tolist())}
    findings = judge("links between groups", named, slow, world.device.type, gigabytes)
    gbps = 8 * min(named.values()) / 1e9
    findings[0].advice = f"for  fsdp-trainer plan:  plan.groups_gbps={gbps:.3g}"
    return findings
