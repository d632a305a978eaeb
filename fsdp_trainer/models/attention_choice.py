"""Which layout and kernel compute attention, and why. No torch: the configuration is checked with the same rules."""

from dataclasses import dataclass

from fsdp_trainer.errors import Problem, UserError

HOPPER, BLACKWELL = (9, 0), (10, 0)
FLASH = {"fa3": "FlashAttention 3", "fa4": "FlashAttention 4"}
NAMES = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "efficient": "memory-efficient attention",
    "math": "unfused attention",
    **FLASH,
}
MADE_FOR = {"fa3": (HOPPER,), "fa4": (HOPPER, BLACKWELL)}
BEST = {HOPPER: "fa3", BLACKWELL: "fa4"}
# cuDNN computes a whole row 1.7 to 2.3 times as fast as FlashAttention 2 on Hopper (published), which pays while documents
# need more than this share of it
CUDNN_PAYS = 0.6


@dataclass(frozen=True)
class Situation:
    """What the choice depends on; None: not known yet.

    device: cpu or cuda; capability: of the GPU; dtype: of queries, keys and values; share: Σ length² of the documents, of what whole rows
    would cost; installed: fa3, fa4, if they can be imported.
    """

    device: str | None = None
    capability: tuple[int, int] | None = None
    dtype: str | None = None
    head_dim: int | None = None
    softcap: bool = False
    windowed: bool = False
    compiled: bool = False
    selective: bool = False
    share: float = 1.0
    installed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """layout: a name of `attention.LAYOUTS`; kernel: cudnn, flash, efficient, math, fa3 or fa4, tried first; None: there is no choice."""

    layout: str
    kernel: str | None
    why: str

    def __str__(self) -> str:
        kernel = f" with {NAMES[self.kernel]}" if self.kernel else ""
        return f"by {self.layout}{kernel}: {self.why}"


def choose(layout: str, kernel: str, situation: Situation) -> Choice:
    """For `model.attention` and `model.attention_kernel`. Raises UserError for what cannot be."""
    picked, why = (layout, "as asked") if layout != "auto" else _fitting(kernel, situation)
    if problems := attention_problems(picked, kernel, situation):
        raise UserError("attention cannot be computed like this", problems)
    return Choice(picked, _first_kernel(picked, situation) if kernel == "auto" else kernel, why)


def attention_problems(layout: str, kernel: str, situation: Situation) -> list[Problem]:
    """What does not fit together, as far as it is known."""
    found = []
    if layout != "auto" and (why := _layout_fails(layout, situation)):
        found.append(Problem(f"model.attention={layout}", why))
    if kernel != "auto" and (why := _kernel_fails(kernel, layout, situation)):
        found.append(Problem(f"model.attention_kernel={kernel}", why))
    return found


def _fitting(kernel: str, s: Situation) -> tuple[str, str]:
    """The layout that fits, and why."""
    if s.device != "cuda":
        return (
            ("mask", "compiled blocks want fixed shapes")
            if s.compiled
            else ("documents", "cost by Σ length²")
        )
    if s.softcap:
        if not _layout_fails("flex", s):
            return "flex", "a kernel is compiled for the soft limit on scores"
        return (
            "mask" if s.compiled else "documents"
        ), "the soft limit on scores, computed in chunks"
    if why := _layout_fails("varlen", s):
        return ("mask" if s.compiled else "documents"), f"varlen {why.splitlines()[0]}"
    if kernel in ("cudnn", "efficient", "math"):
        return ("mask" if s.compiled else "documents"), f"{kernel} was asked for"
    cudnn = (
        s.capability == HOPPER
        and "fa3" not in s.installed
        and not s.compiled
        and not s.windowed
        and kernel == "auto"
    )
    if cudnn and s.share >= CUDNN_PAYS:
        return (
            "documents",
            f"nearly whole rows ({s.share:.0%} of their cost), which cuDNN is fastest at on Hopper",
        )
    return "varlen", f"cost by Σ length², {s.share:.0%} of whole rows'"


def _first_kernel(layout: str, s: Situation) -> str | None:
    if s.device != "cuda" or layout == "flex" or s.softcap:
        return None
    if layout == "varlen":
        best = BEST.get(s.capability or (0, 0), "")
        return best if best in s.installed else "flash"
    return "cudnn" if s.capability == HOPPER else "flash"


def _layout_fails(layout: str, s: Situation) -> str | None:
    """Why it cannot be, and what to type instead."""
    if layout == "documents" and s.compiled:
        return "has other shapes every step, and compiled blocks want fixed ones.\nUse  model.attention=auto"
    if layout in ("varlen", "flex") and s.device == "cpu":
        lacks = "has no gradient on a CPU" if layout == "flex" else "has kernels for GPUs only"
        return f"{lacks}.\nUse  model.attention=auto"
    if layout == "flex" and s.selective and not s.compiled:
        return (
            "is not compiled where selective checkpointing watches every operator.\n"
            "Use  compile=enabled  or  activation_checkpoint=full  or  model.attention=documents"
        )
    if layout == "flex" and s.head_dim is not None and s.head_dim < 16:
        return (
            f"has no kernel for head_dim={s.head_dim}, 16 at least.\nUse  model.attention=documents"
        )
    if layout == "varlen":
        return _varlen_fails(s)
    return None


def _varlen_fails(s: Situation) -> str | None:
    if s.dtype == "float32":
        return "has kernels for 16-bit numbers only.\nUse  precision.param_dtype=bfloat16  or  model.attention=auto"
    if s.softcap:
        return "has no soft limit on scores.\nUse  model.attention=flex"
    if s.capability is not None and s.capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {s.capability[0]}.{s.capability[1]}.\nUse  model.attention=documents"
    if s.head_dim is not None and (s.head_dim > 256 or s.head_dim % 8):
        return f"has no kernel for head_dim={s.head_dim}: a multiple of 8 up to 256.\nUse  model.attention=documents"
    return None


def _kernel_fails(kernel: str, layout: str, s: Situation) -> str | None:
    back = "\nUse  model.attention_kernel=auto"
    if s.device == "cpu":
        return f"a CPU has one kernel only.{back}"
    if s.softcap:
        return f"has no soft limit on scores.{back}"
    if layout == "flex":
        return f"flex compiles a kernel of its own.{back}"
    if layout == "varlen" and kernel in ("cudnn", "efficient", "math"):
        return "varlen is FlashAttention: flash, fa3 or fa4.\nUse  model.attention=documents"
    if layout == "mask" and kernel in ("flash", *FLASH):
        return "FlashAttention takes no mask.\nUse  model.attention=varlen"
    if kernel in FLASH and s.dtype == "float32":
        return "has kernels for 16-bit numbers only.\nUse  precision.param_dtype=bfloat16"
    if kernel in FLASH and s.capability is not None:
        if s.capability not in MADE_FOR[kernel]:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in MADE_FOR[kernel])
            return f"{FLASH[kernel]} is made for compute capability {wanted}, this GPU has {s.capability[0]}.{s.capability[1]}.{back}"
        if kernel not in s.installed:
            return f"{FLASH[kernel]} is not installed, or this torch cannot use it.{back}"
    return None
