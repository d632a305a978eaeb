"""What `doctor` looks at, in the order in which it tells it. Collective; rank 0 judges."""

import os
import socket
import sys
import time
from collections.abc import Sequence
from statistics import median_high

import torch
import torch.distributed as dist

from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.devices import peak_flops
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch import speed
from fsdp_trainer.launch.doctor_report import UNHEALTHY, DoctorReport, counted
from fsdp_trainer.launch.facts import (
    CLOCK_SECONDS,
    Check,
    clocks,
    facts_of,
    flops,
    gigabytes,
    host_name,
    judge,
    limits,
    who,
)
from fsdp_trainer.launch.machines import (
    Looked,
    configuration,
    cpu_model,
    environment,
    interfaces,
    machines,
    software,
)
from fsdp_trainer.launch.nodes import unreachable
from fsdp_trainer.launch.storage import inputs, storage, what_is_read
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.parallel.memory_check import gib, host_bytes

MOST_SECONDS = 180.0  # to wait for others: of a doctor one expects a word
HUNG = "A firewall between the nodes, or the wrong interface: every port must be open; see GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"


def checkup(cfg: DoctorConfig) -> int:
    """Examine the world. Returns the exit code, the same on all ranks."""
    timeout = min(MOST_SECONDS, parse_duration(cfg.launch.timeout))
    world = meet(cfg, timeout)
    if world is None:
        return UNHEALTHY
    report = DoctorReport(cfg.doctor.format, quiet=not world.main)
    try:
        examine(cfg, world, report, timeout)
    except (RuntimeError, RunFailed) as error:  # a collective failed, or someone did not come
        report.add(
            "network",
            Check(
                "problem",
                "communication",
                f"broke down: {str(error).strip().splitlines()[0]}",
                HUNG,
            ),
        )
    code = world.from_main("the doctor's word", report.close, timeout)
    world.wait_until_heard("the doctor's word", timeout)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def meet(cfg: DoctorConfig, timeout: float) -> World | None:
    """The world; None, and a line from this rank, where rank 0's store cannot be reached or not all come."""
    env = environment_of_ranks(os.environ) or os.environ
    try:
        return join(env, cfg.launch.device, timeout)
    except (RuntimeError, RunFailed) as error:
        address, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", 0))
        why = unreachable(address, port) if isinstance(error, dist.DistError) else ""
        print(
            f"rank {env.get('RANK', 0)} ({socket.gethostname()}): {why or error.args[0].splitlines()[0]}",
            file=sys.stderr,
        )
        return None


def examine(cfg: DoctorConfig, world: World, report: DoctorReport, timeout: float) -> None:
    """All sections. The settings are told before the first collective, which may hang for their sake."""
    everyone = world.to_main("facts", look(cfg, world), timeout)
    if world.main:
        report.add("machines", *machines(everyone, world), *limits(everyone, world.device.type))
        report.add("software", *software(everyone), *configuration(everyone))
        report.add("environment", *environment(everyone))
    alike = world.from_main(
        "alike", lambda: len({f.versions["device"] for f in everyone}) == 1, timeout
    )
    if not alike:
        report.add(
            "network",
            Check(
                "problem", "not tried", "some ranks compute on GPUs and some do not: see software"
            ),
        )
        return
    began = time.perf_counter()
    connect(world, timeout)
    speed.largest(0.0)
    at = (
        f" through {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "MASTER_PORT" in os.environ
        else ""
    )
    met = f"{counted(world.size, 'rank')} met{at} in {time.perf_counter() - began:.2f} s"
    report.add("network", Check("ok", "process group", met))
    report.add("network", *clock(world, everyone, timeout))
    if cfg.doctor.measure:
        report.add("network", *network(cfg, world, everyone, timeout))
        report.add("devices", *devices(cfg, world, everyone, timeout))
    report.add("storage", *storage(cfg, world, everyone, timeout))
    if world.main:
        report.add("inputs", *inputs(cfg, everyone))


