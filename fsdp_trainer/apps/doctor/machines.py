"""Checks of hosts, software and settings: differences, and settings that cost speed."""

import fcntl
import hashlib
import platform
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fsdp_trainer.base.counted import counted
from fsdp_trainer.launch.facts import Check, RankFacts, by_value, differences, host_name, spans, who
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
"""Environment variable → a pattern of the values that cost speed, and the reason."""


@dataclass
class HostFacts(RankFacts):
    """RankFacts, and further facts that only the doctor needs.

    memory: free memory of the host in bytes; threads: of one rank; address: the address that the
    host's name resolves to; interfaces: IPv4 address by name of each network interface.
    """

    machine: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    cores: int = 0
    threads: int = 0
    address: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of this node's input files, by key of the configuration."""


def machines(everyone: Sequence[HostFacts], world: World) -> Iterator[Check]:
    nodes = {f.node: f for f in reversed(everyone)}
    ranks_of = {
        node: [rank for rank, f in enumerate(everyone) if f.node == node] for node in sorted(nodes)
    }
    descriptions = [hardware(nodes[node], len(ranks)) for node, ranks in ranks_of.items()]
    for text, places in by_value(descriptions):
        alike = [list(ranks_of)[place] for place in places]
        named = ", ".join(
            f"{host_name(node, everyone)} (rank {spans(ranks_of[node])})" for node in alike[:8]
        )
        more = f" and {len(alike) - 8} more" if len(alike) > 8 else ""
        limits = lowest_limits([nodes[node] for node in alike])
        yield Check("ok", counted(len(alike), "host"), f"{named}{more}\n{text}\n{limits}")
    yield from differences(everyone, "machine")
    findings = (threads_problem(nodes[node], len(ranks), world) for node, ranks in ranks_of.items())
    yield from [finding for finding in findings if finding][:1]
    if world.device.type == "cuda":
        yield from topology()


def hardware(facts: HostFacts, ranks: int) -> str:
    """Describe a host's GPUs and processors. ranks: number of ranks on it."""
    gpu = f"{ranks} × {facts.versions['GPU']}, " if "GPU" in facts.versions else ""
    threads = f"{counted(facts.threads, 'thread')} a rank"
    return f"{gpu}{facts.machine['CPU']}, {counted(facts.cores, 'core')}, {threads}"


def lowest_limits(hosts: Sequence[HostFacts]) -> str:
    """Describe the lowest memory, shared memory and limit on open files among some hosts."""
    smallest = min(hosts, key=lambda facts: facts.memory)
    on_host = f" on {smallest.host}" if len(hosts) > 1 else ""
    limits = [facts.files for facts in hosts if facts.files >= 0]
    files = f"{min(limits):,} open files" if limits else "any number of open files"
    shm = gib(min(facts.shm for facts in hosts))
    return f"{gib(smallest.memory)} of memory free{on_host}, /dev/shm {shm}, {files}"


def threads_problem(facts: HostFacts, ranks: int, world: World) -> Check | None:
    """Return a warning if a host's ranks use too many or too few threads, else None.

    Too many: more than the host has cores. Too few, on a CPU: at most half as many.
    """
    used = facts.threads * ranks
    idle = used <= facts.cores // 2 and world.device.type == "cpu"
    if used <= facts.cores and not idle:
        return None
    text = (
        f"{counted(ranks, 'rank')} × {counted(facts.threads, 'thread')}"
        f" on {counted(facts.cores, 'core')} of {facts.host}"
    )
    advice = f"OMP_NUM_THREADS={max(1, facts.cores // ranks)}"
    if facts.threads == 1:
        advice = f"launch.nproc_per_node={facts.cores}"
    if idle:
        advice += " ; torchrun sets 1 where nothing is said"
    return Check("warning", "OMP_NUM_THREADS", text, advice)


