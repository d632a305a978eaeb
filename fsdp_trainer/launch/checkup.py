"""What `doctor` looks at, in the order in which it tells it. Collective; rank 0 judges."""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from fsdp_trainer import __version__
from fsdp_trainer.config.paths import find_checkpoint, is_hub_id
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.data import demo
from fsdp_trainer.data.build import build_tokenizer
from fsdp_trainer.data.sources import find_sources
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch import speed
from fsdp_trainer.launch.doctor import UNHEALTHY, Report, counted
from fsdp_trainer.launch.facts import Facts, Finding, by_value, clocks, differences, facts_of, host_name, limits, room, spans, who
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.flops import peak_flops
from fsdp_trainer.parallel.fit import check_fit, checkpoint_bytes, gib, host_bytes

MOST_SECONDS = 180.0  # to wait for others: of a doctor one expects a word
SEEN_SECONDS = 5.0  # until a file is seen on another node; NFS keeps what it knows of a folder for a while
UNREADABLE = "cannot be read"
EDGE = 64 * 1024  # bytes at each end of a file that tell whether two are the same
VIRTUAL = re.compile(r"lo$|docker|veth|br-|virbr|cni|flannel|cali|tunl")
COSTLY = {
    "NCCL_DEBUG": ("INFO|TRACE", "writes long logs, on every rank: for finding faults"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through the host's memory: for finding faults"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node talk through the network: for finding faults"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP even where there is InfiniBand: for finding faults"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
}
"""Settings of the environment → the values that cost speed, and why."""


@dataclass
class Looked(Facts):
    """Facts that only the doctor wants to know. memory: free on the host, in bytes; address: what the host's name resolves to."""

    machine: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    cores: int = 0
    threads: int = 0
    address: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    """By key of the configuration: what of its files this node has."""


def checkup(cfg: DoctorConfig) -> int:
    """Examine the world. Returns the exit code, the same on all ranks."""
    timeout = min(MOST_SECONDS, parse_duration(cfg.launch.timeout))
    world = meet(cfg, timeout)
    if world is None:
        return UNHEALTHY
    report = Report(cfg.doctor.format, quiet=not world.main)
    try:
        examine(cfg, world, report, timeout)
    except (dist.DistError, RuntimeError, RunFailed) as error:  # a collective failed, or someone did not come
        report.add("network", Finding("problem", "communication", f"broke down: {str(error).strip().splitlines()[0]}", HUNG))
    code = world.from_main("the doctor's word", report.close, timeout)
    world.hear_out("the doctor's word", timeout)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


HUNG = "A firewall between the nodes, or the wrong interface: every port must be open; see GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"


def meet(cfg: DoctorConfig, timeout: float) -> World | None:
    """The world; None, and a line from this rank, where rank 0's store cannot be reached."""
    env = environment_of_ranks(os.environ) or os.environ
    try:
        return join(env, cfg.launch.device, timeout)
    except RuntimeError as error:
        address, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", 0))
        why = unreachable(address, port) if isinstance(error, dist.DistError) else ""
        print(f"rank {env.get('RANK', 0)} ({socket.gethostname()}): {why or str(error).splitlines()[0]}", file=sys.stderr)
        return None


def unreachable(address: str, port: int) -> str:
    """Why nothing is to be had from a port, in words; empty where it answers."""
    try:
        socket.create_connection((address, port), timeout=5).close()
        return ""
    except socket.gaierror:
        return f"{address} resolves to no address here: use one, or mend DNS or /etc/hosts"
    except ConnectionRefusedError:
        return f"nobody listens on {address}:{port}: rank 0 is not there, or another host is meant"
    except OSError as error:
        return f"{address}:{port} cannot be reached ({error}): a firewall, or an address of another network"


def examine(cfg: DoctorConfig, world: World, report: Report, timeout: float) -> None:
    """All sections. The settings are told before the first collective, which may hang for their sake."""
    everyone = world.to_main("facts", look(cfg, world), timeout)
    if world.main:
        report.add("machines", *machines(everyone, world), *limits(everyone, world.device.type))
        report.add("software", *software(everyone), *configuration(everyone))
        report.add("environment", *environment(everyone))
    alike = world.from_main("alike", lambda: len({f.versions["device"] for f in everyone}) == 1, timeout)
    if not alike:
        report.add("network", Finding("problem", "not tried", "some ranks compute on GPUs and some do not: see software"))
        return
    began = time.perf_counter()
    connect(world, timeout)
    speed.largest(0.0)
    report.add("network", Finding("ok", "process group", f"{counted(world.size, 'rank')} met in {time.perf_counter() - began:.2f} s"))
    report.add("network", *clock(world, everyone, timeout))
    if cfg.doctor.measure:
        report.add("network", *network(cfg, world, everyone, timeout))
        report.add("devices", *devices(cfg, world, everyone, timeout))
    report.add("storage", *storage(cfg, world, everyone, timeout))
    if world.main:
        report.add("inputs", *inputs(cfg, world, everyone))


def look(cfg: DoctorConfig, world: World) -> Looked:
    """This rank's facts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    looked = Looked(**vars(facts_of(cfg, world, alone=True)), memory=host_bytes({}), cores=cores, threads=torch.get_num_threads())
    looked.machine = {"CPU": cpu_model(), "cores": str(cores)}
    if world.device.type == "cuda":
        looked.machine["GPU memory"] = gib(torch.cuda.get_device_properties(world.device).total_memory)
    if world.local_rank == 0:
        looked.inputs = dict(what_is_read(cfg))
        looked.interfaces = interfaces()
        try:
            looked.address = socket.gethostbyname(looked.host)
        except OSError:
            looked.address = "nothing"
    return looked


def machines(everyone: Sequence[Looked], world: World) -> Iterator[Finding]:
    """What there is, hosts that are alike on one line; then who is not."""
    nodes = {f.node: f for f in reversed(everyone)}
    ranks_of = {node: [rank for rank, f in enumerate(everyone) if f.node == node] for node in sorted(nodes)}

    def describe(node: int) -> str:
        first, ranks = nodes[node], ranks_of[node]
        gpu = f"{len(ranks)} × {first.versions['GPU']}, " if "GPU" in first.versions else ""
        return f"{gpu}{first.machine['CPU']}, {counted(first.cores, 'core')}, {counted(first.threads, 'thread')} a rank"

    for said, places in by_value([describe(node) for node in ranks_of]):
        alike = [list(ranks_of)[place] for place in places]
        free = min((nodes[node] for node in alike), key=lambda f: f.memory)
        shm = min(nodes[node].shm for node in alike)
        named = ", ".join(f"{host_name(node, everyone)} (rank {spans(ranks_of[node])})" for node in alike[:8])
        more = f" and {len(alike) - 8} more" if len(alike) > 8 else ""
        text = f"{said}\n{gib(free.memory)} of memory free{f' on {free.host}' if len(alike) > 1 else ''}, /dev/shm {gib(shm)}, {first_of(alike, nodes)}"
        yield Finding("ok", f"{counted(len(alike), 'host')}", f"{named}{more}\n{text}")
    yield from differences(everyone, "machine")
    crowded = [node for node, ranks in ranks_of.items() if nodes[node].threads * len(ranks) > nodes[node].cores]
    idle = [node for node, ranks in ranks_of.items() if nodes[node].threads * len(ranks) <= nodes[node].cores // 2]
    if crowded:
        node = crowded[0]
        text = f"{len(ranks_of[node])} ranks × {nodes[node].threads} threads on {counted(nodes[node].cores, 'core')} of {nodes[node].host}"
        yield Finding("warning", "OMP_NUM_THREADS", text, f"OMP_NUM_THREADS={max(1, nodes[node].cores // len(ranks_of[node]))}")
    elif idle and world.device.type == "cpu":
        node = idle[0]
        text = f"{len(ranks_of[node])} ranks × {nodes[node].threads} threads leave cores of {nodes[node].host} idle ({nodes[node].cores})"
        advice = f"OMP_NUM_THREADS={nodes[node].cores // len(ranks_of[node])} ; torchrun sets 1 where nothing is said"
        yield Finding("warning", "OMP_NUM_THREADS", text, advice)
    if world.device.type == "cuda":
        yield from topology()


def first_of(alike: Sequence[int], nodes: dict[int, Looked]) -> str:
    """The smallest limit of open files."""
    least = min((f.files for f in (nodes[node] for node in alike) if f.files >= 0), default=-1)
    return f"{least:,} open files" if least >= 0 else "any number of open files"


def topology() -> Iterator[Finding]:
    """How this host's GPUs are connected."""
    count = torch.cuda.device_count()
    apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        text = f"GPUs {', '.join(apart[:8])}{' …' if len(apart) > 8 else ''} do not reach each other's memory, and talk through the host's"
        yield Finding("note", "peer access", text)
    try:
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return
    rows = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", told.stdout).splitlines()]
    matrix = [row.expandtabs(8) for row in rows[: next((i for i, row in enumerate(rows) if not row), len(rows))]]
    if told.returncode == 0 and matrix:
        yield Finding("note", "topology", "\n".join(matrix))


def software(everyone: Sequence[Looked]) -> Iterator[Finding]:
    """Versions, from the driver up."""
    odd = differences(everyone, "versions")
    equal = {name: value for name, value in everyone[0].versions.items() if name not in {f.what for f in odd}}
    equal["fsdp_trainer"] = f"{__version__}{commit()}, {equal['fsdp_trainer']}" if "fsdp_trainer" in equal else __version__
    same = "equal on all ranks" if len(everyone) > 1 else "versions"
    yield Finding("ok", same, ", ".join(f"{name} {value}" for name, value in equal.items() if value != "none"))
    yield from odd


def commit() -> str:
    """The checkout's, with a mark for changes; empty for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        return f" at {subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()}"
    except (OSError, subprocess.SubprocessError):
        return ""


def configuration(everyone: Sequence[Looked]) -> Iterator[Finding]:
    """Keys that are not at their defaults."""
    odd = differences(everyone, "settings")
    if not any(f.mark == "problem" for f in odd):
        digest = hashlib.blake2b(repr(sorted(everyone[0].settings.items())).encode(), digest_size=4).hexdigest()
        yield Finding("ok", "configuration", f"{digest}: {counted(len(everyone[0].settings), 'key')} not at the default")
    yield from odd


def environment(everyone: Sequence[Looked]) -> Iterator[Finding]:
    """Settings of NCCL, gloo and torch, and network interfaces, with advice."""
    found = everyone[0].environment
    if found:
        yield Finding("ok", "settings", "\n".join(f"{name}={value}" for name, value in found.items()))
    yield from differences(everyone, "environment")
    for name, (values, why) in COSTLY.items():
        ranks = [rank for rank, f in enumerate(everyone) if re.fullmatch(values, f.environment.get(name, ""), re.IGNORECASE)]
        if ranks:
            yield Finding("warning", f"{name}={everyone[ranks[0]].environment[name]}", f"on {who(ranks, everyone)}: {why}", f"unset {name}")
    firsts = {f.node: f for f in reversed(everyone)}
    several = len({f.host for f in everyone}) > 1
    for f in firsts.values():
        yield from interface_problems(f, several)
    for said, places in by_value([", ".join(f"{name} {address}" for name, address in f.interfaces.items()) for f in firsts.values()][:4]):
        yield Finding("note", "interfaces", f"{', '.join(list(firsts.values())[place].host for place in places)}: {said or 'none'}")


def interface_problems(f: Looked, several: bool) -> Iterator[Finding]:
    """What keeps other hosts from reaching this one."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = f.environment.get(variable, "")
        names = [name.split(":")[0] for name in asked.lstrip("^=").split(",")]
        exact = variable.startswith("GLOO") or asked.startswith("=")
        there = any(own == name or (not exact and own.startswith(name)) for own in f.interfaces for name in names)
        if asked and not asked.startswith("^") and not there:
            text = f"{f.host} has no such interface with an address: it has {', '.join(f.interfaces) or 'none'}"
            yield Finding("problem", f"{variable}={asked}", text, f"unset {variable}  or name one of them")
    if not several or "GLOO_SOCKET_IFNAME" in f.environment:
        return
    real = [name for name in f.interfaces if not VIRTUAL.match(name)]
    if f.address.startswith("127.") or f.address == "nothing":
        text = f"{f.host} resolves to {f.address} on itself, which gloo would tell the other hosts to connect to"
        advice = f"GLOO_SOCKET_IFNAME={real[0] if real else 'INTERFACE'} NCCL_SOCKET_IFNAME=… , or mend /etc/hosts"
        yield Finding("problem", "host name", text, advice)
    elif len(real) > 1:
        text = (
            f"{f.host} has {', '.join(f'{name} ({f.interfaces[name]})' for name in real)}; gloo takes {f.address}, NCCL what it finds first"
        )
        yield Finding("warning", "several interfaces", text, f"GLOO_SOCKET_IFNAME={real[0]} NCCL_SOCKET_IFNAME={real[0]}")


def clock(world: World, everyone: Sequence[Looked], timeout: float) -> list[Finding]:
    """Of the hosts, read between two moments of rank 0's that lie close together."""
    began = time.time()
    speed.largest(0.0)
    read = world.to_main("clock", time.time(), timeout)
    ended = time.time()
    for f, at in zip(everyone, read, strict=False):
        f.clock = at
    if not world.main or len({f.node for f in everyone}) == 1:
        return []
    right = Finding("ok", "clocks", f"none is off by more than a second, nor by {ended - began:.3f} s that asking took")
    return clocks(everyone, began, ended) or [right]


def network(cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float) -> list[Finding]:
    """Collectives within nodes and over all, then every link by itself."""
    nodes = world.from_main("nodes", lambda: [f.node for f in everyone], timeout)
    if world.size == 1:
        return [Finding("note", "not measured", "there is one rank")]
    found = []
    groups = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)}
    if len(groups) > 1 and max(map(len, groups.values())) > 1:
        within = {node: dist.new_group(ranks) for node, ranks in groups.items()}
        rates = world.to_main("within", speed.collectives(world.device, within[world.node]), timeout)
        if world.main:
            for i, first in enumerate(rates[0]):
                of_nodes = {host_name(node, everyone): rates[ranks[0]][i].bus for node, ranks in groups.items() if len(ranks) > 1}
                found += judge(f"{first.name} in a node", of_nodes, cfg, world, gigabytes, f"{first.size // speed.MIB:>2} MiB: bus ")
    for rate in speed.collectives(world.device):
        text = f"{rate.size // speed.MIB:>2} MiB: {gigabytes(rate.algorithm)}, bus {gigabytes(rate.bus)}"
        found.append(Finding("ok", rate.name, f"{text}, {counted(world.size, 'rank')} on {counted(len(groups), 'node')}"))
    links, left_out = speed.links(nodes, world.device)
    if world.main:
        for what, same in (("links in a node", True), ("links between nodes", False)):
            named = {f"{who([a], everyone)} ↔ {who([b], everyone)}": r for (a, b), r in links.items() if (nodes[a] == nodes[b]) == same}
            found += judge(what, named, cfg, world, gigabytes) if named else []
        if left_out:
            found.append(Finding("note", "links", f"{left_out} were left out after {speed.LINKS_SECONDS:g} s"))
    return found


