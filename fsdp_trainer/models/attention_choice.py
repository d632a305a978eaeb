"""The choice of the layout and kernel that compute attention, with its reason.

Does not import torch, since the check of the configuration uses the same rules.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_trainer.errors import Problem, UserError

AMPERE = (8, 0)
HOPPER = (9, 0)
BLACKWELL = (10, 0)
FLASH = {"fa3": "FlashAttention 3", "fa4": "FlashAttention 4"}
CUDNN_HEAD_DIM = 128
"""Largest head_dim that each cuDNN has gradients for."""
SDPA_ONLY = ("cudnn", "efficient", "math")
NAMES = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "efficient": "memory-efficient attention",
    "math": "unfused attention",
    **FLASH,
}
MADE_FOR = {"fa3": (HOPPER,), "fa4": (HOPPER, BLACKWELL)}
BEST = {HOPPER: "fa3", BLACKWELL: "fa4"}


@dataclass(frozen=True)
class AttentionContext:
    """Properties of machine, model and data that the choice depends on; None: not known yet.

    device: cpu or cuda; capability: compute capability of the GPU; dtype: number format of
    queries, keys and values. deterministic: kernels must give the same bits every time. ring:
    results of several calls are merged by their logsumexps (see parallel/ring.py).
    installed: those of fa3 and fa4 that can be imported.
    """

    device: str | None = None
    capability: tuple[int, int] | None = None
    dtype: str | None = None
    head_dim: int | None = None
    softcap: bool = False
    sinks: bool = False
    compiled: bool = False
    selective: bool = False
    deterministic: bool = False
    ring: bool = False
    installed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen layout and kernel.

    layout: key of `attention.LAYOUTS`. kernel: key of NAMES, the kernel to try first; None if
    there is only one kernel.
    """

    layout: str
    kernel: str | None
    reason: str

    def __str__(self) -> str:
        kernel = f" with {NAMES[self.kernel]}" if self.kernel else ""
        if (self.layout, self.kernel) == ("varlen", "cudnn"):
            kernel = f" with {NAMES['flash']}, rows of one document{kernel}"
        return f"by {self.layout}{kernel}: {self.reason}"


Rule = tuple[Callable[[AttentionContext, str, str], bool], str]
"""A test that is true if (context, layout, kernel) is impossible, and the message for it, with
what to type instead. The message is a format string with the fields `c` (the context), and `name`
and `made_for` of the kernel."""

LAYOUT_RULES: dict[str, tuple[Rule, ...]] = {
    "documents": (
        (
            lambda c, *_: c.compiled,
            "changes shapes every step, and compiled blocks need fixed ones.\n"
            "Use  model.attention=auto",
        ),
    ),
    "mask": (),
    "varlen": (
        (
            lambda c, *_: c.device == "cpu",
            "has kernels for GPUs only.\nUse  model.attention=auto",
        ),
        (
            lambda c, *_: c.dtype == "float32",
            "has kernels for 16-bit numbers only.\n"
            "Use  precision.param_dtype=bfloat16  or  model.attention=auto",
        ),
        (lambda c, *_: c.softcap, "has no soft limit on scores.\nUse  model.attention=flex"),
        (lambda c, *_: c.sinks, "has no attention sinks.\nUse  model.attention=flex"),
        (
            lambda c, *_: (c.capability or AMPERE) < AMPERE,
            "needs compute capability 8.0, this GPU has {c.capability[0]}.{c.capability[1]}.\n"
            "Use  model.attention=documents",
        ),
        (
            lambda c, *_: (c.head_dim or 8) not in range(8, 257, 8),
            "has no kernel for head_dim={c.head_dim}: a multiple of 8 up to 256.\n"
            "Use  model.attention=documents",
        ),
    ),
    "flex": (
        (
            lambda c, *_: c.device == "cpu",
            "has no gradient on a CPU.\nUse  model.attention=auto",
        ),
        (
            lambda c, *_: c.selective and not c.compiled,
            "is not compiled where selective checkpointing watches every operator.\n"
            "Use  compile=enabled  or  activation_checkpoint=full  or  model.attention=documents",
        ),
        (
            lambda c, *_: (c.head_dim or 16) < 16,
            "has no kernel for head_dim={c.head_dim}, 16 at least.\nUse  model.attention=documents",
        ),
    ),
}
AUTO_KERNEL = "\nUse  model.attention_kernel=auto"
KERNEL_RULES: tuple[Rule, ...] = (
    (lambda c, *_: c.device == "cpu", f"a CPU has one kernel only.{AUTO_KERNEL}"),
    (lambda c, *_: c.softcap, f"has no soft limit on scores.{AUTO_KERNEL}"),
    (
        lambda c, _, kernel: c.sinks and kernel != "efficient",
        f"has no attention sinks.{AUTO_KERNEL}",
    ),
    (
        lambda c, layout, _: layout == "flex",
        f"flex compiles a kernel of its own.{AUTO_KERNEL}",
    ),
    (
        lambda c, layout, kernel: layout == "varlen" and kernel in ("efficient", "math"),
        "varlen is FlashAttention (flash, fa3 or fa4), and cudnn for rows of one document.\n"
        "Use  model.attention=documents",
    ),
    (
        lambda c, layout, kernel: layout == "mask" and kernel not in SDPA_ONLY and not c.ring,
        "FlashAttention takes no mask.\nUse  model.attention=varlen",
    ),
    (
        lambda c, _, kernel: kernel in FLASH and c.dtype == "float32",
        "has kernels for 16-bit numbers only.\nUse  precision.param_dtype=bfloat16",
    ),
    (
        lambda c, _, kernel: c.capability not in (None, *MADE_FOR.get(kernel, (c.capability,))),
        "{name} is made for compute capability {made_for}, this GPU has "
        f"{{c.capability[0]}}.{{c.capability[1]}}.{AUTO_KERNEL}",
    ),
    (
        lambda c, _, kernel: kernel in FLASH and bool(c.capability) and kernel not in c.installed,
        f"{{name}} is not installed, or this torch cannot use it.{AUTO_KERNEL}",
    ),
)


