"""The sections of `doctor`, in printing order. All ranks take part; rank 0 judges the results."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from statistics import median_high

import torch
import torch.distributed as dist

from fsdp_trainer.apps.doctor import speed
from fsdp_trainer.apps.doctor.group_links import group_links
from fsdp_trainer.apps.doctor.machines import (
    HostFacts,
    configuration,
    cpu_model,
    environment,
    interfaces,
    machines,
    software,
)
from fsdp_trainer.apps.doctor.state_disk import state_disk
from fsdp_trainer.apps.doctor.storage import input_digests, inputs, storage
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import safe, visible
from fsdp_trainer.config.devices import peak_flops
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.facts import (
    CLOCK_SECONDS,
    Check,
    RankFacts,
    changed_keys,
    clocks,
    facts_of,
    flops,
    gigabytes,
    judge,
    limits,
    parted_tensor_groups,
    who,
)
from fsdp_trainer.launch.nodes import unreachable
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.models.attention_choice import AMPERE, BEST, NAMES, choose
from fsdp_trainer.models.attention_kernels import describe_device
from fsdp_trainer.parallel.dims import groups_along
from fsdp_trainer.parallel.memory_check import gib, host_bytes

COLOURS = {"ok": "32", "note": "2", "warning": "33", "problem": "31"}
UNHEALTHY = 3  # exit code


class DoctorReport:
    """Prints each finding immediately, under the heading of its section. Only rank 0 prints."""

    def __init__(self, format: str, quiet: bool):
        self.format, self.quiet = format, quiet
        self.counts = dict.fromkeys(COLOURS, 0)
        self.section = ""

    def add(self, section: str, *findings: Check) -> None:
        for finding in findings:
            self.counts[finding.mark] += 1
            self._print(self._line(section, finding))
            self.section = section

    def close(self) -> int:
        problems, warnings = self.counts["problem"], self.counts["warning"]
        if self.format == "text":
            self._print(f"\n{_some(problems, 'problem')}, {_some(warnings, 'warning')}")
        return UNHEALTHY if problems else 0

    def _print(self, text: str) -> None:
        try:
            if not self.quiet:
                print(safe(text), flush=True)
        except BrokenPipeError:  # the reader ended, but the other ranks still wait for this one
            self.quiet = True

    def _line(self, section: str, finding: Check) -> str:
        if self.format == "json":
            fields = asdict(finding)
            del fields["certain"]
            return json.dumps({"section": section, **fields}, ensure_ascii=False)
        mark = f"{finding.mark:8}"
        if sys.stdout.isatty():
            mark = f"\033[{COLOURS[finding.mark]}m{mark}\033[0m"
        first, *rest = finding.text.splitlines() or [""]
        lines = [f"  {mark} {finding.what:22} {first}", *(f"{'':34}{line}" for line in rest)]
        lines += [f"{'':34}→ {finding.advice}"] if finding.advice else []
        return "\n".join([*(["", section] if section != self.section else []), *lines])


def _some(number: int, noun: str) -> str:
    return counted(number, noun) if number else f"no {noun}s"


MAX_WAIT_SECONDS = 180.0  # upper bound on launch.timeout when waiting for other ranks
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Names of packages by that of their module."""
HUNG = (
    "A firewall between the nodes, or the wrong interface: every port must be open; see"
    " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
)


def checkup(cfg: DoctorConfig) -> int:
    timeout = min(MAX_WAIT_SECONDS, parse_duration(cfg.launch.timeout))
    world = meet(cfg, timeout)
    if world is None:
        return UNHEALTHY
    report = DoctorReport(cfg.doctor.format, quiet=not world.main)
    try:
        examine(cfg, world, report, timeout)
    except (RuntimeError, RunFailed) as error:  # a collective failed, or a rank did not join
        text = f"broke down: {str(error).strip().splitlines()[0]}"
        report.add("network", Check("problem", "communication", text, HUNG))
    code = world.from_main("the doctor's word", report.close, timeout)
    world.wait_until_heard("the doctor's word", timeout)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def meet(cfg: DoctorConfig, timeout: float) -> World | None:
    """Join the other ranks and return the World.

    Returns None, and prints the reason, if rank 0's store cannot be reached or a rank is missing.
    """
    env = environment_of_ranks(os.environ) or os.environ
    try:
        return join(env, cfg.launch.device, timeout, cfg.launch.ranks_per_gpu)
    except (RuntimeError, RunFailed) as error:
        address, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", 0))
        reason = unreachable(address, port) if isinstance(error, dist.DistError) else ""
        reason = reason or error.args[0].splitlines()[0]
        who = f"rank {env.get('RANK', 0)} ({socket.gethostname()})"
        print(visible(f"{who}: {reason}"), file=sys.stderr)
        return None


