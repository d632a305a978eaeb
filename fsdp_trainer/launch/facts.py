"""What every rank says about itself before the first collective, and what of it does not agree. `train` and `doctor` both look here."""

import hashlib
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from fsdp_trainer.config.check import show
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.parallel.memory_check import gib

PACKAGES = ("hydra-core", "numpy", "safetensors", "tokenizers", "torchao")
SETTINGS = re.compile(
    r"(NCCL|GLOO|TORCH|UCX|FI|PYTORCH)_|(OMP|MKL)_NUM_THREADS$|CUDA_LAUNCH_BLOCKING$"
)  # of the environment
OF_A_NODE = re.compile(
    r"launch\.|logging\.|profile\.|doctor\.|run\.root$|.*\.(path|cache|init_from|template)$|data\.validation$"
)
"""Keys that may differ where they come to the same: where things lie, how ranks start, what only rank 0 does."""
MUST_BE_EQUAL = ("torch", "CUDA", "NCCL", "fsdp_trainer", "device", "NCCL_ALGO", "NCCL_PROTO")
MAY_DIFFER = re.compile(
    r".*_(IFNAME|HCA|FILE)$|(NCCL|TORCH)_.*DEBUG"
)  # by host, or what is only told
CLOCK_SECONDS = 1.0
SHM_BYTES = 2**30  # Docker gives 64 MiB; NCCL takes some tens for each rank
FILES_BESIDE = 256  # open files of a rank that are no connections: libraries, the token store, a checkpoint's shards
GROUPS = 3  # of gloo, each with a connection to every other rank: training's, the checkpoints', the store's
MOST_NAMED = 8
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Check:
    """mark: `ok`, `note`, `warning` (slower, or less sure) or `problem` (will break or cripple a run). certain: `train` refuses to begin."""

    mark: str
    what: str
    text: str
    advice: str = ""
    certain: bool = False


@dataclass
class RankFacts:
    """Of one rank. Sizes in bytes; clock: its host's, in seconds since 1970."""

    node: int
    host: str
    clock: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Keys of the configuration that are not at their defaults."""
    data: str = ""
    """The prepared data's fingerprint."""
    unshared: str = ""
    """Why this rank does not see the folder in which rank 0 trains."""
    shm: float = 0.0
    files: int = 0
    """How many it may have open."""


def facts_of(
    cfg: TrainConfig, world: World, data: str = "", unshared: str = "", alone: bool = False
) -> RankFacts:
    """This rank's. What can only be compared is left out where there is no other rank, unless asked for."""
    facts = RankFacts(world.node, socket.gethostname(), time.time(), data=data, unshared=unshared)
    facts.shm = (
        float(shutil.disk_usage(SHARED_MEMORY).total) if SHARED_MEMORY.is_dir() else float("inf")
    )
    facts.files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if world.size > 1 or alone:
        facts.versions = versions(world.device)
        facts.environment = {
            name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)
        }
        facts.settings = settings(cfg)
    return facts


def versions(device: torch.device) -> dict[str, str]:
    """Of everything that takes part in computing, down to the driver; of fsdp_trainer also what its sources say."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = torch.cuda.get_device_name(device)
        driver = (
            re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER.read_text())
            if DRIVER.is_file()
            else None
        )
        found["driver"] = driver[1] if driver else "unknown"
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found | {"fsdp_trainer": source_digest(Path(__file__).parents[1])}


def source_digest(package: Path) -> str:
    """Of the code itself: a node whose checkout was not updated has the same version number."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return f"sources {digest.hexdigest()}"


def settings(cfg: TrainConfig) -> dict[str, str]:
    """Every key that is not at its default, as it is written in an override."""
    return {
        f"{group}.{name}": show(value)
        for (group, keys), default in zip(
            asdict(cfg).items(), asdict(type(cfg)()).values(), strict=True
        )
        for name, value in keys.items()
        if value != default[name]
    }


