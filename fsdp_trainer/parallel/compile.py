"""torch.compile, block by block: with which compiler, in which mode, and where its results are kept."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.store import gather
from fsdp_trainer.config.paths import compile_cache
from fsdp_trainer.config.schema import Compile, TrainConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.decoder import Decoder


def can_compile(cfg: TrainConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether blocks are compiled, and what to say if they were to be but cannot. Collective: the ranks do alike.

    Raises UserError for a cache that cannot be written.
    """
    if not cfg.compile.enabled:
        return False, None
    cache = compile_cache(cfg)
    found = gather((_unusable(cache), missing_compiler(device)))
    if unusable := next((why for why, _ in found if why), None):
        raise UserError(
            "the compiler's cache cannot be used", [Problem(f"compile.cache={cache}", unusable)]
        )
    rank, missing = next(((rank, why) for rank, (_, why) in enumerate(found) if why), (0, None))
    if missing is None:
        return True, None
    if cfg.activation_checkpoint.mode == "budget":
        why = f"the compiler decides what is computed again, and on rank {rank} there is {missing}.\nUse  activation_checkpoint=selective"
        raise UserError("there is no compiler", [Problem("activation_checkpoint=budget", why)])
    return (
        False,
        f"compile: on rank {rank} there is {missing}; the run goes on without, all ranks alike (compile=disabled: the same, unasked)",
    )


def _unusable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return None if os.access(folder, os.W_OK) else "is not writable"
    except OSError as error:
        return f"{error.strerror or error}"


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile needs for `device` and this machine lacks; None if it has all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # heavy: asks every device

        compilers = (
            [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        )  # as Triton looks for it
        if not has_triton():
            return "no Triton that knows its GPU"
        return (
            None
            if any(map(shutil.which, compilers))
            else f"no C compiler ({' or '.join(compilers)}), which Triton needs"
        )
    from torch._inductor import config  # heavy, and of use to compiled runs only
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
        return None
    except (InvalidCxxCompiler, OSError):
        return f"no C++ compiler ({config.cpp.cxx[-1]}; the environment's CXX names another)"


def compile_blocks(model: Decoder, cfg: Compile) -> None:
    """One graph per block; all blocks share it. And what the head does to its logits."""
    torch.compiler.reset()  # graphs of an earlier run in this process count against the compiler's limit for one function
    model.lm_head.compile_chunks(mode=cfg.mode)
    for block in model.model.layers.values():
        block.compile(fullgraph=True, mode=cfg.mode)


class Compilations:
    """How many graphs this process has compiled since the last look."""

    def __init__(self) -> None:
        from torch._dynamo.callback import (
            callback_handler,
        )  # heavy, and of use to compiled runs only
        from torch._dynamo.utils import counters

        if phases.compiling.begins not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(phases.compiling.begins)
            callback_handler.register_end_callback(phases.compiling.ends)
        self._counters, self._seen = counters, (0, 0)
        self.new()

    def new(self) -> tuple[int, int]:
        """Graphs since the last call, and how many of them the cache had."""
        now = (
            self._counters["stats"]["unique_graphs"],
            self._counters["aot_autograd"]["autograd_cache_hit"],
        )
        since, self._seen = (now[0] - self._seen[0], now[1] - self._seen[1]), now
        return since


@contextmanager
def told_in_short() -> Iterator[None]:
    """What the compiler throws becomes a RunFailed that says what to do, in place of its hundred lines."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        first = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise RunFailed(
            f"the compiler gave up on a decoder block: {first[:300]}\n"
            "Train without it:  compile=disabled  (TORCH_LOGS=dynamo,inductor in the environment says more)"
        ) from error
