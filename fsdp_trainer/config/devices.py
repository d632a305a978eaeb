"""The table of GPUs: memory, arithmetic, links. Imports only light modules."""

import re
from glob import glob
from typing import Any, NamedTuple

from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.schema import Launch
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
    name: str,
    gib: float,
    tera: tuple[float, float],
    memory: float,
    link: float,
    gbps: float,
    **more: Any,
) -> Device:
    """Return a device from the figures of its data sheet.

    gib: memory in GiB. tera: TFLOP/s in bfloat16 and float32. memory, link: GB/s. gbps: Gbit/s of
    the network for each GPU, as in reference designs.
    """
    flops, flops_float32 = tera
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


AMPERE: dict[str, Any] = {"reach": 1.25, "attention": 0.55}
"""Published A100 training runs reach 1.25 to 1.56 times an H100's share of the peak (IBM and
llm-foundry published both). FlashAttention 2 reaches 187 of 312 TFLOP/s, and 335 of 989 on Hopper
(its paper), in long rows and without other work."""
CONSUMER: dict[str, Any] = {"reach": 1.6, "attention": 0.65, "host_gib": 48}
"""GeForce cards sum in float32 at half the rate that their tensor cores could, and this half is
their peak here: products come close to it (torchtune's runs on an RTX 4090)."""
SERVER: dict[str, Any] = {"reach": 1.2, "attention": 0.45}
"""Server cards of 300 to 350 W, which cannot keep their clock in large products. Assumed."""
BLACKWELL: dict[str, Any] = {
    "reach": 1.1,
    "attention": 0.13,
    "float8": 0.5,
    "remark": "published speeds of B200 differ by 2.3 times among themselves, "
    "so this range is less certain than others",
}
"""FlashAttention 2 is no faster than on Hopper, although the peak is 2.3 times as high. Float8 is
reported to save less time than on Hopper: 1.22 to 1.28 times for Llama 70B (PyTorch and Crusoe
2025), which it makes 1.5 times as fast on H100 (IBM 2024)."""
GRACE_BLACKWELL = BLACKWELL | {"per_node": 4, "linked": 64, "host_gib": 224}
"""NVLink connects the 18 nodes of a rack."""
MI300: dict[str, Any] = {
    "reach": 0.55,
    "attention": 0.2,
    "float8": 0.5,
    "remark": "one source has speeds of MI300X, all of 8,192 tokens a micro-batch",
}
VOLTA: dict[str, Any] = {"remark": "V100 has no bfloat16 products: its float32 rate is used"}

# From NVIDIA's and AMD's data sheets; memory as torch's out-of-memory messages report it.
DEVICES = {
    "h100": _sheet("H100", 79.1, (989, 67), 3350, 450, 400),
    "h100_pcie": _sheet("H100 PCIe", 79.1, (756, 51), 2000, 64, 100),
    "h100_nvl": _sheet("H100 NVL", 93.1, (835, 60), 3900, 64, 100),
    "h800": _sheet("H800", 79.1, (989, 67), 3350, 200, 400),
    "h20": _sheet("H20", 95.0, (148, 44), 4000, 450, 400, **AMPERE),
    "gh200": _sheet("GH200", 94.5, (989, 67), 4000, 450, 400, per_node=1, host_gib=448),
    "h200": _sheet("H200", 139.8, (989, 67), 4800, 450, 400),
    "b200": _sheet("B200", 178.3, (2250, 80), 7700, 900, 400, **BLACKWELL),
    "b100": _sheet("B100", 178.3, (1750, 60), 8000, 900, 400, **BLACKWELL),
    "gb200": _sheet("GB200", 184.3, (2500, 80), 8000, 900, 400, **GRACE_BLACKWELL),
    "b300": _sheet("B300", 267.6, (2250, 76), 8000, 900, 800, **BLACKWELL),
    "a100": _sheet("A100", 79.1, (312, 19.5), 2039, 300, 200, **AMPERE),
    "a100_40gb": _sheet("A100-SXM4-40GB", 39.4, (312, 19.5), 1555, 300, 200, **AMPERE),
    "a800": _sheet("A800", 79.1, (312, 19.5), 2039, 200, 200, **AMPERE),
    "a40": _sheet("A40", 44.4, (150, 37.4), 696, 32, 100, **SERVER),
    "a10g": _sheet("A10G", 22.0, (70, 31.2), 600, 32, 25, **SERVER),
    "a6000": _sheet("RTX A6000", 47.5, (155, 38.7), 768, 32, 100, **SERVER),
    "l40s": _sheet("L40S", 44.4, (362, 91.6), 864, 32, 100, **SERVER),
    "l4": _sheet("L4", 22.0, (121, 30.3), 300, 32, 100, **SERVER),
    "rtx_6000_ada": _sheet("RTX 6000 Ada", 47.4, (364, 91.1), 960, 32, 100, **SERVER),
    "rtx_pro_6000": _sheet("RTX PRO 6000", 95.0, (504, 125), 1792, 64, 100, **SERVER),
    "rtx3090": _sheet("RTX 3090", 23.6, (71, 35.6), 936, 32, 100, **CONSUMER),
    "rtx4090": _sheet("RTX 4090", 23.5, (165, 82.6), 1008, 32, 100, **CONSUMER),
    "rtx5090": _sheet("RTX 5090", 31.4, (209, 104.8), 1792, 64, 100, **CONSUMER),
    "v100": _sheet("V100", 31.7, (15.7, 15.7), 900, 150, 100, **VOLTA),
    "v100_16gb": _sheet("V100-SXM2-16GB", 15.8, (15.7, 15.7), 900, 150, 100, **VOLTA),
    "mi300x": _sheet("MI300X", 191.9, (1307, 163.4), 5300, 448, 400, **MI300),
    "mi325x": _sheet("MI325X", 255.9, (1307, 163.4), 6000, 448, 400, **MI300),
}  # fmt: skip


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
