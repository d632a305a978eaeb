"""Compilation for an H100 of a block, forward and backward, and of functions, not run."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._functorch import config as autograd_config
from torch._inductor import config as inductor_config
from torch._inductor import metrics, output_code
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.attention_choice import AttentionChoice
from fsdp_trainer.models.attention_kernels import set_kernel_priority
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.four_bit import BLOCK_BYTES, decode_compiled
from fsdp_trainer.optim.elementwise import CompactAdamW
from fsdp_trainer.parallel.compile import compile_blocks
from fsdp_trainer.planning.plan.plan_inputs import architecture
from fsdp_trainer.training.objective import CrossEntropy
from tools.cuda_shapes.host_waits import without_pinning

CUDA = torch.device("cuda")


class CompiledError(Exception):
    """Raised in place of a call of the compiled block."""


def stop(_graph: Any, _inputs: Any) -> None:
    """Raise CompiledError."""
    raise CompiledError


@contextmanager
def for_h100(visit: Callable[[torch.fx.Graph], None] | None = None) -> Iterator[None]:
    """Within, what is compiled is compiled for the GPU, and raises CompiledError when called.

    visit: called with each graph.
    """
    torch._dynamo.reset()
    metrics.reset()
    with (
        without_pinning(),
        patch.object(output_code.CompiledFxGraph, "__call__", stop),
        autograd_config.patch(force_non_lazy_backward_lowering=True),
        # constants would be computed, products of odd sizes timed, earlier code taken from disk
        inductor_config.patch(
            joint_graph_constant_folding=False,
            shape_padding=False,
            force_disable_caches=True,
            post_grad_custom_post_pass=visit,
        ),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def decoding() -> None:
    """Decode a matrix of 4 bits."""
    encoded = torch.empty(4096 * 64, BLOCK_BYTES, dtype=torch.uint8, device=CUDA)
    decode_compiled()(encoded, torch.bfloat16)


def update() -> None:
    """Update a matrix with moments in bfloat16."""
    weight = nn.Parameter(torch.empty(4096, 4096, device=CUDA))
    weight.grad = torch.empty_like(weight)
    groups = [{"params": [("weight", weight)]}]
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = CompactAdamW(groups, "bfloat16", True, 0, **options)
    optimizer.fuse()
    optimizer.divide_gradients(torch.ones((), device=CUDA))
    optimizer.step_unless(torch.zeros((), dtype=torch.bool, device=CUDA))


FUNCTIONS = {"function: decoding of 4 bits": decoding, "function: AdamW, bfloat16 moments": update}
"""Functions that are compiled whether blocks are or not, each to one kernel."""


def kernels_of_function(name: str) -> int:
    """Compile one of FUNCTIONS. Return the number of its kernels, which must be 1."""
    with for_h100():
        try:
            FUNCTIONS[name]()
        except CompiledError:
            assert metrics.generated_kernel_count == 1, metrics.generated_kernel_count
            return 1
    raise AssertionError("nothing was compiled")


def kernels_of_block(words: list[str]) -> tuple[int, dict[str, int]]:
    """Compile the first block of a model for packed rows; with cuDNN, for rows of one document.

    words: overrides of a rehearsal, with the layout of attention. Returns the number of Triton's
    kernels for sm_90, and how often the graphs call each operator.
    """
    operators: Counter[str] = Counter()

    def count(graph: torch.fx.Graph) -> None:
        calls = (str(node.target) for node in graph.nodes if node.op == "call_function")
        operators.update(call.replace(".", "::", 1).partition(".")[0] for call in calls)

    cfg = compose("rehearse", words, None, inputs=False)
    config, _ = architecture(cfg)
    length = cfg.batch.seq_len
    with torch.device("meta"):
        model = Decoder(config).to(getattr(torch, cfg.precision.param_dtype))
    with for_h100(count):
        model.to_empty(device="cuda")
        compile_blocks(model, cfg.compile)
        kernel = cfg.model.attention_kernel
        choice = AttentionChoice(cfg.model.attention, None if kernel == "auto" else kernel, "")
        set_kernel_priority(choice, config, torch.bfloat16, CUDA, required=False)
        documents = [[length]] if kernel == "cudnn" else [[length - length // 4, length // 4]]
        layout = LAYOUTS[cfg.model.attention](documents, length, CUDA)
        places = torch.zeros(1, length, dtype=torch.int64, device=CUDA)
        weights = torch.ones(length, device=CUDA)
        flat = places.flatten()
        batch = MicroBatch(places, places, layout, flat, flat, weights)
        try:
            model(batch, CrossEntropy(weights))
        except CompiledError:
            return metrics.generated_kernel_count, operators
    raise AssertionError("no block was compiled")