def choose(layout: str, kernel: str, context: AttentionContext) -> AttentionChoice:
    """Choose layout and kernel for `model.attention` and `model.attention_kernel`.

    Raises UserError if they cannot be computed here.
    """
    chosen, reason = _best_layout(kernel, context) if layout == "auto" else (layout, "as requested")
    if problems := attention_problems(chosen, kernel, context):
        raise UserError("attention cannot be computed like this", problems)
    if kernel == "auto":
        first = _ring_kernel(context) if context.ring else _first_kernel(chosen, context)
        return AttentionChoice(chosen, first, reason)
    return AttentionChoice(chosen, kernel, reason)


def attention_problems(layout: str, kernel: str, context: AttentionContext) -> list[Problem]:
    problems = []
    if reason := _first_broken(LAYOUT_RULES.get(layout, ()), context, layout, kernel):
        problems.append(Problem(f"model.attention={layout}", reason))
    kernel_rules = KERNEL_RULES if kernel != "auto" else ()
    if reason := _first_broken(kernel_rules, context, layout, kernel):
        problems.append(Problem(f"model.attention_kernel={kernel}", reason))
    return problems


def _first_broken(
    rules: tuple[Rule, ...], context: AttentionContext, layout: str, kernel: str = "auto"
) -> str | None:
    made_for = " or ".join(f"{major}.{minor}" for major, minor in MADE_FOR.get(kernel, ()))
    for is_broken, message in rules:
        if is_broken(context, layout, kernel):
            return message.format(c=context, name=NAMES.get(kernel), made_for=made_for)
    return None


def _best_layout(kernel: str, context: AttentionContext) -> tuple[str, str]:
    fallback = "mask" if context.compiled else "documents"
    if context.device != "cuda":
        reasons = {"mask": "compiled blocks need fixed shapes", "documents": "cost by Σ length²"}
        return fallback, reasons[fallback]
    if context.softcap or context.sinks:
        special = "the soft limit on scores" if context.softcap else "attention sinks"
        if _first_broken(LAYOUT_RULES["flex"], context, "flex"):
            return fallback, f"flex cannot be, and others have no kernel for {special}"
        return "flex", f"a kernel is compiled for {special}"
    if reason := _first_broken(LAYOUT_RULES["varlen"], context, "varlen"):
        return fallback, f"varlen {reason.splitlines()[0]}"
    if kernel in SDPA_ONLY and (kernel, fallback) != ("cudnn", "mask"):
        return fallback, f"{kernel} is requested"
    return "varlen", "cost by Σ length²"


def _first_kernel(layout: str, context: AttentionContext) -> str | None:
    if context.device != "cuda" or layout == "flex" or context.softcap or context.sinks:
        return None
    if layout == "mask":
        return "efficient"  # FlashAttention takes no mask; cuDNN: see attention_kernels
    best = BEST.get(context.capability or AMPERE)
    if layout == "varlen" and best in context.installed:
        return best
    return "cudnn" if context.capability == HOPPER and not context.deterministic else "flash"


def _ring_kernel(context: AttentionContext) -> str | None:
    plain = replace(context, sinks=False)
    broken = _first_broken(LAYOUT_RULES["varlen"], plain, "varlen")
    first = _first_kernel("mask" if broken else "varlen", plain)
    # a ring calls a kernel by its name: nothing else is tried if that refuses wide heads
    return "flash" if first == "cudnn" and (plain.head_dim or 0) > CUDNN_HEAD_DIM else first
