"""Peak memory and time of several output heads with cross-entropy, forward and backward.

    python -m benchmarks.loss_memory [--repeat 3] [--check]

`ours`: the head of this repository. `whole`: all logits at once, with the loss in float32 as in
transformers. `checkpoint`: as many tokens at a time as ours, with each chunk's logits recomputed in
backward by torch.utils.checkpoint. `linear_cross_entropy`: that of torch.nn.functional, if there is
one (torch 2.13). On a GPU also `compiled`, ours as `compile=enabled` has it, and where they are
installed `liger` and `cut_cross_entropy`; `predicted` is what ours should take on an H100, and
PUBLISHED what others took there. First every way's loss and gradients are compared with float64. Each way is
measured in a process of its own: on a CPU the growth of peak resident memory after the inputs were
made, on a GPU the same by torch's counters. The gradients of hidden states and weight are part of
every peak: `least_mib` is their size alone.
"""

import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import harness
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head
from fsdp_trainer.training.objective import CrossEntropy

MIB = 2**20
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


def ours(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss by our head, whose loss is a sum, here with weights of 1 / tokens."""
    return head(
        hidden,
        targets,
        CrossEntropy(torch.full(targets.shape, 1 / len(targets), device=targets.device)),
    )[0]


def whole(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.weight).float(), targets)


def checkpointed(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    rows = head.rows_at_once(len(targets), hidden.device.type)

    def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, head.weight).float(), targets, reduction="sum")

    parts = [
        checkpoint(of_chunk, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.stack(parts).sum() / len(targets)  # type: ignore[arg-type]


def linear_cross_entropy(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(
        hidden, head.weight, targets, options=torch.nn.LinearCrossEntropyOptions()
    )  # type: ignore[attr-defined]


def compiled(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    if not head.is_compiled:
        head.compile_chunks()
    return ours(head, hidden, targets)


def liger(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, head.weight, targets)


def cut_cross_entropy(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    return cut(hidden, head.weight, targets)


WAYS: dict[str, Callable[[Head, Tensor, Tensor], Tensor]] = {
    "ours": ours,
    "whole": whole,
    "checkpoint": checkpointed,
}
if hasattr(F, "linear_cross_entropy"):
    WAYS["linear_cross_entropy"] = linear_cross_entropy
EXACT = ("ours", "whole", "checkpoint")
ALL = tuple(WAYS)
ON_GPU = {"compiled": compiled, "liger": liger, "cut_cross_entropy": cut_cross_entropy}
PACKAGES = {"liger": "liger-kernel", "cut_cross_entropy": "cut-cross-entropy"}
PUBLISHED = {"whole": 0.137, "liger": 0.321, "cut_cross_entropy": 0.0926}
"""Seconds on one H100 with 248,320 tokens in the vocabulary (huggingface/trl#6858)."""
# A case: dtype, vocabulary, tokens, ways, True to measure it in all rounds, width.
# Cases with fewer tokens show how memory grows with the number of tokens.
CPU = [
    ("float32", 32_000, 1024, EXACT, True, 256),
    ("float32", 128_256, 1024, EXACT, True, 256),
    ("bfloat16", 32_000, 1024, EXACT, True, 256),
    ("float32", 32_000, 512, ALL, False, 256),  # torch's own would take too long with more
    ("float32", 128_256, 512, ("ours", "whole"), False, 256),
]


def gpu_cases() -> list[tuple[str, int, int, tuple[str, ...], bool, int]]:
    """Return the cases of a GPU, and add its ways; print how to install those that are missing."""
    WAYS.update(ON_GPU)
    for way, package in PACKAGES.items():
        try:
            errors(way, "bfloat16", "cuda")
        except Exception as error:
            del WAYS[way]
            print(f"{way} is not measured ({error}). It is in:  pip install {package}", flush=True)
    published = ("ours", "whole", *(way for way in WAYS if way in ON_GPU))
    return [
        ("bfloat16", 248_320, 16384, published, True, 2048),
        ("bfloat16", 32_000, 16384, ALL, True, 4096),
        ("bfloat16", 128_256, 16384, ("compiled", *ALL), True, 4096),
        ("bfloat16", 32_000, 8192, ALL, False, 4096),
        ("bfloat16", 128_256, 8192, ("compiled", *ALL), False, 4096),
    ]


def predicted(vocabulary: int, tokens: int, width: int) -> dict[str, float]:
    """Return the seconds that our compiled head should take on an H100 in bfloat16, by part.

    Three products at 690 TFLOP/s; 8 bytes a logit and 4 + 8 · (chunks - 1) + 6 bytes a number of
    the weight's gradient, at 3.0 TB/s. On an H200, 4.2 TB/s.
    """
    head = Head(ModelConfig(vocab_size=8, hidden_size=8))
    chunks = -(-tokens // head.rows_at_once(tokens, "cuda", 2))
    parts = {
        "products": 6 * tokens * width * vocabulary / 690e12,
        "logits": 8 * tokens * vocabulary / 3e12,
        "weight's gradient": (2 + 8 * chunks) * width * vocabulary / 3e12,
    }
    parts["all"] = sum(parts.values())
    return {name: round(value, 4) for name, value in parts.items()}


def inputs(
    vocabulary: int, tokens: int, width: int, dtype: str, device: str
) -> tuple[Head, Tensor, Tensor]:
    """Return a head, hidden states and targets, the same on every call."""
    draw = torch.Generator().manual_seed(0)
    head = Head(ModelConfig(vocab_size=vocabulary, hidden_size=width))
    head.weight = torch.nn.Parameter(
        torch.randn(vocabulary, width, generator=draw).to(device, getattr(torch, dtype)).mul_(0.05)
    )
    hidden = torch.randn(tokens, width, generator=draw).to(device, getattr(torch, dtype))
    return (
        head,
        hidden.requires_grad_(),
        torch.randint(vocabulary, (tokens,), generator=draw).to(device),
    )


def forget_peak(device: str) -> None:
    """Reset the peak to the memory in use now.

    On a CPU, Linux resets it, after the allocator has returned its free memory to the system.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    """Return the peak in bytes since `forget_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def measure(way: str, *shape: Any) -> dict[str, float]:
    """Return memory and seconds of a forward and backward, from three in this process.

    mib: the largest growth over the memory in use before. seconds: the fastest of the last two.
    """
    device = shape[-1]
    WAYS.update(ON_GPU)  # this may be a process for one way
    inputs(64, 128, shape[2], *shape[3:])  # a small case first, for what is allocated only once
    WAYS[way](*inputs(64, 128, *shape[2:])).backward()
    head, hidden, targets = inputs(*shape)
    seconds, added = [], []
    for _ in range(3):
        hidden.grad = head.weight.grad = None
        forget_peak(device)
        before = peak(device)
        started = time.perf_counter()
        WAYS[way](head, hidden, targets).backward()
        harness.wait_for_device()
        seconds.append(time.perf_counter() - started)
        added.append(peak(device) - before)
    return {"mib": max(added) / MIB, "seconds": min(seconds[1:])}


def in_a_process(way: str, *shape: Any) -> dict[str, float]:
    """Return the result of `measure` in a new process.

    In the same process, memory that another way has freed would hide the peak.
    """
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--one", json.dumps([way, *shape])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} {shape} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def errors(way: str, dtype: str, device: str) -> dict[str, float]:
    """Return the errors compared with float64 on a small case.

    The loss's error is absolute, those of the gradients are relative.
    """
    head, hidden, targets = inputs(4096, 256, 64, dtype, device)
    head.chunk_mib = 1
    loss = WAYS[way](head, hidden, targets)
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, head.weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, targets)
    wanted.backward()
    results = {"loss": abs(loss.item() - wanted.item())}
    for name, ours, theirs in (
        ("grad_hidden", hidden.grad, exact[0].grad),
        ("grad_weight", head.weight.grad, exact[1].grad),
    ):
        assert ours is not None
        assert theirs is not None
        results[name] = ((ours.double() - theirs).norm() / theirs.norm()).item()
    return {name: float(f"{value:.2g}") for name, value in results.items()}


def main() -> None:
    """Check, measure, print and store the result."""
    options = harness.arguments(__doc__, repeat=3, one="")
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = gpu_cases() if device == "cuda" else CPU
    checked = {
        dtype: {
            way: errors(way, dtype, device)
            for way in WAYS
            if dtype == "bfloat16" or way not in PACKAGES
        }
        for dtype in TOLERANCE
    }
    for dtype, way in product(TOLERANCE, EXACT):
        assert max(checked[dtype][way].values()) < TOLERANCE[dtype], (
            f"{way} in {dtype}: {checked[dtype][way]}"
        )
    measured, compared, peaks = {}, {}, {}
    for dtype, vocabulary, tokens, ways, often, width in cases:
        shape = (vocabulary, tokens, width, dtype, device)
        runs = harness.in_turn(
            {way: partial(in_a_process, way, *shape) for way in ways},
            options.repeat if often else 1,
        )
        case: dict[str, Any] = {
            "hidden": width,
            "least_mib": round(
                (vocabulary + tokens) * width * getattr(torch, dtype).itemsize / MIB, 1
            ),
        }
        for way, results in runs.items():
            case[way] = {
                figure: harness.spread([run[figure] for run in results])
                for figure in ("mib", "seconds")
            }
            peaks[dtype, vocabulary, way, often] = case[way]["mib"]["median"]
            for figure in ("mib", "seconds") if way != "ours" else ():
                case[way][f"{figure} / ours"] = harness.ratio(
                    [r[figure] for r in results], [r[figure] for r in runs["ours"]]
                )
        if device == "cuda":
            case["predicted"] = predicted(vocabulary, tokens, width)
            case |= {"published": PUBLISHED} if vocabulary == 248_320 else {}
        name = f"{dtype}, vocabulary {vocabulary:,}, {tokens:,} tokens"
        measured[name] = case
        if often:
            compared |= {
                f"{name}: {figure} whole / ours": case["whole"][f"{figure} / ours"]
                for figure in ("mib", "seconds")
            }
    twice = {
        f"{dtype}, vocabulary {vocabulary:,}, {way}": round(
            peaks[dtype, vocabulary, way, True] / mib, 2
        )
        for (dtype, vocabulary, way, often), mib in peaks.items()
        if not often and (dtype, vocabulary, way, True) in peaks
    }
    result = {
        "errors": checked,
        "repeat": options.repeat,
        "measured": measured,
        "mib_of_twice_the_tokens": twice,
    }
    harness.finish("loss_memory", result, compared, options.check)


if __name__ == "__main__":
    main()
