"""Facts of every rank that must agree before the first collective, and their comparison.

Used by `train` and by `doctor`.
"""

import hashlib
import math
import os
import platform
import re
import resource
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from fsdp_trainer.base.recorded import marks_of
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.parallel.memory_check import gib

PACKAGES = (
    *("hydra-core", "numpy", "safetensors", "tokenizers", "torchao"),
    *("flash-attn-3", "flash-attn-4", "flash-linear-attention", "causal-conv1d"),
)
SETTINGS = re.compile(
    r"(NCCL|GLOO|TORCH|UCX|FI|PYTORCH)_|(OMP|MKL)_NUM_THREADS$|CUDA_LAUNCH_BLOCKING$"
)  # environment variables to compare
OF_A_NODE = re.compile(
    r"launch\.|logging\.|profile\.|doctor\.|run\.root$|.*\.(path|cache|init_from|template)$"
    r"|data\.validation$"
)
"""Keys that may differ between nodes: paths, how ranks are started, and what only rank 0 does."""
MUST_BE_EQUAL = ("torch", "CUDA", "NCCL", "fsdp_trainer", "device", "NCCL_ALGO", "NCCL_PROTO")
# variables that name a host's own devices or files, or control logging
MAY_DIFFER = re.compile(r".*_(IFNAME|HCA|FILE)$|(NCCL|TORCH)_.*DEBUG")
CLOCK_SECONDS = 1.0
SHM_BYTES = 2**30  # Docker's default is 64 MiB; NCCL needs some tens of MiB for each rank
OTHER_FILES = 256  # open files of a rank: libraries, the token store, a checkpoint's shards
GROUPS = 3  # sets of connections to all ranks: gloo for training, for checkpoints, and the store
MAX_NAMED = 8  # slow devices or links reported for one measurement
MAX_HOSTS = 4  # hosts named in a message
SAME = {
    "versions": "Ranks run the same code in the same environment",
    "environment": "Use the same value on all nodes",
    "machine": "Use the same value on all nodes",
}
SHARED_ROOT = (
    "Every rank writes its part of a checkpoint there:"
    "  run.root=FOLDER  on storage that all nodes share"
)
SAME_FILES = (
    "The nodes would train on different rows. Give every node the same files, or one data.cache"
    " that all see"
)
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Check:
    """A finding of a check.

    mark: `ok`, `note`, `warning` (slower, or less reliable) or `problem` (will break or cripple a
    run); certain: True if `train` refuses to start.
    """

    mark: str
    what: str
    text: str
    advice: str = ""
    certain: bool = False


@dataclass
class RankFacts:
    """The facts of one rank.

    clock: time on its host, in Unix seconds; shm: size of /dev/shm in bytes.
    """

    node: int
    host: str
    clock: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Keys of the configuration that are not at their defaults."""
    data: str = ""
    unshared: str = ""
    """The reason why this rank does not see rank 0's run folder; "" if it does."""
    shm: float = 0.0
    files: int = 0
    """Limit on open files; -1 if there is none."""


def facts_of(
    settings: dict[str, str],
    world: World,
    data: str = "",
    unshared: str = "",
    alone: bool = False,
) -> RankFacts:
    """Return the facts of this rank.

    Versions, environment and settings serve only for comparison. A single rank leaves them empty,
    unless `alone` is True.
    """
    facts = RankFacts(world.node, socket.gethostname(), time.time(), data=data, unshared=unshared)
    facts.shm = float("inf")
    if SHARED_MEMORY.is_dir():
        facts.shm = float(shutil.disk_usage(SHARED_MEMORY).total)
    facts.files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if world.size > 1 or alone:
        facts.versions = versions(world.device)
        facts.environment = {
            name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)
        }
        facts.settings = settings
    return facts