def topology() -> Iterator[Check]:
    """Yield the connections between this host's GPUs, as nvidia-smi shows them."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return
    rows = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", result.stdout).splitlines()]
    matrix = list(takewhile(bool, rows))
    if result.returncode == 0 and matrix:
        yield Check("note", "topology", "\n".join(row.expandtabs(8) for row in matrix))


def software(everyone: Sequence[HostFacts]) -> Iterator[Check]:
    odd = differences(everyone, "versions")
    differing = {f.what for f in odd} | {"fsdp_trainer"}
    equal = {k: value for k, value in everyone[0].versions.items() if k not in differing}
    equal["fsdp_trainer"] = __version__
    sources = everyone[0].versions.get("fsdp_trainer")
    if sources and "fsdp_trainer" not in {f.what for f in odd}:
        equal["fsdp_trainer"] += f", {sources}"
    same = "equal on all ranks" if len(everyone) > 1 else "versions"
    text = ", ".join(f"{name} {value}" for name, value in equal.items() if value != "none")
    yield Check("ok", same, text)
    yield from odd


def configuration(everyone: Sequence[HostFacts]) -> Iterator[Check]:
    odd = differences(everyone, "settings")
    if not any(f.mark == "problem" for f in odd):
        settings = everyone[0].settings
        digest = hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=4).hexdigest()
        text = f"{digest}: {counted(len(settings), 'key')} not at the default"
        yield Check("ok", "configuration", text)
    yield from odd


def environment(everyone: Sequence[HostFacts]) -> Iterator[Check]:
    """Yield the settings of NCCL, gloo and torch, and the network interfaces, with advice."""
    own = everyone[0].environment
    if own:
        yield Check("ok", "settings", "\n".join(f"{name}={value}" for name, value in own.items()))
    yield from differences(everyone, "environment")
    for name, (values, reason) in COSTLY.items():
        ranks = [
            rank
            for rank, f in enumerate(everyone)
            if re.fullmatch(values, f.environment.get(name, ""), re.IGNORECASE)
        ]
        if ranks:
            setting = f"{name}={everyone[ranks[0]].environment[name]}"
            text = f"on {who(ranks, everyone)}: {reason}"
            yield Check("warning", setting, text, f"unset {name}")
    hosts = list({f.node: f for f in reversed(everyone)}.values())
    several = len({f.host for f in everyone}) > 1
    for facts in hosts:
        yield from missing_interfaces(facts)
        if several and "GLOO_SOCKET_IFNAME" not in facts.environment:
            yield from ambiguous_interfaces(facts)
    addresses = [
        ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())
        for facts in hosts[:4]
    ]
    for text, places in by_value(addresses):
        names = ", ".join(hosts[place].host for place in places)
        yield Check("note", "interfaces", f"{names}: {text or 'none'}")


def missing_interfaces(facts: HostFacts) -> Iterator[Check]:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        if not value or value.startswith("^"):
            continue
        names = [name.split(":")[0] for name in value.lstrip("=").split(",")]
        if not variable.startswith("GLOO") and not value.startswith("="):
            exists = any(own.startswith(tuple(names)) for own in facts.interfaces)
        else:
            exists = any(own in names for own in facts.interfaces)
        if not exists:
            has = ", ".join(facts.interfaces) or "none"
            text = f"{facts.host} has no such interface with an address: it has {has}"
            advice = f"unset {variable}  or name one of them"
            yield Check("problem", f"{variable}={value}", text, advice)


def ambiguous_interfaces(facts: HostFacts) -> Iterator[Check]:
    """Yield reasons why other hosts may not reach this one, if no setting names an interface."""
    real = [name for name in facts.interfaces if not VIRTUAL.match(name)]
    if facts.address.startswith("127.") or facts.address == "nothing":
        text = (
            f"{facts.host} resolves to {facts.address} on itself,"
            " which gloo would tell the other hosts to connect to"
        )
        advice = (
            f"GLOO_SOCKET_IFNAME={real[0] if real else 'INTERFACE'} NCCL_SOCKET_IFNAME=… ,"
            " or fix /etc/hosts"
        )
        yield Check("problem", "host name", text, advice)
    elif len(real) > 1:
        named = ", ".join(f"{name} ({facts.interfaces[name]})" for name in real)
        text = f"{facts.host} has {named}; gloo takes {facts.address}, NCCL what it finds first"
        advice = f"GLOO_SOCKET_IFNAME={real[0]} NCCL_SOCKET_IFNAME={real[0]}"
        yield Check("warning", "several interfaces", text, advice)


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            match = re.search(r"model name\s*: (.*)", file.read(4096))
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def interfaces() -> dict[str, str]:
    """Return the IPv4 address by name of every network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                request = fcntl.ioctl(s, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(request[20:24])
            except OSError:
                continue
    return addresses
