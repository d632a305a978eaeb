"""One rank of a rehearsal: the trainer's own build, and one step, on tensors without storage."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.base.live_bytes import Moments, Peak
from fsdp_trainer.base.torch_private import gather_from_copies, graph_for_each_shape
from fsdp_trainer.checkpoint.state import optimizer_state, stored_parameters, weights
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.schema import Compile
from fsdp_trainer.launch.world import World
from fsdp_trainer.methods.registry import build_method
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.models.head import Head
from fsdp_trainer.optim.elementwise import ElementwiseOptimizer
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.optimizers import TorchAdamW, build_optimizer
from fsdp_trainer.optim.outer_step import OuterStep
from fsdp_trainer.parallel import activation_offload, compile, parallelize
from fsdp_trainer.parallel.activation_offload import CopiesOnHost
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import fsdp_modules
from fsdp_trainer.planning.plan.work import Work
from fsdp_trainer.planning.rehearse.collectives import Collective
from fsdp_trainer.planning.rehearse.fake_ranks import fake_tensors, fake_world, with_real_tensors
from fsdp_trainer.planning.rehearse.fused_graphs import KeptGraphs
from fsdp_trainer.planning.rehearse.rehearsed_run import Rehearsed, folder_of_second
from fsdp_trainer.planning.rehearse.rows import EmptyData, RehearsedBatches, plan_of_step
from fsdp_trainer.planning.rehearse.step_recorder import StepRecorder
from fsdp_trainer.run.build import batch_options, build_model, build_step
from fsdp_trainer.training.batches import Assembler
from fsdp_trainer.training.groups import OneGroup
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.loss_scale import new_loss_scale
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_inputs import RunInputs
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step_runner import StepRunner
from fsdp_trainer.training.weights import extra_state

T = TypeVar("T")


@dataclass(frozen=True)
class RankStep:
    """The record of one rank's step.

    peak: the moment with most bytes of tensors; moments, curve: see LiveBytes; collectives: of the
    micro-batches that ran, in order; marks: where each of them began; work: of these micro-batches;
    worked: the part of it before each of them; staged: bytes of host memory that a save needs;
    groups: name of each dimension by the ranks of its group.
    """

    rank: int
    peak: Peak
    moments: Moments
    curve: list[tuple[int, tuple[int, ...]]]
    collectives: list[Collective]
    marks: list[int]
    work: Work
    worked: list[Work]
    staged: int
    groups: dict[tuple[int, ...], str]


def step_of_rank(
    run: Rehearsed, rank: int, watch: AbstractContextManager[Any] | None = None
) -> RankStep:
    """Build the trainer as `rank`, run one step and stage a checkpoint, on fake tensors.

    watch: entered for the step.
    """
    phases.begin()
    return with_parts(run, rank, lambda parts: parts.step(watch or nullcontext()))


def with_parts(run: Rehearsed, rank: int, use: "Callable[[RankParts], T]") -> T:
    """Return `use` of the parts of a rank, which exist only meanwhile."""
    compiles = graph_for_each_shape() if run.cfg.compile.enabled else nullcontext()
    with fake_world(rank, run.world), folder_of_second(run.second) as folder, compiles:
        return use(RankParts(run, rank, folder))


class RankParts:
    """The models of one rank, built as for training, without storage. Collective."""

    def __init__(self, run: Rehearsed, rank: int, second: Path | None):
        """second: folder of a second model."""
        cfg, device = run.cfg, torch.device(run.tensors)
        self.run, self.rank, self.device = run, rank, device
        self.dims = Dims(run.layout, device.type, parse_duration(cfg.launch.timeout))
        nothing: Any = None  # what neither building nor a step asks for
        world = World(rank, run.world, 0, 0, 1, "", "", nothing, device)
        inputs = RunInputs(nothing, nothing, EmptyData(), None, second)  # type: ignore[arg-type]
        trained = ModelSetup.resolve(run.config, cfg.adapter, cfg.train.freeze)
        compiled = cfg.compile.enabled
        setup = RunSetup(cfg, inputs, trained, world, self.dims, compiled, Path(), nothing, nothing)
        self.setup = setup
        self.on_host = run.device == "cuda" and run.states_on_host
        self.recorder = StepRecorder(run.device == "cpu", self.on_host)
        with compiling_for(self.recorder, run.graphs) if compiled else nullcontext():
            # before the model in training, as in training
            self.method = build_method(setup, RunRows(nothing, None, cfg.batch.rows), None)
            self.model = build_model(setup, self.method.head_temperature)

    @property
    def models(self) -> list[Decoder]:
        return [self.model, *(frozen.model for frozen in self.method.frozen_models)]

    def step(self, watch: AbstractContextManager[Any]) -> RankStep:
        """Run one step, inside of `watch`, and stage a checkpoint."""
        run, cfg, recorder = self.run, self.run.cfg, self.recorder
        batches = self._batches()
        with fake_tensors(run, run.expert_rows(batches.length)):
            for model in self.models:
                allocate(model, self.setup.model_device, self.device)
            make = with_real_tensors(build_optimizer)
            optimizer = make(self.model, cfg.optim, cfg.run.seed, self.dims.stage_group)
            if isinstance(optimizer, TorchAdamW) and run.device == "cuda":
                optimizer.fuse()
            make_states(optimizer)
            if self.on_host:
                self._put_states_on_host(optimizer)
            hold_states(self.models, optimizer, recorder)
            outer = self._outer_step(recorder)
            runner = self._runner(optimizer)
            marks: list[int] = []
            worked: list[Work] = []
            each = self._marked(batches, recorder, marks, worked)
            phases.enter("data", 1)
            patched = patch.object(
                activation_offload, "CopiesOnHost", partial(UncountedCopies, recorder)
            )
            with (
                patched if self.run.device == "cuda" else nullcontext(),
                watch,
                recorder.watching(self.model),
            ):
                self._gather_second_models()
                recorder.collectives.clear()
                recorder.work.clear()
                runner.train_step(batches, each, cfg.optim.lr)
            staged = staged_bytes(self.model, optimizer, runner, outer)
        return RankStep(
            self.rank,
            recorder.peak,
            recorder.moments,
            recorder.curve,
            recorder.collectives,
            marks,
            dict(recorder.work),
            worked,
            staged,
            names_of_groups(self.dims),
        )

    def _gather_second_models(self) -> None:
        for frozen in self.method.frozen_models:
            for module in fsdp_modules(frozen.model) if frozen.stays_gathered else []:
                module.unshard()

    def _put_states_on_host(self, optimizer: TrainerOptimizer) -> None:
        """Count no states, but with optim.offload the copies from which weights are gathered."""
        recorder, cfg = self.recorder, self.run.cfg
        trained = [self.model] if not cfg.sharding.cpu_offload else self.models
        for model in trained:
            for parameter in model.parameters():
                recorder.put_on_host(parameter.detach())
        for state in optimizer.state.values():
            for tensor in state.values():
                recorder.put_on_host(tensor)
        if cfg.optim.offload != "none":
            for copy in gather_from_copies(fsdp_modules(self.model), False).values():
                if cfg.sharding.cpu_offload:
                    recorder.put_on_host(copy)
                else:
                    recorder.add(copy, "parameters")

    def _outer_step(self, recorder: StepRecorder) -> OuterStep | None:
        """Return the outer optimizer of groups that train by themselves, and count its state."""
        cfg = self.run.cfg.replicas
        if cfg.method != "diloco":
            return None
        outer = OuterStep(cfg, stored_parameters(self.model))
        for tensor in outer.state().values():
            recorder.add(tensor, "optimizer")
        return outer

    def _runner(self, optimizer: TrainerOptimizer) -> StepRunner:
        setup, cfg = self.setup, self.run.cfg
        loss_scale = new_loss_scale(cfg.precision, self.device)
        forward_backward = build_step(setup, self.method, self.model, [""], loss_scale)
        guard = Guard(cfg.train, setup.model_device, Progress())
        return StepRunner(
            cfg, self.model, self.dims, optimizer, forward_backward, guard, OneGroup()
        )

    def _batches(self) -> RehearsedBatches:
        run, cfg = self.run, self.run.cfg
        part = run.config.on_tensor_rank(cfg.sharding.tensor)
        method = context_method(cfg.sharding, cfg.batch.seq_len, part).method
        options = batch_options(self.setup, run.attention, method, None)
        assembler = Assembler(cfg.batch.seq_len, 1, options)
        plan = plan_of_step(cfg.batch.rows, run.rows)
        return RehearsedBatches(assembler, plan, run.rows, run.layout.micro_batches)

    def _marked(
        self,
        batches: RehearsedBatches,
        recorder: StepRecorder,
        marks: list[int],
        worked: list[Work],
    ) -> Iterator[MicroBatch]:
        for batch in batches:
            marks.append(len(recorder.collectives))
            worked.append(dict(recorder.work))
            yield batch


@contextmanager
def compiling_for(recorder: StepRecorder, graphs: KeptGraphs) -> Iterator[None]:
    """Within, let blocks be compiled to graphs whose tensors `recorder` counts.

    Their forward is compiled, not their call, so that the recorder sees each begin and end.
    """
    graphs.counter = recorder

    def compile_forward(model: Decoder, cfg: Compile, **_alone: bool) -> None:
        chunks = partialmethod(Head.compile_chunks, graphs.traced)
        with (
            patch.object(compile, "BACKEND", graphs.backend),
            patch.object(torch.compiler, "reset"),  # the graphs of ranks before are used again
            patch.object(Head, "compile_chunks", chunks),
        ):
            compile.compile_blocks(model, cfg, forward_alone=True)

    # its advice on recomputation in compiled blocks is for those who write a model
    advice = logging.getLogger("torch._higher_order_ops.wrap")
    with (
        patch.object(advice, "disabled", True),
        patch.object(parallelize, "compile_blocks", compile_forward),
    ):
        yield


class UncountedCopies(CopiesOnHost):
    """Copies of activations to a host whose memory is not the device's."""

    def __init__(self, recorder: StepRecorder):
        self.recorder = recorder

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
        self.recorder.moved(storage.nbytes())
        self.recorder.put_on_host(copy)
        return copy

    def to_device(self, data: Tensor) -> Tensor:
        return torch.empty_like(data)