def devices(cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float) -> list[Finding]:
    """Matrix products on all ranks at once, as in training."""
    rates = world.to_main("products", speed.products(world.device), timeout)
    if not world.main:
        return []
    what = "bfloat16 products" if world.device.type == "cuda" else "float32 products"
    found = judge(what, {who([rank], everyone): rate for rank, rate in enumerate(rates)}, cfg, world, flops)
    peak = peak_flops(everyone[0].versions.get("GPU", ""))
    if peak and median_high(rates) < peak / 2:
        text = f"{median_high(rates) / peak:.0%} of the data sheet's {flops(peak)}: a power limit, heat, or someone else's job"
        found.append(Finding("warning", "all devices", text, "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE"))
    return found


def judge(what: str, rates: dict[str, float], cfg: DoctorConfig, world: World, unit: Callable[[float], str], of: str = "") -> list[Finding]:
    """The median of what is alike, and who is far below it; which on a GPU is a fault, on shared cores may be a neighbour."""
    usual = median_high(rates.values())
    slow = {name: rate for name, rate in rates.items() if rate < cfg.doctor.slow * usual}
    spread = f"{unit(usual)}" + (f", from {unit(min(rates.values()))} to {unit(max(rates.values()))}" if len(rates) > 1 else "")
    found = [Finding("ok", what, of + spread)]
    for name, rate in sorted(slow.items(), key=lambda item: item[1])[:8]:
        text = f"{name}: {unit(rate)}, {rate / usual:.0%} of the others' {unit(usual)}"
        found.append(Finding("problem" if world.device.type == "cuda" else "warning", f"slow: {what}", text))
    return found


