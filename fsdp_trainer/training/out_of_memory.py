"""When a rank runs out of memory: what it held, beside what the plan has for it, and which overrides would take less. Asks no other rank."""

import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_trainer import phases
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.world import World
from fsdp_trainer.observe.records import Records
from fsdp_trainer.parallel.fit import device_bytes, gib
from fsdp_trainer.parallel.parallelize import fsdp_modules
from fsdp_trainer.plan.devices import Device, named_by_driver
from fsdp_trainer.plan.plan import make_plan
from fsdp_trainer.plan.suggest import suggest
from fsdp_trainer.training.stop import StopRequests
from fsdp_trainer.training.trainer import Trainer

KNOWN = ("parameters", "gradients", "optimizer", "gathered", "communication")
REST = ("activations", "logits")
LESS = 0.9  # of the planned peak: what suggestions must not exceed, since the plan itself may have said that it fits
SUGGESTIONS = 5


class Held(NamedTuple):
    """Bytes of this rank. known: by category of the plan's; allocated: in all, on a CPU resident; reserved: by the allocator, of the device's `total`."""

    known: dict[str, int]
    allocated: int
    reserved: int
    total: int


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU or on the host, torch's allocator or another's."""
    words = ("out of memory", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )


def tell(
    error: BaseException,
    trainer: Trainer | None,
    world: World,
    records: Records,
    stop: StopRequests,
) -> RunFailed:
    """What this rank fails with, which rank 0 hears too: it waits for this one in a collective. On record, for the first rank alone."""
    try:
        first = bool(world.store.add("out of memory", 1) == 1)
    except RuntimeError:  # the store has gone with its owner
        first = True
    text = f"rank {world.rank} ran out of memory on {world.device}: {error}".splitlines()[0]
    if trainer and (first or world.main):  # often all run out together
        file = trainer.profiler.out_of_memory()
        text, figures = explain(error, trainer, world)
        if file:
            text += f"\nEvery allocation, for https://pytorch.org/memory_viz: {file}"
        if first:
            records.event("out_of_memory", **figures)
    if first and not world.main:
        stop.tell_failure(text)
    return RunFailed(text)


def explain(error: BaseException, trainer: Trainer, world: World) -> tuple[str, dict[str, Any]]:
    """What to tell, and the figures for the record. Frees what the failed step held: the plan needs room on a CPU."""
    asked = re.search(r"tried( to allocate [\d.]+ \w+)", str(error), re.IGNORECASE)
    first = f"tried{asked[1]}" if asked else f"{type(error).__name__}: {error}".splitlines()[0]
    where = {
        "rank": world.rank,
        "device": str(world.device),
        "step": phases.main.step,
        "phase": phases.main.phase,
    }
    lines = [
        f"rank {world.rank} ran out of memory on {world.device}, in {where['phase']} of step {where['step']:,}: {first}"
    ]
    try:
        held = measure(trainer, world.device)
        traceback.clear_frames(error.__traceback__)
        where["measured"] = {**held.known, "rest": held.allocated - sum(held.known.values())}
        where |= {"allocated": held.allocated, "reserved": held.reserved, "total": held.total}
    except Exception as failure:
        return "\n".join(
            [*lines, f"what it held cannot be told: {type(failure).__name__}: {failure}"]
        ), where
    try:
        planned, when, tries = plan(trainer, world, held)
        where |= {"planned": planned, "suggestions": [override for override, _ in tries]}
    except Exception as failure:  # the plan knows less than the run: what was measured stands
        planned, when, tries = {}, f"no plan: {type(failure).__name__}: {failure}", []
    return "\n".join(
        [
            *lines,
            *table(held, planned, when, world),
            *advice(held, tries, world.device, trainer.saves.newest),
        ]
    ), where


def measure(trainer: Trainer, device: torch.device) -> Held:
    """What the live tensors of model and optimizer hold, and the allocator."""
    held: dict[str, list[Tensor | None]] = {name: [] for name in KNOWN}
    for module in fsdp_modules(trainer.model):
        for group in _groups(module._get_fsdp_state()):
            for of in group.fsdp_params:
                held["parameters"].append(of._sharded_param_data)
                held["gradients"].append(of.sharded_param.grad)
                unsharded = getattr(
                    of, "_unsharded_param", None
                )  # there is none before the first gather
                held["gathered"] += [
                    *of.all_gather_outputs,
                    of.unsharded_accumulated_grad,
                    unsharded.grad if unsharded is not None else None,
                ]
            held["communication"] += _messages(group)
    for state in trainer.optimizer.state.values():
        held["optimizer"] += [value for value in state.values() if isinstance(value, Tensor)]
    seen: set[int] = set()
    known = {
        name: sum(_bytes(tensor, device, seen) for tensor in tensors if tensor is not None)
        for name, tensors in held.items()
    }
    total = int(min(device_bytes(device), sys.maxsize))
    if device.type == "cuda":
        return Held(
            known, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total
        )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return Held(known, resident, resident, total + resident)


def _groups(state: Any) -> Iterable[Any]:
    one = [] if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # torch < 2.13
    return [group for group in getattr(state, "_fsdp_param_groups", one) if group]


def _messages(group: Any) -> Iterator[Tensor | None]:
    """What is under way, or was just copied out. torch < 2.13 keeps some of it elsewhere: it counts as the rest there."""
    kept = getattr(group.comm_ctx, "all_gather_state", None)
    for result in (group._all_gather_result, kept and kept.all_gather_result):
        yield getattr(result, "all_gather_output", None)
    for state in getattr(group.comm_ctx, "reduce_scatter_states", []):
        yield getattr(state, "reduce_scatter_input", None)


def _bytes(tensor: Tensor, device: torch.device, seen: set[int]) -> int:
    """Of its storage, once; 0 where it lies elsewhere, as what is offloaded does."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "__tensor_flatten__"):  # several in one, as 8-bit moments are
        return sum(
            _bytes(getattr(local, name), device, seen) for name in local.__tensor_flatten__()[0]
        )
    storage = local.untyped_storage()
    if local.device.type != device.type or not storage.size() or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def plan(
    trainer: Trainer, world: World, held: Held
) -> tuple[dict[str, float], str, list[tuple[str, str]]]:
    """The planned peak by category, when that is, and what would take at least a tenth less: override, and why."""
    cfg, config, cuda = trainer.cfg, trainer.model.config, world.device.type == "cuda"
    known = named_by_driver(torch.cuda.get_device_name(world.device)) if cuda else None
    device = known or Device("cpu" if not cuda else torch.cuda.get_device_name(world.device), 0.0)
    device = device._replace(
        memory_gib=held.total / 2**30, per_node=max(1, world.size // world.nodes)
    )
    peak = make_plan(cfg, config, world.size, device).memory.peak
    less = peak.total - (1 - LESS) * (
        peak.total - peak.bytes["allowance"]
    )  # which no override changes much
    smaller = device._replace(memory_gib=min(device.memory_gib, less / 2**30))
    found = suggest(cfg, config, world.size, smaller)[:SUGGESTIONS]
    tries = [
        (
            for_training(s.override),
            f"{gib(s.peak_bytes)}{f', {s.cost:+.0%} time' if known else ''}; {s.why}",
        )
        for s in found
    ]
    return peak.bytes, f"planned: the peak, {peak.when}", tries


def for_training(override: str) -> str:
    """What `plan` would be told, as training is: its launcher says how many ranks there are."""
    words = override.split()
    ranks = [
        f"on {word.partition('=')[2]} ranks"
        for word in words
        if word.startswith("plan.world_size=")
    ]
    return " ".join([*(word for word in words if not word.startswith("plan.")), *ranks])


def table(held: Held, planned: dict[str, float], when: str, world: World) -> list[str]:
    """Measured beside planned."""
    rest = held.allocated - sum(held.known.values())
    names = "activations, logits, other" + ("" if world.device.type == "cuda" else ", program")
    rows = [(name, held.known[name], planned.get(name)) for name in KNOWN]
    rows += [(names, rest, sum(planned.get(name, 0.0) for name in REST) if planned else None)]
    rows += [("reserved, not allocated", held.reserved - held.allocated, planned.get("allowance"))]
    rows += [("in all", held.reserved, sum(planned.values()) if planned else None)]
    lines = [f"  {'':36}{'measured':>12}{'planned':>12}"]
    lines += [
        f"  {name:36}{gib(is_):>12}{'' if of is None else gib(of):>12}" for name, is_, of in rows
    ]
    return [*lines, f"  of {gib(held.total)}; {when}"]


def advice(
    held: Held, tries: list[tuple[str, str]], device: torch.device, newest: int
) -> list[str]:
    """What to type. newest: step of the newest checkpoint, below 0 if there is none."""
    lines = (
        ["Worth trying, by the same plan:", *(f"  {override:46} {why}" for override, why in tries)]
        if tries
        else []
    )
    if device.type == "cuda":
        if held.reserved - held.allocated > 0.1 * held.total:
            lines.append("Much is reserved but not allocated, which is fragmentation:")
            lines.append("  'launch.env={PYTORCH_CUDA_ALLOC_CONF: \"expandable_segments:True\"}'")
        lines.append(
            "Which lines of code hold what:  profile.memory=true  writes a snapshot when it happens again"
        )
    if newest < 0:
        return lines
    lines.append(f"The checkpoint of step {newest:,} stands: the same command goes on from it")
    if any("batch.micro_rows" in override for override, _ in tries):
        lines[-1] += (
            ", with another batch.micro_rows only by  'checkpoint.allow_changes=[batch.micro_rows]'"
        )
    return lines
