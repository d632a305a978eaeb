"""The report of a rank that ran out of memory: memory in use, planned memory, and suggestions.

It involves no other rank, since the others may be waiting for this one in a collective.
"""

import re
import sys
import traceback
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.process import peak_resident_bytes
from fsdp_trainer.base.torch_private import fsdp_tensors
from fsdp_trainer.config.devices import Device, named_by_driver
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.world import World
from fsdp_trainer.observe.records import Records
from fsdp_trainer.parallel.memory_check import device_bytes, gib
from fsdp_trainer.parallel.parallelize import fsdp_modules
from fsdp_trainer.training.stopping.stop import StopSignals
from fsdp_trainer.training.trainer import Trainer

MEASURED = ("parameters", "gradients", "optimizer", "gathered", "communication")
"""The plan's categories that can be measured from live tensors."""
REST = ("activations", "logits")
SUGGESTED_PEAK = 0.9
"""Share of the planned peak that suggestions may use. It is below 1 because according to the plan
the run itself may have fitted."""
MAX_SUGGESTIONS = 5
MEMORY_VIEWER = "Every allocation, for https://pytorch.org/memory_viz: "
FRAGMENTED = [
    "Much is reserved but not allocated, which is fragmentation:",
    "  'launch.env={PYTORCH_ALLOC_CONF: \"expandable_segments:True\"}'",
]
SNAPSHOT = (
    "Which lines of code hold what:  profile.memory=true  writes a snapshot when it happens again"
)
CANNOT_ALLOCATE = ("out of memory", "DefaultCPUAllocator")


class Planned(NamedTuple):
    """The planned peak: bytes by category, a text that says when, and (override, reason) to try."""

    by_category: dict[str, float]
    when: str
    suggestions: list[tuple[str, str]]


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed on a GPU or on the host, in torch or elsewhere."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CANNOT_ALLOCATE)


def report_out_of_memory(
    error: BaseException,
    trainer: Trainer | None,
    world: World,
    records: Records,
    stop: StopSignals,
) -> RunFailed:
    """Return the error for this rank to raise.

    Often all ranks run out together: only the first one writes an event, and only the first one and
    rank 0 explain. If the first one is not rank 0, it also sends its text to rank 0, which may be
    waiting for it in a collective.
    """
    try:
        first = world.store.add("out of memory", 1) == 1
    except RuntimeError:  # the store ended with the rank that owned it
        first = True
    text = f"rank {world.rank} ran out of memory on {world.device}: {error}".splitlines()[0]
    if trainer and (first or world.main):
        file = trainer.profiler.out_of_memory()
        text, figures = explain(error, trainer, world)
        text += f"\n{MEMORY_VIEWER}{file}" if file else ""
        if first:
            records.event("out_of_memory", **figures)
    if first and not world.main:
        stop.report_failure(text)
    return RunFailed(text)


def explain(error: BaseException, trainer: Trainer, world: World) -> tuple[str, Json]:
    """Return the message and the fields of the event.

    Frees the tensors of the failed step, since computing the plan needs memory on a CPU.
    """
    size = re.search(r"tried( to allocate [\d.]+ \w+)", str(error), re.IGNORECASE)
    what = f"tried{size[1]}" if size else describe(error).splitlines()[0]
    step, phase = phases.training.step, phases.training.phase
    figures = {"rank": world.rank, "device": str(world.device), "step": step, "phase": phase}
    title = f"rank {world.rank} ran out of memory on {world.device}"
    title += f", in {phase} of step {step:,}: {what}"
    try:
        held = measure(trainer, world.device)
        traceback.clear_frames(error.__traceback__)
    except Exception as failure:
        return f"{title}\nits contents could not be listed: {describe(failure)}", figures
    figures |= held
    try:
        planned = plan(trainer, world, held["total"])
        suggestions = [override for override, _ in planned.suggestions]
        figures |= {"planned": planned.by_category, "suggestions": suggestions}
    except Exception as failure:  # a plan may be impossible; the measurements are reported anyway
        planned = Planned({}, f"no plan: {describe(failure)}", [])
    lines = [
        *table(held, planned, world.device),
        *advice(held, planned.suggestions, world.device, trainer.checkpoints.newest),
    ]
    return "\n".join([title, *lines]), figures


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def measure(trainer: Trainer, device: torch.device) -> Json:
    """Return this rank's memory in bytes: `measured` by category, `allocated`, `reserved`, `total`.

    On a CPU the peak resident memory of the process counts as allocated and reserved.
    """
    tensors: dict[str, list[object]] = {name: [] for name in MEASURED}
    for module in fsdp_modules(trainer.runner.model):
        for name, values in fsdp_tensors(module).items():
            tensors[name] += values
    for state in trainer.runner.optimizer.state.values():
        tensors["optimizer"] += state.values()
    counted: set[int] = set()
    measured = {
        name: sum(storage_bytes(value, device, counted) for value in values)
        for name, values in tensors.items()
    }
    total = int(min(device_bytes(device), sys.maxsize))
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
    else:
        allocated = reserved = peak_resident_bytes()
        total += allocated
    measured["rest"] = allocated - sum(measured.values())
    return {"measured": measured, "allocated": allocated, "reserved": reserved, "total": total}


