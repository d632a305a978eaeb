"""Lower bound of the memory of a rank's model states, checked before they are allocated."""

import math
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Adapter, Optim, Precision, Sharding
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec, frozen_dtype
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.moe import Experts
from fsdp_trainer.optim.footprint import is_matrix, state_bytes

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")
OTHER_DEVICES = "For a GPU ask  fsdp-trainer plan  with these keys and  plan.gpu=h100"
MAX_TIMES_RANKS = 2**19  # limit of the search for a sufficient number of ranks


class StateSetup(NamedTuple):
    """Settings that determine, with the model, the size of a rank's states."""

    layout: Layout
    precision: Precision
    optim: Optim
    adapters: AdapterSpec | Adapter | None = None
    averages: bool = False
    """True if groups of ranks average their weights, which keeps a copy and its momentum."""


class MemoryItem(NamedTuple):
    """Bytes that a rank holds, and the formula for them. place: device, host or disk."""

    name: str
    size: float
    formula: str
    place: str = "device"


class Places(NamedTuple):
    """Places of a rank's states, gradients, and copies to compute with: device, host or disk.

    copies: None if it computes with the states' weights.
    """

    states: str
    gradients: str
    copies: str | None

    @classmethod
    def of(cls, sharding: Sharding, optim: Optim) -> "Places":
        computing = "host" if sharding.cpu_offload else "device"
        return {
            "none": cls(computing, computing, None),
            "cpu": cls("host", "host", computing),
            "disk": cls("disk", "host", computing),
        }[optim.offload]


class WeightKind(NamedTuple):
    """A kind of numbers. name: weights (trained), frozen or in 4 bits; in_matrix: of a block."""

    name: str
    of_experts: bool
    in_matrix: bool


Numbers = Counter[WeightKind]


class CountedModel(NamedTuple):
    config: ModelConfig
    whole: Numbers
    blocks: list[Numbers]

    @classmethod
    def of(cls, model: Decoder) -> "CountedModel":
        blocks = list(model.blocks().values())
        experts = {p for part in expert_modules([model]) for p in part.parameters()}
        block_of = {p: i for i, block in enumerate(blocks) for p in block.parameters()}
        whole: Numbers = Counter()
        each: list[Numbers] = [Counter() for _ in blocks]
        for name, p in model.named_parameters():
            state = "in 4 bits" if is_encoded(p) else "weights" if p.requires_grad else "frozen"
            in_matrix = p in block_of and is_matrix(name, p.ndim)
            kind = WeightKind(state, p in experts, in_matrix)
            whole[kind] += p.numel()
            if p in block_of:
                each[block_of[p]][kind] += p.numel()
        return cls(model.config, whole, each)

    def count(self, name: str) -> int:
        return sum(count for kind, count in self.whole.items() if kind.name == name)

    def mean_state_bytes(self, precision: Precision, optim: Optim) -> float:
        """Return a lower bound of the mean bytes of optimizer state per trained number."""
        total = sum(
            count * state_bytes(optim, precision.master_dtype, in_block=kind.in_matrix)
            for kind, count in self.whole.items()
            if kind.name == "weights"
        )
        return total / max(1, self.count("weights"))


class LeastMemory(NamedTuple):
    """A lower bound of what a rank holds.

    states: all the time; gradients: at the end of backward; unit: the largest gathered unit of
    blocks; gathered: all units, None if they do not stay gathered until backward.
    """

    states: list[MemoryItem]
    gradients: MemoryItem
    unit: MemoryItem
    gathered: MemoryItem | None

    @property
    def largest(self) -> list[MemoryItem]:
        """Return the items of the moment at which most bytes are held."""
        moments = [[self.gradients, self.unit]]
        if self.gathered:  # there are no gradients yet
            moments.append([self.gathered])
        moment = [item for item in max(moments, key=total) if item.size or item.name != "gathered"]
        return [*self.states, *moment]


def least_memory(model: Decoder, setup: StateSetup) -> list[MemoryItem]:
    return least_held(CountedModel.of(model), setup).largest