def storage(cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float) -> list[Finding]:
    """The folder that holds the run: shared, lockable, fast, and with room."""
    run = Path(cfg.run.root) / str(cfg.run.name)
    folder = run if run.is_dir() else Path(cfg.run.root)
    mark = folder / f".doctor-{world.launch}"
    missing = [place for place in (folder, *folder.parents) if not place.exists()] if world.main else []
    with contextlib.ExitStack() as held:
        why = leave_mark(mark, world.launch, held) if world.main else ""
        if why := world.from_main("mark", lambda: why, timeout):
            return [Finding("problem", f"run.root={cfg.run.root}", why, "Name a folder that can be written to:  run.root=FOLDER")]
        seen = see_mark(mark, world)
        told = world.to_main("storage", (*seen, speed_of_disk(cfg, mark, world) if not seen[0] else None), timeout)
    for place in missing:
        place.rmdir()
    return [*sharing(folder, told, everyone), *disks(told, everyone, cfg, world), *space(cfg, run, world)] if world.main else []


def leave_mark(mark: Path, launch: str, held: contextlib.ExitStack) -> str:
    """Write and lock a file that others look for, until `held` is closed. Returns why it cannot be."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(mark.open("w"))
        held.callback(mark.unlink, missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(launch)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        return f"cannot be written to, or not locked, on {socket.gethostname()}: {error}"
    return ""


def see_mark(mark: Path, world: World) -> tuple[str, bool]:
    """Why this rank does not see what rank 0 wrote, and whether it could take rank 0's lock."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            if mark.read_text() == world.launch:
                break
            why = "a file of that name holds something else"
        except OSError as error:
            why = str(error)
        if time.monotonic() > deadline:
            return why, False
        time.sleep(0.1)
    if world.node == 0:
        return "", False
    try:
        with mark.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "", True
    except OSError:
        return "", False