@cache
def versions(device: torch.device) -> dict[str, str]:
    names = {"python": platform.python_version(), "torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        names["CUDA"] = str(torch.version.cuda or torch.version.hip)
        names["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        names["GPU"] = torch.cuda.get_device_name(device)
        text = DRIVER.read_text() if DRIVER.is_file() else ""
        driver = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", text)
        names["driver"] = driver[1] if driver else "unknown"
    for package in PACKAGES:
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            names[package] = "none"
    return names | {"fsdp_trainer": source_digest(Path(__file__).parents[1])}


def source_digest(package: Path) -> str:
    """Return a digest of the package's code.

    The version number is not enough: an outdated checkout may have the same one.
    """
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return f"sources {digest.hexdigest()}"


def changed_keys(cfg: TrainConfig) -> dict[str, str]:
    return {
        f"{group}.{name}": as_compared(value)
        for (group, keys), default in zip(
            asdict(cfg).items(), asdict(type(cfg)()).values(), strict=True
        )
        for name, value in keys.items()
        if value != default[name]
    }


def as_compared(value: Any) -> str:
    """Return a value as text, with a short hash if the environment gave it or a part of it."""
    text = as_text(value)
    if not any(marks_of(value)):
        return text
    return f"{text} ({hashlib.blake2b(repr(value).encode(), digest_size=3).hexdigest()})"


def preflight(
    cfg: TrainConfig,
    world: World,
    run: Path,
    shared: bool,
    data: str,
    checkpoint: float,
    timeout: float,
) -> list[str]:
    """Compare all ranks before the first collective of `train`.

    Returns the warnings to print, on rank 0. Raises UserError on all ranks if they do not agree.
    shared: True if this rank sees the `run` folder that rank 0 has claimed; data: fingerprint of
    the prepared data; checkpoint: size of a checkpoint in bytes.
    """
    began = world.from_main("facts/began", time.time, timeout)
    unshared = "" if shared else f"{run.absolute()} is not the folder that rank 0 claimed"
    everyone = world.to_main("facts", facts_of(changed_keys(cfg), world, data, unshared), timeout)
    problems: list[Problem] = []
    findings: list[Check] = []
    if world.main:
        findings = [
            *compare(everyone, began, time.time()),
            *limits(everyone, world.device.type),
            *parted_tensor_groups(cfg.sharding, everyone),
            *room(run, checkpoint, cfg.checkpoint.keep),
        ]
        problems = [
            Problem(f.what, "\n".join(filter(None, [f.text, f.advice])))
            for f in findings
            if f.certain
        ]
    problems = world.from_main("facts/problems", lambda: problems, timeout)
    if problems:
        world.wait_until_heard("facts/problems")
        raise UserError("the ranks do not agree", problems)
    shown = [f for f in findings if f.mark in ("warning", "problem")]
    return [f"{f.what}: {f.text}" + (f"\n       {f.advice}" if f.advice else "") for f in shown]


def compare(facts: Sequence[RankFacts], began: float, ended: float) -> list[Check]:
    """Return the differences between ranks.

    began, ended: rank 0's clock before and after all ranks read theirs, in Unix seconds.
    """
    kinds = ("settings", "versions", "environment")
    findings = [finding for kind in kinds for finding in differences(facts, kind)]
    data = by_value([f.data for f in facts])
    if len(data) > 1:
        versions = ", ".join(f"{name} on {who(ranks, facts)}" for name, ranks in data)
        text = f"prepared differently: {versions}"
        findings.append(Check("problem", "data", text, SAME_FILES, certain=True))
    for reason, ranks in by_value([f.unshared for f in facts]):
        if reason:
            text = f"is not shared. {who(ranks, facts)}: {reason}"
            findings.append(Check("problem", "run.root", text, SHARED_ROOT, certain=True))
    return findings + clocks(facts, began, ended)


def clocks(facts: Sequence[RankFacts], began: float, ended: float) -> list[Check]:
    """Return a warning for each host whose clock was outside `began` to `ended` by rank 0's clock.

    A difference of up to CLOCK_SECONDS is tolerated.
    """
    checks = []
    for node, ranks in by_value([f.node for f in facts]):
        clock = facts[ranks[0]].clock
        off = clock - ended if clock > ended else min(0.0, clock - began)
        if abs(off) > CLOCK_SECONDS and node != facts[0].node:
            text = (
                f"that of {facts[ranks[0]].host} is at least {abs(off):.1f} s"
                f" {'ahead of' if off > 0 else 'behind'} {facts[0].host}'s"
            )
            advice = (
                "Logs cannot be put in order, and shared storage takes new files for old ones:"
                " let chrony or ntpd set it"
            )
            checks.append(Check("warning", "clock", text, advice))
    return checks


def differences(facts: Sequence[RankFacts], kind: str) -> list[Check]:
    """Return a finding for each name whose value differs between ranks.

    kind: the field of RankFacts to compare: `settings`, `versions`, `environment` or `machine`.
    """
    checks = []
    for name in sorted({name for f in facts for name in getattr(f, kind)}):
        absent = "the default" if kind == "settings" else "not set"
        by_rank = [getattr(f, kind).get(name, absent) for f in facts]
        (usual, majority), *others = by_value(by_rank)
        if not others:
            continue
        text = ", ".join(f"{value} on {who(ranks, facts)}" for value, ranks in others)
        text += f"; {usual} on {'the others' if len(majority) > 1 else who(majority, facts)}"
        if kind == "settings":
            certain = not may_differ(name, set(by_rank))
            mark = "problem" if certain else "warning"
            advice = "Start every node with the same command"
            checks.append(Check(mark, name, text, advice, certain))
        elif name in MUST_BE_EQUAL:
            checks.append(Check("problem", name, text, SAME[kind]))
        elif MAY_DIFFER.match(name):
            checks.append(Check("note", name, text))
        else:
            checks.append(Check("warning", name, text, SAME[kind]))
    return checks


def may_differ(key: str, values: set[str]) -> bool:
    if key == "checkpoint.resume":
        return values.isdisjoint({"auto", "never", "the default"})
    return OF_A_NODE.match(key) is not None


def limits(facts: Sequence[RankFacts], device: str) -> list[Check]:
    checks = []
    ranks_of = Counter(f.node for f in facts)
    small = [rank for rank, f in enumerate(facts) if f.shm < SHM_BYTES and ranks_of[f.node] > 1]
    if small and device == "cuda":
        text = f"{gib(facts[small[0]].shm)} on {who(small, facts)}, through which NCCL's ranks talk"
        advice = "docker run --shm-size=16g ; in Kubernetes an emptyDir with  medium: Memory"
        checks.append(Check("problem", "/dev/shm", text, advice))
    needed = GROUPS * len(facts) + OTHER_FILES
    few = [rank for rank, f in enumerate(facts) if 0 <= f.files < needed]
    if few:
        text = (
            f"{facts[few[0]].files:,} on {who(few, facts)};"
            f" connections to {len(facts):,} ranks take up to {needed:,}"
        )
        checks.append(Check("problem", "open files", text, "ulimit -n 65536  before the launcher"))
    return checks


def parted_tensor_groups(sharding: Sharding, everyone: Sequence[RankFacts]) -> list[Check]:
    """Return a warning if a tensor-parallel group extends over several nodes."""
    size = sharding.tensor
    groups = [range(first, first + size) for first in range(0, len(everyone) - size + 1, size)]
    parted = [group for group in groups if len({everyone[rank].node for rank in group}) > 1]
    if not parted:
        return []
    text = (
        f"{who(parted[0], everyone)} share each matrix: every block waits four times for the"
        " network between nodes"
    )
    within = math.gcd(size, *Counter(facts.node for facts in everyone).values())
    return [Check("warning", f"sharding.tensor={size}", text, f"sharding.tensor={within}")]


def room(run: Path, checkpoint: float, keep: int) -> list[Check]:
    """Check that the disk of the run's folder has room for its checkpoints.

    checkpoint: size of one checkpoint in bytes; keep: checkpoint.keep.
    """
    place = next((path for path in (run, *run.absolute().parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    there = len(list((run / "checkpoints").glob("step-*")))
    more = max(1, keep + 1 - there)
    text = f"{gib(free)} free for a checkpoint of {gib(checkpoint)}"
    if free >= more * checkpoint:
        return [Check("ok", "room", text)]
    text += (
        f"; {more} more must fit there at the same time: checkpoint.keep={keep},"
        " and the one that is being written"
    )
    advice = "Make room, or  run.root=FOLDER"
    if keep > 1:
        advice += "  or  checkpoint.keep=1"
    return [Check("problem" if free < checkpoint else "warning", "room", text, advice)]


def by_value(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return (value, ranks that have it) pairs, the most common value first, ties by rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0]))


def who(ranks: Iterable[int], facts: Sequence[RankFacts]) -> str:
    """Name ranks with their hosts.

    For example `rank 3 (node-b)` or `rank 0-7 (node-a), 8-15 (node-b) and those of 3 more nodes`.
    """
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(facts[rank].node, []).append(rank)
    named = list(hosts.items())[:MAX_HOSTS]
    text = ", ".join(f"{spans(own)} ({host_name(node, facts)})" for node, own in named)
    rest = len(hosts) - len(named)
    return f"rank {text}" + (f" and those of {rest} more nodes" if rest else "")


def host_name(node: int, facts: Sequence[RankFacts]) -> str:
    host = next(f.host for f in facts if f.node == node)
    return host if len({f.node for f in facts if f.host == host}) == 1 else f"{host}, node {node}"


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: [0, 1, 2, 5] → `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def judge(
    what: str,
    rates: dict[str, float],
    slow: float,
    device: str,
    unit: Callable[[float], str],
    prefix: str = "",
) -> list[Check]:
    """Report the median of `rates`, and each rate below `slow` times the median.

    rates: measured rates by name. A slow GPU is a problem. On a CPU it is only a warning, because
    other processes may use its cores.
    """
    usual = median_high(rates.values())
    spread = f"{prefix}{unit(usual)}"
    if len(rates) > 1:
        spread += f", from {unit(min(rates.values()))} to {unit(max(rates.values()))}"
    checks = [Check("ok", what, spread)]
    below = [(name, rate) for name, rate in rates.items() if rate < slow * usual]
    for name, rate in sorted(below, key=lambda item: item[1])[:MAX_NAMED]:
        text = f"{name}: {unit(rate)}, {rate / usual:.0%} of the others' {unit(usual)}"
        checks.append(Check("problem" if device == "cuda" else "warning", f"slow: {what}", text))
    return checks


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