def least_held(model: CountedModel, setup: StateSetup) -> LeastMemory:
    layout, precision, optim, adapters, averages = setup
    sharding, sizes = layout.sharding, layout.sizes
    shards = layout.fsdp_ranks * sizes["tensor"] * sizes["pipeline"]
    stored = getattr(torch, precision.master_dtype).itemsize
    computed = getattr(torch, precision.param_dtype).itemsize
    kept_frozen = getattr(torch, frozen_dtype(precision, adapters)).itemsize
    trained, frozen, encoded = map(model.count, ("weights", "frozen", "in 4 bits"))

    places = Places.of(sharding, optim)

    def sharded(name: str, numbers: int, size: float, place: str = places.states) -> MemoryItem:
        among = f"÷ {shards} ranks" if shards > 1 else "on every rank"
        where = "" if place == "device" else f", on the {place}"
        formula = f"{numbers / 1e9:.3g} G × {size:.3g} B {among}{where}"
        return MemoryItem(name, numbers * size / shards, formula, place)

    whole = layout.fsdp_ranks == 1

    def gathered(numbers: Numbers, which: str, parts: int = 1) -> MemoryItem:
        size = gathered_on_rank(numbers, sharding, computed, whole) / parts
        formula = f"{size / computed / 1e9:.3g} G × {computed} B, {which}"
        return MemoryItem("gathered", size, formula)

    states = [
        sharded("weights", trained, stored),
        sharded("frozen", frozen, kept_frozen, places.gradients),
        sharded("in 4 bits", encoded, 1, places.gradients),
        sharded("moments", trained, model.mean_state_bytes(precision, optim)),
        sharded("average", trained * averages, 2 * stored),
    ]
    if places.copies:
        numbers = trained + frozen + encoded // computed
        states.append(sharded("to compute", numbers, computed, places.copies))
    states = [state for state in states if state.size]  # in most runs nothing is frozen
    gradients = sharded("gradients", trained, stored, places.gradients)
    if whole and (stored == computed or places.copies == "device"):
        return LeastMemory(states, gradients, MemoryItem("gathered", 0.0, ""), None)
    units = [sum(unit, Numbers()) for unit in grouped_blocks(model.blocks, sharding)]
    items = [gathered(unit, "the largest unit of blocks") for unit in units]
    largest = max(items, key=lambda item: item.size)
    everything = None
    if stays_gathered(layout, model.config, precision):
        everything = gathered(model.whole, "all units after forward", sizes["pipeline"])
    return LeastMemory(states, gradients, largest, everything)


def stays_gathered(layout: Layout, config: ModelConfig, precision: Precision) -> bool:
    return layout.keeps_gathered(
        config.parameters() * getattr(torch, precision.param_dtype).itemsize
    )


def grouped_blocks(blocks: list[T], sharding: Sharding) -> list[list[T]]:
    size = sharding.blocks_per_unit
    return [blocks[i : i + size] for i in range(0, len(blocks), size)]


def gathered_on_rank(numbers: Numbers, sharding: Sharding, computed: int, whole: bool) -> float:
    """Return the bytes that one rank holds of gathered weights: of tensors and experts its part.

    computed: bytes of a number that is not in 4 bits; whole: True if one rank holds them all. It
    computes with its frozen weights as they are.
    """
    return sum(
        count
        * (1 if kind.name == "in 4 bits" else computed)
        / (sharding.expert if kind.of_experts else sharding.tensor)
        for kind, count in numbers.items()
        if kind.name == "weights" or not whole
    )


def expert_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules() if isinstance(part, Experts)]


def total(items: list[MemoryItem]) -> float:
    return sum(item.size for item in items)


def checkpoint_bytes(model: CountedModel, precision: Precision, optim: Optim) -> float:
    """Return the bytes of trained weights and optimizer states, which are most of a checkpoint."""
    stored = getattr(torch, precision.master_dtype).itemsize
    return model.count("weights") * (stored + model.mean_state_bytes(precision, optim))


class Alternative(NamedTuple):
    """A suggested override, and the model (on the meta device) and adapters it would train."""

    override: str
    model: Decoder
    adapters: AdapterSpec | None


