"""Some cases, in a process with no_gpu.c: python -m tools.cuda_shapes.run_cases NAME ...

Prints one JSON object a line for each case.
"""

import json
import sys
import traceback
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.models import attention
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.plan_inputs import architecture, single_target
from fsdp_trainer.planning.rehearse.rank_step import RankStep, step_of_rank
from fsdp_trainer.planning.rehearse.rehearsed_run import Rehearsed, rehearsed_run
from fsdp_trainer.planning.rehearse.rows import rows_of_run
from fsdp_trainer.training.attention_setup import choose_attention
from tools.cuda_shapes.cases import KERNELS, compiled_cases, steps
from tools.cuda_shapes.compiled_block import FUNCTIONS, kernels_of_block, kernels_of_function
from tools.cuda_shapes.host_waits import HostWaits, place

CUDA = torch.device("cuda")


def rehearsed_of(words: list[str]) -> Rehearsed:
    """Return the run that overrides describe, with the attention that a GPU would have."""
    cfg = compose("rehearse", words, None, inputs=False)
    config, _ = architecture(cfg)
    run = Candidate(cfg, config, *single_target(cfg, ""))
    run, rows, _ = rows_of_run(run)
    rehearsed = rehearsed_run(run, rows)
    part = config.on_tensor_rank(cfg.sharding.tensor)
    method = context_method(cfg.sharding, cfg.batch.seq_len, part).method
    with FakeTensorMode():
        choice = choose_attention(cfg, [config], CUDA, False, method)
    return replace(rehearsed, attention=choice.layout)


def calls(step: RankStep) -> list[tuple[Any, ...]]:
    """Return the collectives of a step, without the names of modules."""
    return [(one.ranks, one.op, one.bytes, one.dtype) for one in step.collectives]


def on_gpu(run: Rehearsed, rank: int, waits: HostWaits) -> RankStep:
    """Run a step of a rank with tensors on a GPU, without compiling flex attention."""
    uncompiled = attention._flex("cpu")
    with (
        waits.watching(),
        patch.object(attention, "_flex", lambda _device: uncompiled),
        patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        return step_of_rank(replace(run, tensors="cuda"), rank, waits)


def result_of(words: list[str], expected: str | None = None) -> dict[str, Any]:
    """Return what a case shows. expected: an operator that it must have."""
    waits = HostWaits()
    result: dict[str, Any] = {"problem": ""}
    try:
        run = rehearsed_of(words)
        result["attention"] = run.attention
        ranks = [0] if run.layout.sizes["pipeline"] == 1 else [0, run.world - 1]
        of_gpu = [on_gpu(run, rank, waits) for rank in ranks]
        result["peak"] = max(step.peak.total for step in of_gpu)
        result["collectives"] = sum(len(step.collectives) for step in of_gpu)
    except Exception as error:
        result |= problem(error)
    result["operators"], result["waits"] = dict(waits.operators), dict(waits.waits)
    if expected not in (None, *waits.operators) and not result["problem"]:
        result["problem"] = f"{expected} is not among its operators"
    if not result["problem"] and is_rehearsable(words):
        on_cpu = [step_of_rank(run, rank) for rank in ranks]
        result["peak on a CPU"] = max(step.peak.total for step in on_cpu)
        result["same collectives"] = [*map(calls, on_cpu)] == [*map(calls, of_gpu)]
    return result


def result_of_compilation(name: str) -> dict[str, Any]:
    """Return the kernels of a compiled function, and the operators of a compiled block."""
    result: dict[str, Any] = {"problem": "", "waits": {}}
    try:
        if name in FUNCTIONS:
            return result | {"kernels": kernels_of_function(name)}
        kernels, operators = kernels_of_block(compiled_cases()[name])
    except Exception as error:
        return result | problem(error)
    expected = KERNELS.get(name)
    if expected not in (None, *operators):
        result["problem"] = f"{expected} is not among its operators"
    return result | {"kernels": kernels, "operators": operators}


def problem(error: Exception) -> dict[str, str]:
    """Return an error, its place and its trace."""
    return {
        "problem": f"{type(error).__name__}: {error}"[:600],
        "place": place(traceback.extract_tb(error.__traceback__)),
        "trace": traceback.format_exc()[-6000:],
    }


def is_rehearsable(words: list[str]) -> bool:
    """Return True if a CPU can compute the same step."""
    return not any("float8" in word or "offload=true" in word for word in words)


def main(names: list[str]) -> None:
    """Print the result of each case as it is known."""
    of_steps = steps()
    for name in names:
        if name not in of_steps:
            result = result_of_compilation(name)
        else:
            result = result_of(of_steps[name], KERNELS.get(name))
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