def make_states(optimizer: TrainerOptimizer) -> None:
    """Give an optimizer empty state for each parameter, as from a checkpoint.

    Of an optimizer that updates one parameter after the other, one of each shape is updated.
    """
    for group in optimizer.param_groups:
        kinds: dict[Any, Any] = {}
        for parameter in group["params"]:
            optimizer.state[parameter] = optimizer.empty_state(parameter)
            kinds.setdefault((local_part(parameter).shape, parameter.dtype), parameter)
        if isinstance(optimizer, ElementwiseOptimizer):
            group["params"] = [*kinds.values()]


def hold_states(
    models: Sequence[Decoder], optimizer: TrainerOptimizer, recorder: StepRecorder
) -> None:
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.add(tensor.detach(), "parameters")
    for state in optimizer.state.values():
        for tensor in state.values():
            recorder.add(tensor, "optimizer")


def staged_bytes(
    model: Decoder, optimizer: TrainerOptimizer, runner: StepRunner, outer: OuterStep | None
) -> int:
    """Return the bytes of this rank's file of a checkpoint, which a save copies to the host."""
    parts = model.balance, runner.forward_backward.loss_scale, outer
    state = weights(model) | optimizer_state(model, optimizer) | extra_state(*parts)
    return sum(local_part(tensor).nbytes for tensor in state.values())


def names_of_groups(dims: Dims) -> dict[tuple[int, ...], str]:
    """Return the dimension of the mesh along which each group of this rank lies, by its members."""
    groups = dims.named_groups()
    return {tuple(dist.get_process_group_ranks(groups[name])): name for name in reversed(groups)}
