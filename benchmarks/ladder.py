"""Ladder of model sizes by model.depth: do the smaller ones' losses predict the largest one's?

    python -m benchmarks.ladder --data text.jsonl --tokenizer tokenizer/ [--depths 4,6,8]
                                [--further "optim=adamw precision=fp32"]

Each size is trained by the rules of model.depth on the same text, for its own number of tokens per
parameter. A power law of the compute, fitted to all but the largest size, predicts the largest
one's validation loss. --width: width per block, 64 by the rules; a smaller one gives smaller
models. Runs are kept in --root, and a second call reuses those that are finished.
"""

import math
import shlex
from pathlib import Path
from typing import Any

import fsdp_trainer
from benchmarks.harness import arguments, finish
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.depth import scaling_parameters


def main() -> None:
    """Train the ladder, fit the prediction, print and store the result."""
    given = arguments(
        __doc__,
        repeat=1,
        data="",
        tokenizer="",
        depths="4,6,8",
        width=0,
        root="runs/ladder",
        further="",
    )
    depths = [int(depth) for depth in given.depths.split(",")]
    rungs = []
    for depth in depths:
        width = [f"model.hidden_size={given.width * depth}"] if given.width else []
        further = [*width, *shlex.split(given.further)]
        rungs.append(rung(depth, given.data, given.tokenizer, given.root, further))
    predicted = predict(rungs)
    measured = rungs[-1]["validation_loss"]
    result: dict[str, Any] = {
        "what": f"model.depth={given.depths} on {Path(given.data).name}, {given.further}",
        "rungs": rungs,
        "predicted_loss_of_the_largest": round(predicted, 4),
        "off_by": round(predicted / measured - 1, 4),
    }
    finish("ladder", result, {"1 - |off by|": 1 - abs(predicted / measured - 1)}, given.check)


def rung(depth: int, data: str, tokenizer: str, root: str, further: list[str]) -> dict[str, Any]:
    """Train one size, or resume it; return its parameters, tokens, compute and validation loss."""
    words = [
        "+recipe=chain_depth",
        f"model.depth={depth}",
        f"data.path={data}",
        "data.validation=0.02",
        f"tokenizer.path={tokenizer}",
        f"run.root={root}",
        f"run.name=depth{depth}",
        *further,
    ]
    cfg = compose("train", words)
    code = fsdp_trainer.train(words)
    if code:
        raise RuntimeError(f"depth {depth} ended with code {int(code)}")
    parameters = scaling_parameters(cfg.model)
    tokens = int(code.metrics["tokens"])
    return {
        "depth": depth,
        "parameters": parameters,
        "tokens": tokens,
        "flops": 6 * parameters * tokens,
        "lr": cfg.optim.lr,
        "validation_loss": code.metrics["validation_loss"],
        "bits_per_byte": code.metrics.get("validation_bits_per_byte"),
    }


def predict(rungs: list[dict[str, Any]]) -> float:
    """Return the last rung's loss by a least-squares line through the others' log loss and FLOPs.

    Both axes are logarithmic.
    """
    points = [(math.log(rung["flops"]), math.log(rung["validation_loss"])) for rung in rungs[:-1]]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    run = sum((x - mean_x) ** 2 for x, _ in points)
    slope = rise / run if run else 0.0  # a single point predicts its own loss
    return math.exp(mean_y + slope * (math.log(rungs[-1]["flops"]) - mean_x))


if __name__ == "__main__":
    main()