def examine(cfg: DoctorConfig, world: World, report: DoctorReport, timeout: float) -> None:
    """Run the checks of all sections and print their findings.

    The environment's settings are printed before the first collective, which may hang because of
    a wrong one.
    """
    everyone = world.to_main("facts", host_facts(cfg, world), timeout)
    if world.main:
        report.add("machines", *machines(everyone, world), *limits(everyone, world.device.type))
        report.add("software", *software(everyone), *configuration(everyone))
        training = everyone[: len(everyone) - cfg.launch.rollout_ranks]
        layout = Layout(cfg.sharding, len(training), cfg.batch)
        report.add("software", *check_layout(layout, training))
        report.add("software", *attention(world.device))
        report.add("environment", *environment(everyone))
    alike = world.from_main(
        "alike", lambda: len({f.versions["device"] for f in everyone}) == 1, timeout
    )
    if not alike:
        text = "some ranks compute on GPUs and some do not: see software"
        report.add("network", Check("problem", "not tried", text))
        return
    began = time.perf_counter()
    connect(world, timeout)
    speed.largest(0.0)
    at = ""
    if "MASTER_PORT" in os.environ:
        at = f" through {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    met = f"{counted(world.size, 'rank')} met{at} in {time.perf_counter() - began:.2f} s"
    report.add("network", Check("ok", "process group", met))
    report.add("network", *clock(world, everyone, timeout))
    if cfg.doctor.measure:
        report.add("network", *network(cfg, world, everyone, timeout))
        report.add("network", *group_links(cfg, world, timeout))
        report.add("devices", *devices(cfg, world, everyone, timeout))
    report.add("storage", *storage(cfg, world, everyone, timeout))
    report.add("storage", *state_disk(cfg, world, everyone, timeout))
    if world.main:
        report.add("inputs", *inputs(cfg, everyone))


def attention(device: torch.device) -> Iterator[Check]:
    """Yield how `auto` computes attention in bfloat16 on a GPU, and what to install for more."""
    if device.type == "cpu":
        return
    yield linear_attention()
    here = replace(describe_device(device), dtype="bfloat16")
    text = f"model.attention_kernel=auto computes it {choose('auto', 'auto', here)}"
    best = BEST.get(here.capability or AMPERE)
    if best is None or best in here.installed:
        yield Check("ok", "attention", text)
        return
    advice = f"{NAMES[best]} is made for this GPU, and is not installed: docs/attention.md"
    yield Check("note", "attention", text, advice)


def linear_attention() -> Check:
    """Return whether kernels for linear attention over packed documents are installed."""
    missing = [name for module, name in KERNELS.items() if find_spec(module) is None]
    if not missing:
        return Check("ok", "linear attention", f"{' and '.join(KERNELS.values())} are installed")
    text = f"{' and '.join(missing)} not installed: hybrid models are slow, by plain PyTorch"
    advice = "Only for Qwen3.5, Kimi-Linear, LFM2 and the like:  pip install 'fsdp_trainer[fla]'"
    return Check("note", "linear attention", text, advice)


def host_facts(cfg: DoctorConfig, world: World) -> HostFacts:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    facts = HostFacts(
        **vars(facts_of(changed_keys(cfg), world, alone=True)),
        memory=host_bytes({}),
        cores=cores,
        threads=torch.get_num_threads(),
    )
    facts.machine = {"CPU": cpu_model(), "cores": str(cores)}
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
        facts.machine["GPU memory"] = gib(memory)
    if world.local_rank == 0:
        facts.inputs = dict(input_digests(cfg))
        facts.interfaces = interfaces()
        try:
            facts.address = socket.gethostbyname(facts.host)
        except OSError:
            facts.address = "nothing"
    return facts


def clock(world: World, everyone: Sequence[HostFacts], timeout: float) -> list[Check]:
    """Compare the clocks of all hosts with rank 0's clock shortly before and after the reading."""
    began = time.time()
    speed.largest(0.0)
    read = world.to_main("clock", time.time(), timeout)
    ended = time.time()
    for f, at in zip(everyone, read, strict=False):
        f.clock = at
    if not world.main or len({f.node for f in everyone}) == 1:
        return []
    text = f"within {CLOCK_SECONDS:g} s of {everyone[0].host}'s; asking took {ended - began:.3f} s"
    return clocks(everyone, began, ended) or [Check("ok", "clocks", text)]