def storage_bytes(value: object, device: torch.device, counted: set[int]) -> int:
    """Return the bytes of a tensor's storage on `device`, and add it to `counted`.

    Returns 0 for a storage that is in `counted` already, and for a value that is not a tensor.
    """
    if not isinstance(value, Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    if hasattr(local, "__tensor_flatten__"):  # a subclass made of several tensors: 8-bit moments
        parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
        return sum(storage_bytes(part, device, counted) for part in parts)
    storage = local.untyped_storage()
    if local.device.type != device.type or storage.data_ptr() in counted:
        return 0
    counted.add(storage.data_ptr())
    return storage.nbytes()


def plan(trainer: Trainer, world: World, total: int) -> Planned:
    """Return the plan of this run on a device of `total` bytes, and overrides that need less."""
    # imported here because a run that fits has no use for it: Hydra and the planner, 0.6 s
    from fsdp_trainer.planning.plan.changes import Candidate
    from fsdp_trainer.planning.plan.plan import make_plan
    from fsdp_trainer.planning.plan.suggest import suggest

    cfg, config = trainer.runner.cfg, trainer.runner.model.config
    cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if cuda else "cpu"
    known = named_by_driver(name)
    per_node = max(1, world.size // world.nodes)
    device = (known or Device(name, 0.0))._replace(memory_gib=total / 2**30, per_node=per_node)
    peak = make_plan(cfg, config, world.size, device).memory.peak
    allowance = peak.bytes["allowance"]  # hardly changes with any override
    smaller = allowance + SUGGESTED_PEAK * (peak.total - allowance)
    device = device._replace(memory_gib=min(total, smaller) / 2**30)
    suggestions = []
    for suggestion in suggest(Candidate(cfg, config, world.size, device))[:MAX_SUGGESTIONS]:
        time = f", {suggestion.cost:+.0%} time" if known else ""
        reason = f"{gib(suggestion.peak_bytes)}{time}; {suggestion.reason}"
        suggestions.append((override_for_training(suggestion.override), reason))
    return Planned(peak.bytes, f"at least: by the lower bound of plan, {peak.when}", suggestions)


def override_for_training(override: str) -> str:
    """Return an override of `plan` in the form for `train`.

    The number of ranks is written in words, since for `train` the launcher sets it.
    """
    words = [word for word in override.split() if not word.startswith("plan.")]
    ranks = re.search(r"plan\.world_size=(\S+)", override)
    return " ".join([*words, f"on {ranks[1]} ranks"] if ranks else words)


def table(held: Json, planned: Planned, device: torch.device) -> list[str]:
    """Return the lines of measured and planned bytes. held: see `measure`."""
    *measured, rest = [(name, size, (name,)) for name, size in held["measured"].items()]
    program = "" if device.type == "cuda" else ", program"
    rows = [
        *measured,
        (f"activations, logits, other{program}", rest[1], REST),
        ("reserved, not allocated", held["reserved"] - held["allocated"], ("allowance",)),
        ("in all", held["reserved"], tuple(planned.by_category)),
    ]
    lines = [f"  {'':36}{'measured':>12}{'at least':>12}"]
    for label, size, categories in rows:
        sizes = [planned.by_category[name] for name in categories if name in planned.by_category]
        lines.append(f"  {label:36}{gib(size):>12}{gib(sum(sizes)) if sizes else '':>12}")
    return [*lines, f"  of {gib(held['total'])}; {planned.when}"]


def advice(
    held: Json, suggestions: list[tuple[str, str]], device: torch.device, newest: int
) -> list[str]:
    """Return lines with overrides to try. newest: step of the newest checkpoint; -1: none."""
    lines = ["Worth trying, by the same lower bound:"] if suggestions else []
    lines += [f"  {override:46} {reason}" for override, reason in suggestions]
    if held["reserved"] - held["allocated"] > 0.1 * held["total"]:  # never on a CPU
        lines += FRAGMENTED
    if device.type == "cuda":
        lines.append(SNAPSHOT)
    if newest >= 0:
        lines.append(f"The checkpoint of step {newest:,} is safe: the same command resumes from it")
        if any("batch.micro_rows" in override for override, _ in suggestions):
            lines[-1] += ", also with another batch.micro_rows"
    return lines
