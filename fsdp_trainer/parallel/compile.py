"""torch.compile per block: its requirements, a count of compilations, and readable errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.torch_private import (
    count_compiled_graphs,
    is_compiler_error,
    missing_compiler,
    on_compilation,
)
from fsdp_trainer.config.schema import ActivationCheckpoint, Compile
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.experts import divides_experts

BACKEND = "inductor"  # tests of gradients use one that generates no kernels


def can_compile(
    cfg: Compile, cache: Path, recompute: ActivationCheckpoint, device: torch.device
) -> tuple[bool, str | None]:
    """Return True if blocks are compiled, and a note if that is requested but impossible.

    All ranks return the same decision. cache: folder of compiled code. Raises UserError if it is
    not writable, or if recomputation needs the compiler. Collective.
    """
    if not cfg.enabled:
        return False, None
    answers = gather((cache_problem(cache), missing_compiler(device.type)))
    for problem, _ in answers:
        if problem:
            problems = [Problem(f"compile.cache={cache}", problem)]
            raise UserError("the compiler's cache cannot be used", problems)
    missing = [f"on rank {rank} there is {what}" for rank, (_, what) in enumerate(answers) if what]
    if not missing:
        return True, None
    if recompute.mode == "budget":
        reason = (
            f"the compiler decides what is computed again, and {missing[0]}.\n"
            "Use  activation_checkpoint=selective"
        )
        raise UserError("there is no compiler", "activation_checkpoint=budget", reason)
    note = f"compile: {missing[0]}; all ranks run without it (compile=disabled: the same, unasked)"
    return False, note


def cache_problem(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{error.strerror or error}"
    return None if os.access(folder, os.W_OK) else "is not writable"


def compile_blocks(model: Decoder, cfg: Compile, forward_alone: bool = False) -> None:
    """Compile every block, and the head's operations on logits. All blocks use one graph.

    forward_alone: compile `forward` instead of the call, so that forward can be wrapped later.
    """
    # the compiler limits the graphs per function, including those of earlier runs in this process
    torch.compiler.reset()
    options: dict[str, Any] = {"mode": cfg.mode, "backend": BACKEND}
    if model.lm_head is not None:
        model.lm_head.compile_chunks(**options)
    for block in [*model.blocks().values(), *model.mtp_heads()]:
        options["fullgraph"] = is_one_graph(block)
        if forward_alone:
            method: Any = block.forward
            compiled = torch.compile(method.__func__, **options)
            block.forward = MethodType(compiled, block)
        else:
            block.compile(**options)


def is_one_graph(block: nn.Module) -> bool:
    """Return False for a block that is split into two graphs.

    It has experts on several ranks, or layers that compute each document by itself.
    """
    return not divides_experts(block) and not hasattr(block, "document_layers")


@contextmanager
def without_compiling(compiled: bool) -> Iterator[None]:
    """Run a compiled model eagerly inside the context: it would be recompiled for every length."""
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


class Compilations:
    """Counter of the graphs that this process compiles; the time is booked as phase `compile`."""

    def __init__(self) -> None:
        on_compilation(phases.compiling.begins, phases.compiling.ends)
        self._counted = count_compiled_graphs()

    def new(self) -> tuple[int, int]:
        graphs, cached = count_compiled_graphs()
        before = self._counted
        self._counted = (graphs, cached)
        return graphs - before[0], cached - before[1]


@contextmanager
def summarize_compiler_errors() -> Iterator[None]:
    """Replace the compiler's hundred lines of error by RunFailed, which suggests what to do."""
    try:
        yield
    except Exception as error:
        if not is_compiler_error(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = (lines or [type(error).__name__])[0]
        raise RunFailed(
            f"the compiler gave up on a decoder block: {first[:300]}\n"
            "Train without it:  compile=disabled  "
            "(TORCH_LOGS=dynamo,inductor in the environment says more)"
        ) from error