def network(
    cfg: DoctorConfig, world: World, everyone: Sequence[HostFacts], timeout: float
) -> list[Check]:
    nodes = world.from_main("nodes", lambda: [f.node for f in everyone], timeout)
    if world.size == 1:
        return [Check("note", "not measured", "there is one rank")]
    ranks_of = {
        node: [rank for rank, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)
    }
    findings = []
    if len(ranks_of) > 1 and max(map(len, ranks_of.values())) > 1:
        by_node = list(ranks_of.values())
        findings += within(cfg, world, everyone, by_node, "in a node", timeout)
    for name, groups in dimension_groups(Layout(cfg.sharding, world.size, cfg.batch)).items():
        findings += within(cfg, world, everyone, groups, f"along {name}", timeout)
    where = f"{counted(world.size, 'rank')} on {counted(len(ranks_of), 'node')}"
    for rate in speed.collectives(world.device):
        rates = f"{gigabytes(rate.algorithm)}, bus {gigabytes(rate.bus)}"
        text = f"{rate.size // speed.MIB:>2} MiB: {rates}, {where}"
        findings.append(Check("ok", rate.name, text))
    links = speed.links(world.device)
    if world.main:
        for what, same in (("links in a node", True), ("links between nodes", False)):
            named = {
                f"{who([a], everyone)} ↔ {who([b], everyone)}": rate
                for (a, b), rate in links.items()
                if (nodes[a] == nodes[b]) == same
            }
            if named:
                findings += judge(what, named, cfg.doctor.slow, world.device.type, gigabytes)
    return findings


def within(
    cfg: DoctorConfig,
    world: World,
    everyone: Sequence[HostFacts],
    groups: list[list[int]],
    where: str,
    timeout: float,
) -> list[Check]:
    """Measure collectives in all groups at the same time.

    groups: the ranks of each group; every rank is in exactly one group.
    """
    group, _ = dist.new_subgroups_by_enumeration(groups)
    own = speed.collectives(world.device, group)
    rates = world.to_main(f"collectives {where}", own, timeout)
    findings = []
    for i, first in enumerate(rates[0] if world.main else ()):
        named = {who(ranks, everyone): rates[ranks[0]][i].bus for ranks in groups if len(ranks) > 1}
        findings += judge(
            f"{first.name} {where}",
            named,
            cfg.doctor.slow,
            world.device.type,
            gigabytes,
            f"{first.size // speed.MIB:>2} MiB: bus ",
        )
    return findings


def devices(
    cfg: DoctorConfig, world: World, everyone: Sequence[HostFacts], timeout: float
) -> list[Check]:
    """Measure matrix products on all ranks at the same time, as in training."""
    rates = world.to_main("products", speed.products(world.device), timeout)
    if not world.main:
        return []
    what = "bfloat16 products" if world.device.type == "cuda" else "float32 products"
    named = {who([rank], everyone): rate for rank, rate in enumerate(rates)}
    findings = judge(what, named, cfg.doctor.slow, world.device.type, flops)
    peak = peak_flops(everyone[0].versions.get("GPU", ""))
    if peak and median_high(rates) < peak / 2:
        text = (
            f"{median_high(rates) / peak:.0%} of the data sheet's {flops(peak)}:"
            " a power limit, heat, or someone else's job"
        )
        advice = "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE"
        findings.append(Check("warning", "all devices", text, advice))
    return findings


# --- layout ---------------------------------------------------------------------------------------


def check_layout(layout: Layout, everyone: Sequence[RankFacts]) -> list[Check]:
    """Report the sizes of the dimensions, or a problem if the ranks do not fit the layout."""
    sharding, problem = layout.sharding, layout.problem
    if problem is not None:
        reason, _, advice = problem.reason.partition("\n")
        return [Check("problem", problem.what, reason, advice.strip())]
    sizes = {name: size for name, size in layout.sizes.items() if size > 1}
    if sharding.expert > 1:
        sizes["expert"] = sharding.expert
    if set(sizes) <= {"shard"}:
        return []
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return [Check("ok", "layout", named), *parted_tensor_groups(sharding, everyone)]


def dimension_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Return, by name of each dimension, the groups of ranks that differ only in this dimension.

    Dimensions of size 1 and those of all ranks are left out. Returns {} if the ranks do not fit
    the layout.
    """
    if layout.problem is not None:
        return {}
    sizes, ranks = layout.sizes, layout.ranks
    groups = {name: groups_along(name, sizes) for name, n in sizes.items() if 1 < n < ranks}
    if 1 < layout.sharding.expert < ranks:
        groups["expert"] = groups_along("expert", layout.expert_sizes)
    return groups