def speed_of_disk(cfg: DoctorConfig, mark: Path, world: World) -> tuple[float, float] | str | None:
    """What the first rank of each node measures, all at once: bytes a second of writing and of reading, or why there are none."""
    if world.local_rank or not cfg.doctor.measure:
        return None
    try:
        return speed.disk(mark.with_name(f"{mark.name}-{world.node}"), cfg.doctor.file_mib * speed.MIB)
    except OSError as error:
        return str(error)


def sharing(folder: Path, told: Sequence[tuple], everyone: Sequence[Looked]) -> Iterator[Finding]:
    """Whether all see one folder, and one lock."""
    blind = by_value([why for why, *_ in told])
    for why, ranks in blind:
        if why:
            advice = "Every rank writes its part of a checkpoint there:  run.root=FOLDER  on storage that all nodes share"
            yield Finding("problem", "not shared", f"{who(ranks, everyone)}: {why}", advice)
    if len(blind) == 1 and not blind[0][0]:
        yield Finding("ok", "shared", f"{folder.absolute()}: all ranks read what rank 0 wrote")
    if free := [rank for rank, (_, taken, _) in enumerate(told) if taken]:
        text = f"{who(free, everyone)} can lock what rank 0 has locked: two jobs on different nodes could train in one run"
        yield Finding("warning", "locks", text, "NFS 4, or Lustre mounted with  flock")


