"""Cost of attention over packed documents by layout and kernel: it should grow with Σ length².

    python -m benchmarks.attention [--repeat 5] [--row 4096] [--check]

One row of 1, 4, 16 or 64 documents of equal length, forward and backward without compilation. It is
compared with one causal call over the complete row and, on a CPU, with one call per document cut
out of the row. With few documents the ideal ratio is their number. On a GPU every layout runs with
every kernel that supports it, with TFLOP/s of causal attention: 2 products forward and 5 backward,
each 2 · heads · head_dim · Σ length² / 2.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.harness import arguments, finish, in_turn, ratio, spread, wait_for_device
from fsdp_trainer.models.attention import LAYOUTS, MaskedAttention, OneDocument, PackedAttention
from fsdp_trainer.models.attention_choice import AttentionChoice
from fsdp_trainer.models.attention_kernels import describe_device, set_kernel_priority
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.sdpa import Scoring, sdpa

DOCUMENTS = (1, 4, 16, 64)
MAX_COMPARED = 16  # with more documents, time outside of the kernels dominates and varies
WINDOW_SHARE = 16  # the window is this part of the row
CONFIGS = {
    "cpu": ModelConfig(vocab_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "cuda": ModelConfig(vocab_size=8, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def gradients(attention: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output of attention and the gradients of its inputs."""
    out = attention()
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def seconds(first: AttentionChoice, run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one forward and backward. first: the choice whose kernel is used."""
    set_kernel_priority(first, CONFIGS[device.type], DTYPES[device.type], device, required=False)
    wait_for_device()
    begin = time.perf_counter()
    run()
    wait_for_device()
    return time.perf_counter() - begin


def cut_out(q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Tensor:
    """Return attention by one call per document, each cut out of the row."""
    places = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    return torch.cat([sdpa(q[:, at], k[:, at], v[:, at], None) for at in places], 1)


def ways_of(device: torch.device, softcap: float | None) -> list[tuple[str, str | None]]:
    """Return the pairs (layout, kernel) that run on this device."""
    if device.type == "cpu":
        return [("documents", None), ("mask", None)]
    if softcap:
        return [("documents", None), ("flex", None)]
    installed = sorted(describe_device(device).installed)
    return [
        *product(["documents"], ["cudnn", "flash", "efficient"]),
        ("mask", "efficient"),
        *product(["varlen"], ["flash", "cudnn", *installed]),
        ("flex", None),
    ]


def measure(
    row: int,
    parts: int,
    window: int | None,
    softcap: float | None,
    device: torch.device,
    repeat: int,
) -> dict:
    """Check each way's output against MaskedAttention; return milliseconds, TFLOP/s and ratios.

    parts: number of documents in the row. window: tokens that a token sees, or None.
    """
    config, dtype = CONFIGS[device.type], DTYPES[device.type]
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [
        torch.randn(1, row, n, config.head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in heads
    ]
    grad, sizes = torch.randn_like(inputs[0]), [row // parts] * parts

    def way(layout: PackedAttention) -> Callable[[], list[Tensor]]:
        scoring = Scoring(softcap=softcap)
        return partial(gradients, lambda: layout.attend(*inputs, scoring), inputs, grad)

    layouts = {
        name: LAYOUTS[name]([sizes], row, device).with_window(window)
        for name in {layout for layout, _ in ways_of(device, softcap)}
    }
    ways = {
        "/".join(filter(None, pair)): (AttentionChoice(*pair, ""), way(layouts[pair[0]]))
        for pair in ways_of(device, softcap)
    }
    right = way(MaskedAttention([sizes], row, device).with_window(window))()
    if not window and not softcap:
        ways["whole row"] = (
            AttentionChoice("documents", None if device.type == "cpu" else "flash", ""),
            way(OneDocument(row)),
        )
        if device.type == "cpu":
            ways["cut out"] = (
                AttentionChoice("documents", None, ""),
                partial(gradients, lambda: cut_out(*inputs, sizes), inputs, grad),
            )
    for name, (first, run) in ways.items():
        set_kernel_priority(first, config, dtype, device, required=False)
        for mine, wanted in zip(run(), right, strict=True):
            assert (
                name == "whole row" or (mine - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
            ), f"{name} computes something else"
    measured = in_turn({name: partial(seconds, *way, device) for name, way in ways.items()}, repeat)
    pairs = sum(
        n * (n + 1) // 2 if window is None else sum(min(i + 1, window) for i in range(n))
        for n in sizes
    )
    flops = 7 * 2 * heads[0] * config.head_dim * pairs
    figures = {
        name: {
            "ms": spread([1e3 * s for s in times]),
            "tflops": float(f"{flops / min(times) / 1e12:.3g}"),
        }
        for name, times in measured.items()
    }
    against = "whole row" if "whole row" in measured else "mask" if "mask" in measured else "flex"
    ratios = {
        f"{against} / {name}": ratio(measured[against], times)
        for name, times in measured.items()
        if name != against
    }
    return {"ways": figures, "ratios": ratios}


def main() -> None:
    """Measure all cases; store the cost of the row or the mask relative to documents."""
    given = arguments(__doc__, repeat=5, row=4096)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = CONFIGS[device.type]
    row = given.row
    cases = {f"{parts} documents": (row, parts, None, None) for parts in DOCUMENTS}
    cases["1 document, window"] = (row, 1, row // WINDOW_SHARE, None)
    cases["1 document, softcap"] = (row // 2, 1, None, 50.0)
    results = {case: measure(*how, device, given.repeat) for case, how in cases.items()}
    shape = {
        "row": row,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    compared = {
        f"{case}: {name}": figures
        for case, result in results.items()
        for name, figures in result["ratios"].items()
        if "documents" in name and cases[case][1] <= MAX_COMPARED
    }
    finish("attention", {"shape": shape, "cases": results}, compared, given.check)


if __name__ == "__main__":
    main()
