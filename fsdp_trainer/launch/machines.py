"""Hosts, software and settings: what differs, and what is better set otherwise."""

import fcntl
import hashlib
import platform
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_trainer.launch.doctor_report import counted
from fsdp_trainer.launch.facts import (
    Check,
    RankFacts,
    by_value,
    differences,
    host_name,
    spans,
    who,
)
from fsdp_trainer.launch.world import World
from fsdp_trainer.parallel.memory_check import gib
from fsdp_trainer.version import __version__

VIRTUAL = re.compile(r"lo$|docker|veth|br-|virbr|cni|flannel|cali|tunl")
COSTLY = {
    "NCCL_DEBUG": ("INFO|TRACE", "writes long logs, on every rank: for finding faults"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through the host's memory: for finding faults"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node talk through the network: for finding faults"),
    "NCCL_IB_DISABLE": (
        "1",
        "nodes talk over TCP even where there is InfiniBand: for finding faults",
    ),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
}
"""Settings of the environment → the values that cost speed, and why."""


@dataclass
class Looked(RankFacts):
    """RankFacts that only the doctor wants to know. memory: free on the host, in bytes; address: what the host's name resolves to."""

    machine: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    cores: int = 0
    threads: int = 0
    address: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    """By key of the configuration: what of its files this node has."""


def machines(everyone: Sequence[Looked], world: World) -> Iterator[Check]:
    """What there is, hosts that are alike on one line; then who is not."""
    nodes = {f.node: f for f in reversed(everyone)}
    ranks_of = {
        node: [rank for rank, f in enumerate(everyone) if f.node == node] for node in sorted(nodes)
    }

    def describe(node: int) -> str:
        first, ranks = nodes[node], ranks_of[node]
        gpu = f"{len(ranks)} × {first.versions['GPU']}, " if "GPU" in first.versions else ""
        return f"{gpu}{first.machine['CPU']}, {counted(first.cores, 'core')}, {counted(first.threads, 'thread')} a rank"

    for said, places in by_value([describe(node) for node in ranks_of]):
        alike = [list(ranks_of)[place] for place in places]
        free = min((nodes[node] for node in alike), key=lambda f: f.memory)
        shm = min(nodes[node].shm for node in alike)
        limits = [nodes[node].files for node in alike if nodes[node].files >= 0]
        files = f"{min(limits):,} open files" if limits else "any number of open files"
        named = ", ".join(
            f"{host_name(node, everyone)} (rank {spans(ranks_of[node])})" for node in alike[:8]
        )
        more = f" and {len(alike) - 8} more" if len(alike) > 8 else ""
        text = f"{said}\n{gib(free.memory)} of memory free{f' on {free.host}' if len(alike) > 1 else ''}, /dev/shm {gib(shm)}, {files}"
        yield Check("ok", f"{counted(len(alike), 'host')}", f"{named}{more}\n{text}")
    yield from differences(everyone, "machine")
    for node, ranks in ranks_of.items():
        threads, cores, host = nodes[node].threads, nodes[node].cores, nodes[node].host
        crowded, idle = (
            threads * len(ranks) > cores,
            threads * len(ranks) <= cores // 2 and world.device.type == "cpu",
        )
        if crowded or idle:
            text = f"{counted(len(ranks), 'rank')} × {counted(threads, 'thread')} on {counted(cores, 'core')} of {host}"
            advice = f"OMP_NUM_THREADS={max(1, cores // len(ranks))}{' ; torchrun sets 1 where nothing is said' if idle else ''}"
            yield Check("warning", "OMP_NUM_THREADS", text, advice)
            break
    if world.device.type == "cuda":
        yield from topology()


def topology() -> Iterator[Check]:
    """How this host's GPUs are connected."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    rows = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", told.stdout).splitlines()]
    matrix = [
        row.expandtabs(8)
        for row in rows[: next((i for i, row in enumerate(rows) if not row), len(rows))]
    ]
    if told.returncode == 0 and matrix:
        yield Check("note", "topology", "\n".join(matrix))


def software(everyone: Sequence[Looked]) -> Iterator[Check]:
    """Versions, from the driver up."""
    odd = differences(everyone, "versions")
    equal = {
        name: value
        for name, value in everyone[0].versions.items()
        if name not in {f.what for f in odd}
    }
    equal["fsdp_trainer"] = (
        f"{__version__}, {equal['fsdp_trainer']}" if "fsdp_trainer" in equal else __version__
    )
    same = "equal on all ranks" if len(everyone) > 1 else "versions"
    yield Check(
        "ok", same, ", ".join(f"{name} {value}" for name, value in equal.items() if value != "none")
    )
    yield from odd


def configuration(everyone: Sequence[Looked]) -> Iterator[Check]:
    """Keys that are not at their defaults."""
    odd = differences(everyone, "settings")
    if not any(f.mark == "problem" for f in odd):
        digest = hashlib.blake2b(
            repr(sorted(everyone[0].settings.items())).encode(), digest_size=4
        ).hexdigest()
        yield Check(
            "ok",
            "configuration",
            f"{digest}: {counted(len(everyone[0].settings), 'key')} not at the default",
        )
    yield from odd


def environment(everyone: Sequence[Looked]) -> Iterator[Check]:
    """Settings of NCCL, gloo and torch, and network interfaces, with advice."""
    found = everyone[0].environment
    if found:
        yield Check("ok", "settings", "\n".join(f"{name}={value}" for name, value in found.items()))
    yield from differences(everyone, "environment")
    for name, (values, why) in COSTLY.items():
        ranks = [
            rank
            for rank, f in enumerate(everyone)
            if re.fullmatch(values, f.environment.get(name, ""), re.IGNORECASE)
        ]
        if ranks:
            yield Check(
                "warning",
                f"{name}={everyone[ranks[0]].environment[name]}",
                f"on {who(ranks, everyone)}: {why}",
                f"unset {name}",
            )
    firsts = {f.node: f for f in reversed(everyone)}
    several = len({f.host for f in everyone}) > 1
    for f in firsts.values():
        yield from interface_problems(f, several)
    for said, places in by_value(
        [
            ", ".join(f"{name} {address}" for name, address in f.interfaces.items())
            for f in firsts.values()
        ][:4]
    ):
        yield Check(
            "note",
            "interfaces",
            f"{', '.join(list(firsts.values())[place].host for place in places)}: {said or 'none'}",
        )


def interface_problems(f: Looked, several: bool) -> Iterator[Check]:
    """What keeps other hosts from reaching this one."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = f.environment.get(variable, "")
        names = [name.split(":")[0] for name in asked.lstrip("^=").split(",")]
        exact = variable.startswith("GLOO") or asked.startswith("=")
        there = any(
            own == name or (not exact and own.startswith(name))
            for own in f.interfaces
            for name in names
        )
        if asked and not asked.startswith("^") and not there:
            text = f"{f.host} has no such interface with an address: it has {', '.join(f.interfaces) or 'none'}"
            yield Check(
                "problem", f"{variable}={asked}", text, f"unset {variable}  or name one of them"
            )
    if not several or "GLOO_SOCKET_IFNAME" in f.environment:
        return
    real = [name for name in f.interfaces if not VIRTUAL.match(name)]
    if f.address.startswith("127.") or f.address == "nothing":
        text = f"{f.host} resolves to {f.address} on itself, which gloo would tell the other hosts to connect to"
        advice = f"GLOO_SOCKET_IFNAME={real[0] if real else 'INTERFACE'} NCCL_SOCKET_IFNAME=… , or mend /etc/hosts"
        yield Check("problem", "host name", text, advice)
    elif len(real) > 1:
        text = f"{f.host} has {', '.join(f'{name} ({f.interfaces[name]})' for name in real)}; gloo takes {f.address}, NCCL what it finds first"
        yield Check(
            "warning",
            "several interfaces",
            text,
            f"GLOO_SOCKET_IFNAME={real[0]} NCCL_SOCKET_IFNAME={real[0]}",
        )


def cpu_model() -> str:
    """As the system names it."""
    try:
        with open("/proc/cpuinfo") as file:
            found = re.search(r"model name\s*: (.*)", file.read(4096))
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def interfaces() -> dict[str, str]:
    """IPv4 address by name of every network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(s, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(told[20:24])
            except OSError:
                continue
    return found