def disks(told: Sequence[tuple], everyone: Sequence[Looked], cfg: DoctorConfig, world: World) -> Iterator[Finding]:
    """How fast each node writes and reads, all at once."""
    for rank, (*_, rates) in enumerate(told):
        if isinstance(rates, str):
            yield Finding("problem", "disk", f"{who([rank], everyone)}: {rates}")
    measured = {host_name(everyone[rank].node, everyone): rates for rank, (*_, rates) in enumerate(told) if isinstance(rates, tuple)}
    for what, i in (("write and fsync", 0), ("read", 1)):
        if measured:
            together = f"{gigabytes(sum(rates[i] for rates in measured.values()))} together; a node " if len(measured) > 1 else ""
            yield from judge(what, {host: rates[i] for host, rates in measured.items()}, cfg, world, gigabytes, together)


def space(cfg: DoctorConfig, run: Path, world: World) -> Iterator[Finding]:
    """Room for the checkpoints of the model, and for its states in memory, as far as a model is configured."""
    model = cfg.model
    if model.init_from is None and model.name == "auto":
        yield Finding("note", "room", "not judged: no model is configured, e.g.  model=llama3_8b  or  +recipe=NAME")
        return
    if model.init_from and is_hub_id(model.init_from):
        yield Finding("note", "room", f"not judged: {model.init_from} has not been fetched")
        return
    try:
        rows = build_tokenizer(cfg).vocab_size if cfg.tokenizer.path else None
        config = resolve_model(model, rows)
    except (UserError, OSError) as error:
        yield Finding("problem", "model", str(error))
        return
    parameters = config.parameters()
    size = checkpoint_bytes(parameters, cfg.precision, cfg.optim)
    for found in room(cfg, run, size):
        embedding = "" if config.vocab_size else ", without the embedding: no tokenizer is configured"
        found.text += f"\n{short(parameters)} parameters × {size / parameters:.3g} B{embedding}"
        yield found
    try:
        with torch.device("meta"):
            check_fit(Decoder(config), cfg.sharding, cfg.precision, cfg.optim, world.size, world.device)
    except UserError as error:
        yield Finding("problem", "memory", error.problems[0].why)


