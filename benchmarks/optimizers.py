"""Formats of optimizer state: bytes per parameter, and step time relative to torch's fused AdamW.

    python -m benchmarks.optimizers [--repeat 5] [--check]

A Llama of 4 blocks, width 512 and vocabulary 8,000 on one device; a round is one step of each way.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import arguments, finish, in_turn, ratio, spread, wait_for_device
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.optimizers import build_optimizer

SHAPE = ModelConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, vocab_size=8000)
WAYS = {
    "fused": (torch.float32, Optim(implementation="fused")),
    "foreach": (torch.float32, Optim(implementation="foreach")),
    "bfloat16 moments": (torch.float32, Optim(state_dtype="bfloat16")),
    "8-bit moments": (torch.float32, Optim(state_dtype="8bit")),
    "bfloat16 throughout, stochastic": (torch.bfloat16, Optim()),
    "bfloat16 throughout, to nearest": (torch.bfloat16, Optim(rounding="nearest")),
}


def main() -> None:
    """Measure, print and store the result."""
    given = arguments(__doc__, repeat=5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps, held = {}, {}
    for way, (dtype, cfg) in WAYS.items():
        steps[way], held[way] = prepared(dtype, cfg, device)
        steps[way]()  # creates the optimizer states
    timings = in_turn(steps, given.repeat)
    result: dict[str, Any] = {
        "what": f"{SHAPE.parameters():,} parameters on one {device.type}, {given.repeat} rounds"
    }
    for way, seconds in timings.items():
        result[way] = {
            "moment_bytes_a_parameter": round(held[way], 3),
            "seconds": spread(seconds),
            "of_fused": ratio(seconds, timings["fused"]),
        }
    finish(
        "optimizers",
        result,
        {f"{way}: fused / it": ratio(timings["fused"], timings[way]) for way in WAYS},
        given.check,
    )


def prepared(
    dtype: torch.dtype, cfg: Optim, device: torch.device
) -> tuple[Callable[[], float], float]:
    """Return a function that times a step in seconds, and the moments' bytes per parameter."""
    model = Decoder(SHAPE).to(device, dtype)
    optimizer = build_optimizer(model, cfg)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    moments = sum(
        t.nbytes
        for p in model.parameters()
        for name, t in optimizer.empty_state(p).items()
        if name != "step"
    )
    fine = torch.zeros((), dtype=torch.bool, device=device)

    def step() -> float:
        wait_for_device()
        started = time.perf_counter()
        optimizer.step_unless(fine)
        wait_for_device()
        return time.perf_counter() - started

    return step, moments / SHAPE.parameters()


if __name__ == "__main__":
    main()
