"""torch's pipeline runtime with stages that need less memory.

torch's own stage keeps the unsharded gradient until the last micro-batch, and a buffer for each
micro-batch of a step. There is no public API to change that; the methods overridden here are those
of torch 2.13.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward

from fsdp_trainer.base import phases

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Torch's schedules by sharding.pipeline_schedule."""


class LeanStage(PipelineStage):
    """A stage whose receive buffers exist only while it processes their micro-batch.

    after_backward: called with the number of each micro-batch whose backward through this stage is
    complete.
    """

    def __init__(
        self,
        submodule: nn.Module,
        number: int,
        count: int,
        device: torch.device,
        stream: Tensor,
        group: dist.ProcessGroup | None,
        after_backward: Callable[[int], None],
    ):
        """Create a stage.

        number, count: index of this stage and number of stages. stream: a meta tensor with shape
        and dtype of the residual stream that stages exchange.
        """
        scalar = torch.empty((), device="meta", requires_grad=True)
        tokens = torch.empty(stream.shape[:2], dtype=torch.int64, device="meta")
        super().__init__(
            submodule,
            number,
            count,
            device,
            input_args=stream if number else tokens,
            output_args=stream if number < count - 1 else scalar,
            group=group,
        )
        self.after_backward = after_backward

    def _setup_forward_recv_info(self, *args: Any) -> None:
        with on_meta_device(self):
            super()._setup_forward_recv_info(*args)

    def _setup_backward_recv_info(self, *args: Any) -> None:
        with on_meta_device(self):
            super()._setup_backward_recv_info(*args)

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        allocate(self.args_recv_info[chunk], self.device)
        return super().get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        if self.has_backward:
            allocate(self.grad_recv_info[chunk], self.device)
        return super().get_bwd_recv_ops(chunk)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """See PipelineStage, which refuses this call of its schedules in runs without backward."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """See PipelineStage. Only backward keeps a reference to the received tensors."""
        phases.enter("forward")
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        phases.enter("backward")
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if self.has_backward:
            release(self.grad_recv_info[bwd_chunk_id])
            self.after_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """See PipelineStage. The first stage runs its complete backward here."""
        phases.enter("backward")
        super().backward_weight_one_chunk(chunk, last_backward)
        if self.has_backward:
            self.after_backward(chunk)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """See PipelineStage. Does nothing in a first stage whose output needs no gradient."""
        outputs = bwd_kwargs["stage_output"]
        outputs = outputs if isinstance(outputs, Sequence) else (outputs,)
        # gradients of weights are computed from the graph, from which the output may be detached
        # torch 2.15 passes edges of the graph, which only outputs that need a gradient have
        needed = [getattr(output, "requires_grad", True) for output in outputs]
        if backward_type != "weight" and not any(needed):
            return tuple(None for _ in bwd_kwargs.get("input_values", ())), None
        return self.run_backward(backward_type, bwd_kwargs, last_backward)

    def run_backward(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run backward; the gradient stays unsharded until the last micro-batch."""
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def finish(self) -> None:
        """Run work that must follow the last backward of all stages; none by default."""


class EagerStage(LeanStage):
    """A stage that reduces the gradient after every micro-batch, like training without a pipeline.

    Requires a schedule that does not split backward. The all-reduce of hsdp runs after the last
    micro-batch.
    """

    submod: Any

    def run_backward(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Run backward and reduce the gradient to this rank's part."""
        self.submod.set_is_last_backward(last_backward)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(last_backward)
        gradients = stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Free the gathered parameters; gradients are already reduced."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class LateStage(LeanStage):
    """A last stage whose head is tied to the embedding of a first stage on the same rank.

    The first stage's backwards continue after its own, so it reduces gradients only in `finish`.
    """

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients are reduced in `finish`."""

    def finish(self) -> None:
        super().perform_reduce_grad(1)


@contextmanager
def on_meta_device(stage: PipelineStage) -> Iterator[None]:
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def allocate(infos: Sequence[Any], device: torch.device) -> None:
    for info in infos:
        if info.is_root_arg or info.tensor_meta is None or hasattr(info, "allocate_buffer"):
            continue
        meta = info.tensor_meta
        info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=device)


def release(infos: Sequence[Any]) -> None:
    """Drop the references to receive buffers; operators that use them have their own."""
    for info in infos:
        if not info.is_root_arg:
            info.buffer = None


def run_schedule(
    schedule: Any,
    stages: Sequence[PipelineStage],
    inputs: list[tuple],
    options: list[dict[str, Any]],
    train: bool,
) -> list[Tensor]:
    """Run the forwards, and with `train` the backwards, of a step's micro-batches.

    inputs: arguments of the first stage for each micro-batch; options: keyword arguments of all
    stages for each micro-batch. Returns the outputs of the last stage; empty on ranks without it.
    The public method `step` would split one large batch of tensors instead.
    """
    schedule._has_backward = train
    for stage in stages:
        stage.has_backward = train
        stage.clear_runtime_states()
    results: list[Tensor] = []
    targets = [torch.zeros(())] * len(inputs)
    try:
        schedule._step_microbatches(inputs, options, targets, results, return_outputs=False)
    except RuntimeError as error:
        # the runtime wraps exceptions of stages, also those with a better message
        raise error.__cause__ or error from None
    return results