def preflight(
    cfg: TrainConfig,
    world: World,
    run: Path,
    shared: bool,
    data: str,
    checkpoint: float,
    timeout: float,
) -> list[str]:
    """`train`'s quick look before the first collective. Returns lines to warn with, on rank 0. Raises UserError on all ranks.

    shared: whether this rank sees the `run` folder that rank 0 has claimed. data: the fingerprint. checkpoint: bytes of one.
    """
    began = world.from_main("facts/began", time.time, timeout)
    unshared = "" if shared else f"{run.absolute()} is not the folder that rank 0 claimed"
    everyone = world.to_main("facts", facts_of(cfg, world, data, unshared), timeout)
    problems: list[Problem] = []
    findings: list[Check] = []
    if world.main:
        findings = [
            *compare(everyone, began, time.time()),
            *limits(everyone, world.device.type),
            *room(cfg, run, checkpoint),
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
    told = [f for f in findings if f.mark in ("warning", "problem")]
    return [f"{f.what}: {f.text}" + (f"\n       {f.advice}" if f.advice else "") for f in told]


def compare(facts: Sequence[RankFacts], began: float, ended: float) -> list[Check]:
    """What differs among ranks. Every clock was read after `began` and before `ended` of rank 0's clock."""
    found = (
        differences(facts, "settings")
        + differences(facts, "versions")
        + differences(facts, "environment")
    )
    if len({f.data for f in facts}) > 1:
        text = ", ".join(
            f"{data} on {who(ranks, facts)}" for data, ranks in by_value([f.data for f in facts])
        )
        advice = "The nodes would train on different rows. Give every node the same files, or one data.cache that all see"
        found.append(
            Check("problem", "data", f"prepared differently: {text}", advice, certain=True)
        )
    for reason, ranks in by_value([f.unshared for f in facts]):
        if reason:
            advice = "Every rank writes its part of a checkpoint there:  run.root=FOLDER  on storage that all nodes share"
            found.append(
                Check(
                    "problem",
                    "run.root",
                    f"is not shared. {who(ranks, facts)}: {reason}",
                    advice,
                    certain=True,
                )
            )
    return found + clocks(facts, began, ended)


def clocks(facts: Sequence[RankFacts], began: float, ended: float) -> list[Check]:
    """Hosts whose clock cannot have been read between `began` and `ended` if it were right."""
    found = []
    for node, ranks in by_value([f.node for f in facts]):
        clock = facts[ranks[0]].clock
        off = clock - ended if clock > ended else min(0.0, clock - began)
        if abs(off) > CLOCK_SECONDS and node != facts[0].node:
            text = f"that of {facts[ranks[0]].host} is at least {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} {facts[0].host}'s"
            advice = "Logs cannot be put in order, and shared storage takes new files for old ones: let chrony or ntpd set it"
            found.append(Check("warning", "clock", text, advice))
    return found


def differences(facts: Sequence[RankFacts], kind: str) -> list[Check]:
    """Values under a name in `settings`, `versions` or `environment` that not all ranks have: the odd ones out are named."""
    found = []
    for name in sorted({name for f in facts for name in getattr(f, kind)}):
        (usual, majority), *odd = by_value([getattr(f, kind).get(name, "not set") for f in facts])
        if not odd:
            continue
        if kind == "settings":
            usual, odd = (
                usual.replace("not set", "the default"),
                [(value.replace("not set", "the default"), r) for value, r in odd],
            )
        text = ", ".join(f"{value} on {who(ranks, facts)}" for value, ranks in odd)
        text += f"; {usual} on {'the others' if len(majority) > 1 else who(majority, facts)}"
        if kind == "settings":
            values = {value for value, _ in [(usual, majority), *odd]}
            of_a_node = (
                values.isdisjoint({"auto", "never", "the default"})
                if name == "checkpoint.resume"
                else OF_A_NODE.match(name)
            )
            certain = not of_a_node
            found.append(
                Check(
                    "problem" if certain else "warning",
                    name,
                    text,
                    "Start every node with the same command",
                    certain,
                )
            )
        else:
            mark = (
                "problem"
                if name in MUST_BE_EQUAL
                else "note"
                if MAY_DIFFER.match(name)
                else "warning"
            )
            advice = (
                "Ranks run the same code in the same environment"
                if kind == "versions"
                else "Set it alike on all nodes"
            )
            found.append(Check(mark, name, text, "" if mark == "note" else advice))
    return found


def limits(facts: Sequence[RankFacts], device: str) -> list[Check]:
    """What the system grants too little of for a world of this size."""
    found = []
    ranks_of = Counter(f.node for f in facts)
    small = [rank for rank, f in enumerate(facts) if f.shm < SHM_BYTES and ranks_of[f.node] > 1]
    if small and device == "cuda":
        text = f"{gib(facts[small[0]].shm)} on {who(small, facts)}, through which NCCL's ranks talk"
        found.append(
            Check(
                "problem",
                "/dev/shm",
                text,
                "docker run --shm-size=16g ; in Kubernetes an emptyDir with  medium: Memory",
            )
        )
    needed = GROUPS * len(facts) + FILES_BESIDE
    few = [rank for rank, f in enumerate(facts) if 0 <= f.files < needed]
    if few:
        text = f"{facts[few[0]].files:,} on {who(few, facts)}; connections to {len(facts):,} ranks take up to {needed:,}"
        found.append(Check("problem", "open files", text, "ulimit -n 65536  before the launcher"))
    return found


def room(cfg: TrainConfig, run: Path, checkpoint: float) -> list[Check]:
    """Whether the run's folder takes the checkpoints that are to lie there at once."""
    place = next((path for path in (run, *run.absolute().parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    there = len(list((run / "checkpoints").glob("step-*")))
    more = max(1, cfg.checkpoint.keep + 1 - there)
    text = f"{gib(free)} free for a checkpoint of {gib(checkpoint)}"
    if free >= more * checkpoint:
        return [Check("ok", "room", text)]
    text += f"; {more} more are to lie there at once: checkpoint.keep={cfg.checkpoint.keep}, and the one that is being written"
    fewer = "Make room, or  run.root=FOLDER" + (
        "  or  checkpoint.keep=1" if cfg.checkpoint.keep > 1 else ""
    )
    return [Check("problem" if free < checkpoint else "warning", "room", text, fewer)]


def by_value(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """(value, ranks that have it), the commonest first; of equally common ones that of the lower rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0]))


def who(ranks: Iterable[int], facts: Sequence[RankFacts], most: int = 4) -> str:
    """`rank 3 (node-b)`, `rank 0-7 (node-a), 8-15 (node-b) and those of 3 more hosts`."""
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(facts[rank].node, []).append(rank)
    shown = [
        f"{spans(of_one)} ({host_name(node, facts)})" for node, of_one in list(hosts.items())[:most]
    ]
    return f"rank {', '.join(shown)}" + (
        f" and those of {len(hosts) - most} more nodes" if len(hosts) > most else ""
    )


def host_name(node: int, facts: Sequence[RankFacts]) -> str:
    """The host of a node; with the node's number where one host has several, as in tests."""
    host = next(f.host for f in facts if f.node == node)
    return host if len({f.node for f in facts if f.host == host}) == 1 else f"{host}, node {node}"


def spans(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] → `0-2,5`."""
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
    of: str = "",
) -> list[Check]:
    """The median of rates by name, and who is below `slow` of it: on a GPU a fault, on a CPU, whose cores others use too, perhaps a neighbour."""
    usual = median_high(rates.values())
    spread = unit(usual) + (
        f", from {unit(min(rates.values()))} to {unit(max(rates.values()))}"
        if len(rates) > 1
        else ""
    )
    found = [Check("ok", what, of + spread)]
    for name, rate in sorted(
        ((name, rate) for name, rate in rates.items() if rate < slow * usual),
        key=lambda item: item[1],
    )[:MOST_NAMED]:
        text = f"{name}: {unit(rate)}, {rate / usual:.0%} of the others' {unit(usual)}"
        found.append(Check("problem" if device == "cuda" else "warning", f"slow: {what}", text))
    return found


def gigabytes(rate: float) -> str:
    """A second."""
    return f"{rate / 1e9:.3g} GB/s"


def flops(rate: float) -> str:
    """A second."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