def check_memory(
    model: Decoder,
    setup: StateSetup,
    device: torch.device,
    alternatives: Callable[[], list[Alternative]] = list,
) -> None:
    """Raise UserError with the calculation if a rank's states cannot fit.

    alternatives: returns other models to suggest if they fit. The weights may be on the meta
    device.
    """
    memory = device_bytes(device)
    host = host_bytes(os.environ)
    cuda = device.type == "cuda"

    counted = CountedModel.of(model)

    def fits(setup: StateSetup, model: CountedModel = counted) -> bool:
        items = least_held(model, setup).largest
        on_host, on_device = (
            total([item for item in items if item.place == place]) for place in ("host", "device")
        )
        if not cuda:  # the device is the host
            return on_host + on_device <= memory
        return on_host <= host and on_device <= memory

    if fits(setup):
        return
    available = f"{gib(memory)} {'on the GPU' if cuda else 'for each rank on this machine'}"
    if cuda and Places.of(setup.layout.sharding, setup.optim).gradients == "host":
        available += f" and {gib(host)} of the host's"
    lines = arithmetic(least_held(counted, setup).largest, available)
    if not cuda:
        lines.append(OTHER_DEVICES)
    overrides = suggestions(fits, setup, cuda)
    overrides += [  # after overrides that train the same model
        other.override
        for other in alternatives()
        if fits(setup._replace(adapters=other.adapters), CountedModel.of(other.model))
    ]
    lines.append(f"Use  {'  or  '.join(overrides)}" if overrides else "Use a smaller model")
    raise UserError(
        "the model's states cannot fit", f"{setup.layout.ranks} × {device.type}", "\n".join(lines)
    )


def arithmetic(items: list[MemoryItem], available: str) -> list[str]:
    """Return the lines of a message: one for each item and one for the sum."""
    return [
        "each rank holds at least",
        *(f"{item.name:12}{gib(item.size):>12}   {item.formula}" for item in items),
        f"{'in all':12}{gib(total(items)):>12}   of {available}",
    ]


def suggestions(fits: Callable[[StateSetup], bool], setup: StateSetup, cuda: bool) -> list[str]:
    """Return overrides with which the states fit; last the one that may reduce quality."""
    layout, precision, optim = setup[:3]
    sharding, ranks = layout.sharding, layout.ranks
    shards = replace(layout, sharding=replace(sharding, strategy="fsdp", replicas=1))
    sharded = setup._replace(layout=shards)
    bfloat16 = replace(precision, param_dtype="bfloat16", master_dtype="bfloat16")
    others = {
        "sharding=fsdp": sharded,
        optim.spec.in_8_bits: setup._replace(optim=replace(optim, state_dtype="8bit")),
    }
    if cuda and not optim.spec.has_owners:  # the host would compute matrix products
        offloaded = replace(shards, sharding=replace(shards.sharding, cpu_offload=True))
        others["sharding.cpu_offload=true"] = setup._replace(layout=offloaded)
    on_device = replace(shards, sharding=replace(shards.sharding, cpu_offload=False))
    for place in ("cpu", "disk") if cuda else ("disk",):
        if not optim.spec.whole_matrices:
            elsewhere = setup._replace(layout=on_device, optim=replace(optim, offload=place))
            others[f"optim.offload={place}"] = elsewhere
    overrides = [override for override, other in others.items() if fits(other)]
    inner = sharding.pipeline * sharding.context * sharding.tensor
    multiple = math.lcm(inner, sharding.expert)  # other numbers of ranks are refused
    worlds = range(ranks, ranks * MAX_TIMES_RANKS + 1, multiple)
    enough = bisect_left(
        worlds, True, key=lambda ranks: fits(sharded._replace(layout=replace(shards, ranks=ranks)))
    )
    if enough < len(worlds):
        also = "" if sharding.strategy == "fsdp" else " and sharding=fsdp"
        overrides.append(f"{worlds[enough]} ranks with the same memory each{also}")
    if fits(setup._replace(precision=bfloat16)):
        overrides.append("precision=pure_bf16")
    return overrides


def device_bytes(device: torch.device) -> float:
    """Return the memory of this rank's device: of a GPU, or its part of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes(os.environ)


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return host_bytes(os.environ)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_bytes(
    env: Mapping[str, str], meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP
) -> float:
    """Return the available host memory for each rank of this node; infinite if unknown.

    A control group (cgroup) may limit it to less than the memory of the machine.
    """
    try:
        available = first_number(r"MemAvailable:\s+(\d+) kB", meminfo, math.inf) * 1024
        if (cgroup / "memory.max").is_file():
            limit = first_number(r"(\d+)", cgroup / "memory.max", math.inf)  # or `max`
            if limit < math.inf:
                limit -= first_number(r"^anon (\d+)$", cgroup / "memory.stat", 0)
            available = min(available, limit)
    except OSError:
        return math.inf
    return available / int(env.get("LOCAL_WORLD_SIZE", 1))


def first_number(pattern: str, file: Path, default: float) -> float:
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    return float(match[1]) if match else default


def gib(size: float) -> str:
    """Return bytes as text: in GiB, or in MiB below 0.25 GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
