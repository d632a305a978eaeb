"""Peak memory and time of output head + cross-entropy, forward and backward: ours, whole logits, chunks under checkpoint, and torch's own.

    python -m benchmarks.loss_memory [--repeat 3] [--check]

Of `ours`: the head of this repository. `whole`: all logits at once, the loss in float32 as transformers computes it. `checkpoint`: as many
tokens at a time as ours, each chunk's logits made again in backward by torch.utils.checkpoint. `linear_cross_entropy`: torch.nn.functional's,
where there is one (2.13). First every way's loss and gradients are held against float64. Each way is measured in a process of its own:
on a CPU its resident memory at the peak less that before, inputs in place; on a GPU torch's count of the same. The gradients of hidden and
weight are part of every peak: `least` is what they take alone.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
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
VOCABULARIES = (32_000, 128_256)
CPU = {"hidden": 256, "tokens": (512, 1024), "dtypes": ("float32", "bfloat16")}
GPU = {"hidden": 4096, "tokens": (8192, 16384), "dtypes": ("bfloat16",)}
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


def ours(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """Its value is a sum; the weights make it the mean."""
    return head(hidden, targets, CrossEntropy(torch.full(targets.shape, 1 / len(targets), device=targets.device)))[0]


def whole(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.weight).float(), targets)


def checkpointed(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    rows = head.rows_at_once(len(targets), hidden.device.type)

    def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, head.weight).float(), targets, reduction="sum")

    parts = [checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
    return torch.stack(parts).sum() / len(targets)  # type: ignore[arg-type]


def linear_cross_entropy(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, head.weight, targets, options=torch.nn.LinearCrossEntropyOptions())  # type: ignore[attr-defined]


WAYS: dict[str, Callable[[Head, Tensor, Tensor], Tensor]] = {"ours": ours, "whole": whole, "checkpoint": checkpointed}
if hasattr(F, "linear_cross_entropy"):
    WAYS["linear_cross_entropy"] = linear_cross_entropy


def inputs(vocabulary: int, tokens: int, width: int, dtype: str, device: str) -> tuple[Head, Tensor, Tensor]:
    """A head, hidden states and targets, the same on every call."""
    draw = torch.Generator().manual_seed(0)
    head = Head(ModelConfig(vocab_size=vocabulary, hidden_size=width))
    head.weight = torch.nn.Parameter(torch.randn(vocabulary, width, generator=draw).to(device, getattr(torch, dtype)).mul_(0.05))
    hidden = torch.randn(tokens, width, generator=draw).to(device, getattr(torch, dtype))
    return head, hidden.requires_grad_(), torch.randint(vocabulary, (tokens,), generator=draw).to(device)


def peak(device: str) -> int:
    """Bytes at the peak so far."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, *shape: Any) -> dict[str, float]:
    """In this process: MiB that the first forward and backward add to the peak, and the seconds of the faster of two more."""
    device = shape[-1]
    inputs(64, 128, shape[2], *shape[3:])  # what is allocated once
    WAYS[way](*inputs(64, 128, *shape[2:])).backward()
    head, hidden, targets = inputs(*shape)
    before, seconds, added = peak(device), [], 0
    for _ in range(3):
        hidden.grad = head.weight.grad = None
        started = time.perf_counter()
        WAYS[way](head, hidden, targets).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        added = added or peak(device) - before
    return {"mib": added / MIB, "seconds": min(seconds[1:])}


def in_a_process(way: str, *shape: Any) -> dict[str, float]:
    """`measure`, apart: memory that another way has freed would hide its peak."""
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--one", json.dumps([way, *shape])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} {shape} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def errors(way: str, dtype: str, device: str) -> dict[str, float]:
    """Against float64 on a small case: of the loss, absolute; of the gradients, relative."""
    head, hidden, targets = inputs(4096, 256, 64, dtype, device)
    head.chunk_mib = 1
    loss = WAYS[way](head, hidden, targets)
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, head.weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, targets)
    wanted.backward()
    found = {"loss": abs(loss.item() - wanted.item())}
    for name, ours, theirs in (("grad_hidden", hidden.grad, exact[0].grad), ("grad_weight", head.weight.grad, exact[1].grad)):
        assert ours is not None and theirs is not None
        found[name] = ((ours.double() - theirs).norm() / theirs.norm()).item()
    return {name: float(f"{value:.2g}") for name, value in found.items()}


def main() -> None:
    """Check, measure, print and write down."""
    options = harness.arguments(__doc__, repeat=3, one="")
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes: dict[str, Any] = GPU if device == "cuda" else CPU
    checked = {dtype: {way: errors(way, dtype, device) for way in WAYS} for dtype in sizes["dtypes"]}
    for dtype in sizes["dtypes"]:
        for way in ("ours", "whole", "checkpoint"):
            assert max(checked[dtype][way].values()) < TOLERANCE[dtype], f"{way} in {dtype}: {checked[dtype][way]}"
    result: dict[str, Any] = {"errors": checked, "hidden": sizes["hidden"], "repeat": options.repeat, "measured": {}}
    compared: dict[str, float] = {}
    for dtype, vocabulary, tokens in product(sizes["dtypes"], VOCABULARIES, sizes["tokens"]):
        shape = (vocabulary, tokens, sizes["hidden"], dtype, device)
        repeat = options.repeat if tokens == max(sizes["tokens"]) else 1  # the smaller number only shows how memory grows
        runs = harness.in_turn({way: lambda way=way, shape=shape: in_a_process(way, *shape) for way in WAYS}, repeat)
        bytes_each = getattr(torch, dtype).itemsize
        case: dict[str, Any] = {"least_mib": round((vocabulary + tokens) * sizes["hidden"] * bytes_each / MIB, 1)}
        for way, runs_of in runs.items():
            case[way] = {figure: harness.spread([run[figure] for run in runs_of]) for figure in ("mib", "seconds")}
            if way != "ours":
                for figure in ("mib", "seconds"):
                    case[way][f"{figure} / ours"] = harness.ratio([r[figure] for r in runs_of], [r[figure] for r in runs["ours"]])
        name = f"{dtype}, vocabulary {vocabulary:,}, {tokens:,} tokens"
        result["measured"][name] = case
        if tokens == max(sizes["tokens"]):
            compared |= {f"{name}: {figure} whole / ours": case["whole"][f"{figure} / ours"]["median"] for figure in ("mib", "seconds")}
    harness.finish("loss_memory", result, compared, options.check)


if __name__ == "__main__":
    main()