def inputs(cfg: DoctorConfig, world: World, everyone: Sequence[Looked]) -> Iterator[Finding]:
    """Whether all nodes read the same files."""
    firsts = [rank for rank, f in enumerate(everyone) if f.inputs]
    if not firsts:
        yield Finding("note", "not looked at", "no data, tokenizer or weights are configured, e.g.  data.path=chats.jsonl")
    for key in everyone[firsts[0]].inputs if firsts else ():
        (usual, majority), *odd = by_value([everyone[rank].inputs.get(key, "not set") for rank in firsts])
        value = f"{key}={settings_of(cfg, key)}"
        if not odd:
            mark = "problem" if usual.startswith(UNREADABLE) else "ok"
            on_all = f" on {counted(len(firsts), 'node')}" if len(firsts) > 1 else ""
            yield Finding(mark, key, f"{usual}{on_all if mark == 'ok' else ''}")
            continue
        text = "\n".join(f"{said} on {who([firsts[i] for i in places], everyone)}" for said, places in [(usual, majority), *odd])
        yield Finding("problem", key, f"{value} differs\n{text}", "Give all nodes the same files")


def what_is_read(cfg: DoctorConfig) -> Iterator[tuple[str, str]]:
    """(key, what this node has under it): the number of files, their size, and a digest of names, sizes, heads and tails."""
    for key in ("data.path", "data.validation", "tokenizer.path", "model.init_from"):
        value = settings_of(cfg, key)
        if value is None or isinstance(value, int | float) or (key == "model.init_from" and is_hub_id(value)):
            continue
        try:
            files = [file for source in find_sources(value, key) for file in source.files] if key.startswith("data") else files_of(value)
            yield key, digest_of(files)
        except UserError as error:
            yield key, f"{UNREADABLE}: {error.problems[0].why.splitlines()[0]}"
        except OSError as error:
            yield key, f"{UNREADABLE}: {error}"


def settings_of(cfg: DoctorConfig, key: str) -> Any:
    """The value of a dotted key."""
    group, name = key.split(".")
    return getattr(getattr(cfg, group), name)


def files_of(path: str) -> list[str]:
    """The files of a tokenizer, a Hugging Face folder, or a run's newest checkpoint."""
    if path.startswith("demo:"):
        return []
    place = find_checkpoint(path) or Path(path)
    return sorted(str(file) for file in place.rglob("*") if file.is_file()) if place.is_dir() else [str(place)]


def digest_of(files: Sequence[str]) -> str:
    """Cheap, so that a terabyte takes seconds: whoever cuts a copy short, or has another version, has another size or edge."""
    digest, total = hashlib.blake2b(digest_size=4), 0
    real = [file for file in files if file not in demo.TASKS]
    for file in real:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            digest.update(f"{Path(file).name} {size}".encode() + f.read(EDGE))
            f.seek(max(0, size - EDGE))
            digest.update(f.read(EDGE))
        total += size
    return f"{counted(len(real), 'file')}, {total:,} bytes, {digest.hexdigest()}" if real else "made here, alike everywhere"


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


def gigabytes(rate: float) -> str:
    """A second."""
    return f"{rate / 1e9:.3g} GB/s"


def flops(rate: float) -> str:
    """A second."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
