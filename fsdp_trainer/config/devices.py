"""The table of GPUs: memory, arithmetic, links. Imports only light modules."""

import re
from collections.abc import Mapping
from glob import glob
from typing import Any, NamedTuple

from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.errors import Problem, UserError


class Device(NamedTuple):
    """A GPU, with the links and network of the server it is usually sold in.

    Rates count one direction.
    """

    name: str
    """Part of the name that the driver reports. Where several match, the longest one counts."""
    memory_gib: float
    """Memory as torch reports it, which is less than the data sheet's GB."""
    flops: float | None = None
    """Dense bfloat16 FLOP/s; None: not known, and then `plan` reports no times."""
    flops_float32: float = 0.0
    """Peak float32 FLOP/s without tensor cores (TF32 is off)."""
    memory_rate: float = 0.0
    """Bytes per second of the device's memory."""
    link: float = 0.0
    """Bytes per second to the other GPUs of a node: NVLink, Infinity Fabric, or PCIe."""
    host_link: float = 32e9
    """Bytes per second to the host."""
    host_gib: float = 128
    """Host memory in GiB for each GPU that many servers do not exceed."""
    per_node: int = 8
    network: float = 50e9
    """Bytes per second between nodes, for each GPU."""
    reach: float = 1.0
    """Share of its peak that matrix products reach in training, relative to Hopper."""
    attention: float = 0.29
    """Share of its peak that FlashAttention 2 reaches, counted as causal."""
    float8: float = 1.0
    """Speed-up of products by float8, relative to Hopper."""
    linked: int | None = None
    """GPUs that `link` connects; None: those of a node."""
    efficiency: float | None = None
    """Share of the peak that is reached, if the user gave one."""
    disk: float = 2e9
    """Bytes per second that a node can write to run.root."""
    offload_disk: float = 2e9
    """Bytes per second that a node reads and writes of states in files, both counted."""
    remark: str = ""
    """The reason why times of this device are less certain than those of others."""

    @property
    def linked_gpus(self) -> int:
        """Number of GPUs that `link` connects."""
        return self.linked or self.per_node


def _sheet(
    name: str, gib: float, flops: float, flops_float32: float, memory: float, link: float,
    gbps: float, more: Mapping[str, Any] = {},
) -> Device:  # fmt: skip
    """Return a device from a line of devices.yaml, whose head says what the figures are."""
    is_pcie_5 = name.startswith(("H", "GH", "B", "GB", "RTX 50", "RTX PRO", "MI3"))
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


SHEETS = table_beside(__file__)
DEVICES = {key: _sheet(*sheet) for key, sheet in SHEETS["devices"].items()}


def device(name: str) -> Device:
    """Return the device for a value of `plan.gpu`: a key of the table, part of one, or longer.

    Examples: 3090 and H100-SXM5-80GB. Raises UserError with the known names.
    """
    typed = _parts(name)
    contained = [key for key in DEVICES if _parts(key) <= typed]
    completed = [key for key in DEVICES if typed < _parts(key)]
    # e.g. 3090 for rtx3090, a100-40 for a100_40gb
    abbreviated = [key for key in completed if _parts(key) - typed <= {"rtx", "x", "gb"}]
    matching = abbreviated if len(abbreviated) == 1 else contained
    if matching:  # the longest: a100_40gb rather than a100 for A100-SXM4-40GB
        return DEVICES[max(matching, key=lambda key: len(_parts(key)))]
    close = completed or [key for key in [nearest(name.lower(), DEVICES)] if key]
    meant = f" Did you mean  plan.gpu={' or '.join(close)} ?" if close else ""
    reason = (
        f"is not in the table.{meant}\nThere are: {' '.join(DEVICES)}\n"
        "Any other, with its memory and dense bfloat16 TFLOP/s:  "
        "plan.memory_gib=48 plan.tflops=150"
    )
    raise UserError("there is no such GPU", f"plan.gpu={name}", reason)


def gpu_names(named: str | list[str] | None) -> list[str]:
    """Return the names in `plan.gpu`: one name, a list, or one string with commas."""
    words = [named] if isinstance(named, str) else named or []
    names = (name.strip() for word in words for name in word.split(","))
    return list(dict.fromkeys(names))


def unknown_gpus(named: str | list[str] | None) -> list[Problem]:
    if named == []:
        return [Problem("plan.gpu=[]", "name at least one, e.g.  plan.gpu=[h100,a100_40gb]")]
    problems = []
    for name in gpu_names(named):
        try:
            device(name)
        except UserError as error:
            problems += error.problems
    return problems


def _parts(name: str) -> set[str]:
    """Return the words and numbers in a name: {h, 100, sxm, 5, 80, gb} for H100-SXM5-80GB."""
    return set(re.findall(r"[a-z]+|[0-9]+", name.lower()))


def with_flops(device: Device, flops: float) -> Device:
    """Return `device` with this number of dense bfloat16 FLOP/s.

    If its other rates are not known, they are set to those of a PCIe server: one byte of memory
    bandwidth for 300 FLOPs, as on Hopper, 32 GB/s between GPUs, and 100 Gbit/s between nodes for
    each GPU.
    """
    if device.memory_rate:
        return device._replace(flops=flops)
    return device._replace(
        flops=flops,
        flops_float32=flops / 8,
        memory_rate=flops / 300,
        link=32e9,
        network=12.5e9,
        remark="of this GPU only TFLOP/s are known: its memory bandwidth is assumed to be "
        f"{flops / 300 / 1e9:,.0f} GB/s, its links 32 GB/s, its network 100 Gbit/s",
    )


def nothing_to_plan_for() -> UserError:
    reason = (
        f"this machine has no GPU: name one. There are: {' '.join(DEVICES)}.\n"
        "Any other:  plan.memory_gib=48 plan.tflops=150 ; "
        "this machine's memory:  launch.device=cpu"
    )
    return UserError("there is no device to plan for", "plan.gpu=null", reason)


def named_by_driver(name: str) -> Device | None:
    """Return the device for a driver's name such as `NVIDIA H100 80GB HBM3`.

    The device with the longest matching name counts. None if none matches.
    """
    fitting = [
        device
        for device in DEVICES.values()
        if re.search(rf"(?<![A-Za-z0-9]){device.name}(?![A-Za-z0-9])", name)
    ]
    return max(fitting, key=lambda device: len(device.name), default=None)


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the device with this driver's name; None if unknown."""
    known = named_by_driver(name)
    return known.flops if known else None


def has_gpus(cfg: Launch) -> bool:
    """Return whether this node has GPUs that ranks may use."""
    return cfg.device != "cpu" and bool(glob("/dev/nvidia[0-9]*") + glob("/dev/kfd"))


def gpus(cfg: Launch) -> int:
    """Return the number of GPUs of this node that ranks may use."""
    if not has_gpus(cfg):
        return 0
    import torch  # slow to import: only if there may be a GPU to count

    return torch.cuda.device_count()
