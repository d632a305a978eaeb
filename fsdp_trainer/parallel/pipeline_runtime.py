"""torch's pipeline runtime with stages that hold no more than they need.

torch's own stage keeps the whole gradient until the last micro-batch, and a buffer for each
micro-batch of a step. It has no public way to change that: what is overridden here was read in
torch 2.13.
"""

from collections.abc import Callable, Sequence
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

from fsdp_trainer import phases

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Torch's schedules by sharding.pipeline_schedule."""


class LeanStage(PipelineStage):
    """A stage whose receive buffers exist while their micro-batch is on its way through it.

    after_backward: called with the number of each micro-batch whose backward has reached the first
    stage's input.
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
        """number, count: of the stages. stream: what stages pass on, on the meta device."""
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
        with self.without_storage():
            super()._setup_forward_recv_info(*args)

    def _setup_backward_recv_info(self, *args: Any) -> None:
        with self.without_storage():
            super()._setup_backward_recv_info(*args)

    def without_storage(self) -> "WithoutStorage":
        """Return a context in which buffers have no storage."""
        return WithoutStorage(self)

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """See PipelineStage."""
        allocate(self.args_recv_info[chunk], self.device)
        return super().get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """See PipelineStage."""
        if self.has_backward:
            allocate(self.grad_recv_info[chunk], self.device)
        return super().get_bwd_recv_ops(chunk)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """See PipelineStage, which refuses it in a run of forwards alone, as its schedules ask."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """See `get_local_bwd_output`."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """See PipelineStage. What was received is kept for backward alone."""
        phases.enter("forward")
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        """See PipelineStage."""
        phases.enter("backward")
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if self.has_backward:
            release(self.grad_recv_info[bwd_chunk_id])
            self.after_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """See PipelineStage. The first stage does all of its backward here."""
        phases.enter("backward")
        super().backward_weight_one_chunk(chunk, last_backward)
        if self.has_backward:
            self.after_backward(chunk)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """See PipelineStage. A first stage whose front is frozen may have nothing to do."""
        outputs = bwd_kwargs["stage_output"]
        outputs = outputs if isinstance(outputs, Sequence) else (outputs,)
        # the gradients of weights come from the graph, which the output may have left
        if backward_type != "weight" and not any(output.requires_grad for output in outputs):
            return tuple(None for _ in bwd_kwargs.get("input_values", ())), None
        return self.run_backward(backward_type, bwd_kwargs, last_backward)

    def run_backward(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Keep the gradient whole until the last micro-batch."""
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def finish(self) -> None:
        """Do what waits for all stages' last backward: nothing."""


class EagerStage(LeanStage):
    """A stage that reduces the gradient of every micro-batch, as training without a pipeline does.

    Its schedule does not split backward. hsdp's all-reduce waits for the last micro-batch.
    """

    submod: Any

    def run_backward(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Leave this rank's part of the gradient."""
        self.submod.set_is_last_backward(last_backward)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(last_backward)
        gradients = stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Free the gathered parameters: the gradients are reduced already."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class LateStage(LeanStage):
    """A last stage whose head is the embedding of the first stage, which is on the same rank.

    Backwards of the first stage go on after its own: it reduces its gradients in `finish`.
    """

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Wait for `finish`."""

    def finish(self) -> None:
        """Leave this rank's part of the gradient."""
        super().perform_reduce_grad(1)


class WithoutStorage:
    """While it is entered, a stage makes its tensors on the meta device."""

    def __init__(self, stage: PipelineStage):
        self.stage, self.device = stage, stage.device

    def __enter__(self) -> None:
        self.stage.device = torch.device("meta")

    def __exit__(self, *_: object) -> None:
        self.stage.device = self.device


def allocate(infos: Sequence[Any], device: torch.device) -> None:
    """Give buffers to be received into storage."""
    for info in infos:
        if not info.is_root_arg and info.tensor_meta is not None:
            meta = info.tensor_meta
            info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=device)


def release(infos: Sequence[Any]) -> None:
    """Forget buffers: what computes with them has its own reference."""
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
    """Run forwards, and backwards to `train`, of a step's micro-batches.

    inputs, options: of each micro-batch, for the first stage and for all. Returns what the last
    stage made of each; on ranks without it nothing. The public way, `step`, would cut one large
    batch of tensors.
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
        # it wraps whatever a stage raises, also what there is a better message for
        raise error.__cause__ or error from None
    return results