def look(cfg: DoctorConfig, world: World) -> Looked:
    """This rank's facts."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    looked = Looked(
        **vars(facts_of(cfg, world, alone=True)),
        memory=host_bytes({}),
        cores=cores,
        threads=torch.get_num_threads(),
    )
    looked.machine = {"CPU": cpu_model(), "cores": str(cores)}
    if world.device.type == "cuda":
        looked.machine["GPU memory"] = gib(
            torch.cuda.get_device_properties(world.device).total_memory
        )
    if world.local_rank == 0:
        looked.inputs = dict(what_is_read(cfg))
        looked.interfaces = interfaces()
        try:
            looked.address = socket.gethostbyname(looked.host)
        except OSError:
            looked.address = "nothing"
    return looked


def clock(world: World, everyone: Sequence[Looked], timeout: float) -> list[Check]:
    """Of the hosts, read between two moments of rank 0's that lie close together."""
    began = time.time()
    speed.largest(0.0)
    read = world.to_main("clock", time.time(), timeout)
    ended = time.time()
    for f, at in zip(everyone, read, strict=False):
        f.clock = at
    if not world.main or len({f.node for f in everyone}) == 1:
        return []
    right = Check(
        "ok",
        "clocks",
        f"within {CLOCK_SECONDS:g} s of {everyone[0].host}'s; asking took {ended - began:.3f} s",
    )
    return clocks(everyone, began, ended) or [right]


def network(
    cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float
) -> list[Check]:
    """Collectives within nodes and over all, then every link by itself."""
    nodes = world.from_main("nodes", lambda: [f.node for f in everyone], timeout)
    if world.size == 1:
        return [Check("note", "not measured", "there is one rank")]
    found = []
    groups = {
        node: [rank for rank, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)
    }
    if len(groups) > 1 and max(map(len, groups.values())) > 1:
        within = {node: dist.new_group(ranks) for node, ranks in groups.items()}
        rates = world.to_main(
            "within", speed.collectives(world.device, within[world.node]), timeout
        )
        if world.main:
            for i, first in enumerate(rates[0]):
                of_nodes = {
                    host_name(node, everyone): rates[ranks[0]][i].bus
                    for node, ranks in groups.items()
                    if len(ranks) > 1
                }
                found += judge(
                    f"{first.name} in a node",
                    of_nodes,
                    cfg.doctor.slow,
                    world.device.type,
                    gigabytes,
                    f"{first.size // speed.MIB:>2} MiB: bus ",
                )
    for rate in speed.collectives(world.device):
        text = f"{rate.size // speed.MIB:>2} MiB: {gigabytes(rate.algorithm)}, bus {gigabytes(rate.bus)}"
        found.append(
            Check(
                "ok",
                rate.name,
                f"{text}, {counted(world.size, 'rank')} on {counted(len(groups), 'node')}",
            )
        )
    links = speed.links(world.device)
    if world.main:
        for what, same in (("links in a node", True), ("links between nodes", False)):
            named = {
                f"{who([a], everyone)} ↔ {who([b], everyone)}": r
                for (a, b), r in links.items()
                if (nodes[a] == nodes[b]) == same
            }
            found += (
                judge(what, named, cfg.doctor.slow, world.device.type, gigabytes) if named else []
            )
    return found


def devices(
    cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float
) -> list[Check]:
    """Matrix products on all ranks at once, as in training."""
    rates = world.to_main("products", speed.products(world.device), timeout)
    if not world.main:
        return []
    what = "bfloat16 products" if world.device.type == "cuda" else "float32 products"
    found = judge(
        what,
        {who([rank], everyone): rate for rank, rate in enumerate(rates)},
        cfg.doctor.slow,
        world.device.type,
        flops,
    )
    peak = peak_flops(everyone[0].versions.get("GPU", ""))
    if peak and median_high(rates) < peak / 2:
        text = f"{median_high(rates) / peak:.0%} of the data sheet's {flops(peak)}: a power limit, heat, or someone else's job"
        found.append(
            Check("warning", "all devices", text, "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE")
        )
    return found
