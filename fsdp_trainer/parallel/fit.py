"""Whether a rank can hold its share of a model's states at all: a lower bound, in arithmetic, before anything is allocated."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.schema import Optim, Precision, Sharding
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.eight_bit import BLOCK

CGROUP = Path("/sys/fs/cgroup")
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / BLOCK}


class Need(NamedTuple):
    """Something that a rank holds: how many bytes, how that is reckoned, and whether sharding.cpu_offload moves it to the host."""

    what: str
    size: float
    how: str
    offloads: bool = True


def least_needs(
    model: Decoder, sharding: Sharding, precision: Precision, optim: Optim, ranks: int
) -> list[Need]:
    """What a rank of `ranks` holds at the same moment, at least. Activations and temporaries are left out."""
    group = ranks_that_share(sharding, ranks)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    stored, computed = (
        getattr(torch, dtype).itemsize for dtype in (precision.master_dtype, precision.param_dtype)
    )
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers.values()]
    unit = max(
        sum(blocks[i : i + sharding.blocks_per_unit])
        for i in range(0, len(blocks), sharding.blocks_per_unit)
    )

    def sharded(what: str, numbers: int, size: float) -> Need:
        how = f"{numbers / 1e9:.3g} G × {size:.3g} B " + (
            f"÷ {group} ranks" if group > 1 else "on every rank"
        )
        return Need(what, numbers * size / group, how)

    gradients = sharded("gradients", trained, stored)
    states = [
        sharded("weights", count, stored),
        sharded(
            "moments", trained, 2 * MOMENT_BYTES[moments_format(optim, precision.master_dtype)]
        ),
    ]
    if group == 1 and stored == computed:
        return [*states, gradients]  # nothing need be gathered
    if (
        keeps_gathered(sharding) and count * computed > gradients.size + unit * computed
    ):  # the end of forward: no gradients yet
        return [
            *states,
            Need(
                "gathered",
                count * computed,
                f"{count / 1e9:.3g} G × {computed} B, all units after forward",
                False,
            ),
        ]
    return [
        *states,
        gradients,
        Need(
            "gathered",
            unit * computed,
            f"{unit / 1e9:.3g} G × {computed} B, the largest unit of blocks",
            False,
        ),
    ]


def checkpoint_bytes(parameters: int, precision: Precision, optim: Optim) -> float:
    """Weights and both moments, as they are stored; what lies beside them is small."""
    moments = MOMENT_BYTES[moments_format(optim, precision.master_dtype)]
    return parameters * (getattr(torch, precision.master_dtype).itemsize + 2 * moments)


def ranks_that_share(sharding: Sharding, ranks: int) -> int:
    """How many of `ranks` hold one copy of the states together."""
    return {"fsdp": ranks, "hsdp": max(1, ranks // sharding.replicas), "ddp": 1}[sharding.strategy]


def keeps_gathered(sharding: Sharding) -> bool:
    """Whether units stay gathered from forward to backward."""
    return (
        sharding.strategy == "ddp"
        if sharding.reshard_after_forward == "auto"
        else not sharding.reshard_after_forward
    )


def check_fit(
    model: Decoder,
    sharding: Sharding,
    precision: Precision,
    optim: Optim,
    ranks: int,
    device: torch.device,
) -> None:
    """Raise UserError with the arithmetic if this rank's states cannot fit. Weights on the meta device are enough."""
    memory, host = device_bytes(device), host_bytes(os.environ)

    def fits(sharding: Sharding, precision: Precision, ranks: int, optim: Optim = optim) -> bool:
        needs = least_needs(model, sharding, precision, optim, ranks)
        offloaded = (
            sum(n.size for n in needs if n.offloads)
            if sharding.cpu_offload and device.type == "cuda"
            else 0
        )
        return offloaded <= host and sum(n.size for n in needs) - offloaded <= memory

    if fits(sharding, precision, ranks):
        return
    needs = least_needs(model, sharding, precision, optim, ranks)
    have = (
        f"{gib(memory)} on the GPU"
        if device.type == "cuda"
        else f"{gib(memory)} for each rank on this machine"
    )
    if sharding.cpu_offload and device.type == "cuda":
        have += f" and {gib(host)} of the host's"
    lines = [
        "each rank holds at least",
        *(f"{n.what:12}{gib(n.size):>12}   {n.how}" for n in needs),
    ]
    lines += [
        f"{'in all':12}{gib(sum(n.size for n in needs)):>12}   of {have}",
        *ways_out(fits, sharding, precision, optim, ranks, device),
    ]
    raise UserError(
        "the model's states cannot fit", [Problem(f"{ranks} × {device.type}", "\n".join(lines))]
    )


def ways_out(
    fits: Callable[..., bool],
    sharding: Sharding,
    precision: Precision,
    optim: Optim,
    ranks: int,
    device: torch.device,
) -> list[str]:
    """What to type instead, as far as it would fit."""
    found = []
    sharded = replace(sharding, strategy="fsdp", replicas=1)
    pure = replace(precision, param_dtype="bfloat16", master_dtype="bfloat16")
    if sharding.strategy != "fsdp" and fits(sharded, precision, ranks):
        found.append("sharding=fsdp")
    if precision.master_dtype != "bfloat16" and fits(sharding, pure, ranks):
        found.append("precision=pure_bf16")
    if optim.state_dtype != "8bit" and fits(
        sharding, precision, ranks, replace(optim, state_dtype="8bit")
    ):
        found.append("optim=adamw_8bit")
    if device.type == "cuda" and fits(replace(sharded, cpu_offload=True), precision, ranks):
        found.append("sharding.cpu_offload=true")
    enough = next(
        (n for n in (ranks * 2**i for i in range(1, 20)) if fits(sharded, precision, n)), None
    )
    if enough:
        enough = next(n for n in range(enough // 2, enough + 1) if fits(sharded, precision, n))
        found.append(
            f"{enough} ranks with as much memory each{'' if sharding.strategy == 'fsdp' else ' and sharding=fsdp'}"
        )
    return [f"Use  {'  or  '.join(found)}" if found else "A smaller model is what is left"]


def device_bytes(device: torch.device) -> float:
    """Memory that this rank may have where it computes: all of a GPU, a share of what the host has to give."""
    return (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else host_bytes(os.environ)
    )


def host_bytes(
    env: Mapping[str, str], meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP
) -> float:
    """Available host memory, or what the control group leaves of it, for each rank of this node; infinite where the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        available = int(found[1]) * 1024.0 if found else math.inf
        limit = (
            (cgroup / "memory.max").read_text().strip()
            if (cgroup / "memory.max").is_file()
            else "max"
        )
        if limit != "max":
            used = re.search(r"^anon (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
            available = min(available, int(limit) - (int(used[1]) if used else 0))
    except OSError:
        return math.inf
    return available / int(env.get("LOCAL_WORLD_SIZE", 1))


def gib(size: float) -> str:
    """Bytes as people write them."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
