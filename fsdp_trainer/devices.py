"""The table of GPUs: memory, arithmetic, links.

Imports nothing that is heavy, and nothing of ours that does more.
"""

from glob import glob
from typing import Any, NamedTuple

from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.errors import Problem, UserError


class Device(NamedTuple):
    """A GPU in the machine it is usually sold in. Rates count one direction."""

    name: str
    """As the driver has it; the first device of the table whose name is part of the driver's
    counts."""
    memory_gib: float
    """As torch reports it, which is less than the data sheet's GB."""
    flops: float | None = None
    """Dense bfloat16 FLOP/s; None: not known, and then no times are given."""
    flops_float32: float = 0.0
    """Of float32 outside of tensor cores (TF32 is off)."""
    memory_rate: float = 0.0
    """Bytes per second of the device's memory."""
    link: float = 0.0
    """Bytes per second to the other GPUs of a node: NVLink, Infinity Fabric, or PCIe."""
    host_link: float = 32e9
    """Bytes per second to the host."""
    per_node: int = 8
    network: float = 50e9
    """Bytes per second and GPU between nodes."""
    reach: float = 1.0
    """Share of its peak that this kind reaches in training, relative to Hopper."""
    efficiency: float | None = None
    """Share of the peak that is reached, if it was said."""
    disk: float = 2e9
    """Bytes per second that a node writes to run.root."""


def _sheet(
    name: str,
    gib: float,
    tera: tuple[float, float],
    memory: float,
    link: float,
    gbps: float,
    **more: Any,
) -> Device:
    """Return a device from its data sheet. tera: TFLOP/s in bfloat16 and float32; memory, link:
    GB/s; gbps: Gbit/s of the network, as reference designs have it."""
    flops, flops_float32 = tera
    is_pcie_5 = name.startswith(("H", "GH", "B", "RTX 50", "MI300"))
    return Device(
        name,
        gib,
        flops * 1e12,
        flops_float32 * 1e12,
        memory * 1e9,
        link * 1e9,
        host_link=64e9 if is_pcie_5 else 32e9,
        network=gbps / 8 * 1e9,
        **more,
    )


# NVIDIA's and AMD's data sheets of each; memory as torch's out-of-memory messages have it.
# MegaScale reports 55% of the peak on Ampere (arXiv 2402.15627), Megatron-Core 47-48% on Hopper:
# hence A100's and A800's reach.
DEVICES = {
    "h100": _sheet("H100", 79.1, (989, 67), 3350, 450, 400),
    "h100_pcie": _sheet("H100 PCIe", 79.1, (756, 51), 2000, 64, 100),
    "h100_nvl": _sheet("H100 NVL", 93.1, (835, 60), 3900, 64, 100),
    "gh200": _sheet("GH200", 94.5, (989, 67), 4000, 450, 400, per_node=1),
    "h200": _sheet("H200", 139.8, (989, 67), 4800, 450, 400),
    "b200": _sheet("B200", 178.3, (2250, 80), 7700, 900, 400),
    "b100": _sheet("B100", 178.3, (1750, 60), 8000, 900, 400),
    "a100": _sheet("A100", 79.1, (312, 19.5), 2039, 300, 200, reach=1.15),
    "a100_40gb": _sheet("A100-SXM4-40GB", 39.4, (312, 19.5), 1555, 300, 200, reach=1.15),
    "a800": _sheet("A800", 79.1, (312, 19.5), 2039, 200, 200, reach=1.15),
    "l40s": _sheet("L40S", 44.4, (362, 91.6), 864, 32, 100),
    "l4": _sheet("L4", 22.0, (121, 30.3), 300, 32, 100),
    "rtx4090": _sheet("RTX 4090", 23.5, (165, 82.6), 1008, 32, 100),
    "rtx5090": _sheet("RTX 5090", 31.4, (209, 104.8), 1792, 64, 100),
    "mi300x": _sheet("MI300X", 191.9, (1307, 163.4), 5300, 448, 400),
}  # fmt: skip


def device(name: str) -> Device:
    """Return the device that `plan.gpu` names. Raises UserError with the names there are."""
    spelled = name.lower().replace("-", "_").replace(" ", "_")
    if spelled not in DEVICES:
        close = nearest(spelled, DEVICES)
        meant = f" Did you mean  plan.gpu={close} ?" if close else ""
        reason = (
            f"is not in the table.{meant}\nThere are: {' '.join(DEVICES)}\n"
            "Any other, as far as it fits:  plan.memory_gib=48"
        )
        raise UserError("there is no such GPU", [Problem(f"plan.gpu={name}", reason)])
    return DEVICES[spelled]


def nothing_to_plan_for() -> UserError:
    """Return the error for a plan that names no device, on a machine without one."""
    reason = (
        f"this machine has no GPU: name one. There are: {' '.join(DEVICES)}.\n"
        "Any other:  plan.memory_gib=48 ; this machine's memory:  launch.device=cpu"
    )
    return UserError("there is no device to plan for", [Problem("plan.gpu=null", reason)])


def named_by_driver(name: str) -> Device | None:
    """Return the device that a driver calls `name`, such as `NVIDIA H100 80GB HBM3`.

    The longest name that fits counts. None where it is not known.
    """
    fitting = [device for device in DEVICES.values() if device.name in name]
    return max(fitting, key=lambda device: len(device.name), default=None)


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device that a driver calls `name`; None where it is not known,
    rather than a guess."""
    known = named_by_driver(name)
    return known.flops if known else None


def has_gpus(cfg: Launch) -> bool:
    """Return whether ranks may compute on GPUs of this node."""
    return cfg.device != "cpu" and bool(glob("/dev/nvidia[0-9]*") + glob("/dev/kfd"))


def gpus(cfg: Launch) -> int:
    """Return how many GPUs of this node ranks may compute on."""
    if not has_gpus(cfg):
        return 0
    import torch  # only where there may be a GPU to count

    return torch.cuda.device_count()
