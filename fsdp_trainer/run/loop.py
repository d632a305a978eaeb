"""Construction of the trainer: the loop around a step, and the work that is due after steps."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.bucket import Bucket
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.checkpoint.uploads import Uploads
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.data.prepared_data import cache_root, media_reader
from fsdp_trainer.data.tokens.token_bytes import token_bytes
from fsdp_trainer.evaluation.generation_settings import settings_of_model
from fsdp_trainer.evaluation.scoring import sharded_split
from fsdp_trainer.evaluation.tasks import Tasks
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.observe.step_log import StepClock, StepLog
from fsdp_trainer.optim.offload.offloaded_optimizer import DiskOptimizer
from fsdp_trainer.rl.rounds.reward_scores import open_models
from fsdp_trainer.run.run_lock import are_groups_beside
from fsdp_trainer.training.after_step.garbage import GarbageCollection
from fsdp_trainer.training.after_step.sample_prompts import Samples, encode_prompts
from fsdp_trainer.training.after_step.saving import CheckpointManager, CopyCheck
from fsdp_trainer.training.after_step.state_disk_note import StateDiskNote
from fsdp_trainer.training.after_step.step_logging import SkipLimit, StepLogging
from fsdp_trainer.training.after_step.stop_check import StopCheck, assumed_save_seconds
from fsdp_trainer.training.after_step.task_evaluation import TrainingTasks
from fsdp_trainer.training.after_step.timetable import Timetable
from fsdp_trainer.training.after_step.train_state import TrainState
from fsdp_trainer.training.after_step.validation import Validation
from fsdp_trainer.training.compilations import CompilationLog
from fsdp_trainer.training.corruption import Corruption, ranks_with_copies
from fsdp_trainer.training.data_source import StoredRows
from fsdp_trainer.training.groups import OneGroup, ReplicaGroups
from fsdp_trainer.training.metrics import MetricWatch
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward
from fsdp_trainer.training.step_runner import StepRunner
from fsdp_trainer.training.trainer import Trainer


@dataclass
class LoopBuilder:
    """Builds a trainer. The fields are what several of its parts are made of.

    progress: where the run begins or resumes. newest: step of the run's own newest checkpoint, -1:
    none.
    """

    setup: RunSetup
    state: TrainState
    progress: Progress
    newest: int
    store: CheckpointStore
    forward_backward: ForwardBackward

    def trainer(self, watch: MetricWatch | None) -> Trainer:
        """Return the trainer. watch: reviews the training method's metrics. Collective.

        Raises UserError.
        """
        setup, state, cfg = self.setup, self.state, self.setup.cfg
        clock, compilations = StepClock(), CompilationLog(setup.observer, setup.compiled)
        timetable = Timetable(state.data, cfg.checkpoint, cfg.train.early_stop)
        corruption = self.corruption()
        groups = self.groups()
        checkpoints = self.checkpoints(corruption, timetable, clock, groups)
        step_log = self.step_log(clock)
        save_seconds = assumed_save_seconds(state.model, setup.dims.ranks)
        stop_check = StopCheck(setup.signals, checkpoints, step_log, save_seconds)
        log = self.logging(step_log, timetable, watch)
        garbage = GarbageCollection(cfg.train.gc_every)
        skip_limit = SkipLimit(
            state.guard, cfg.train.max_skipped, checkpoints, state.model, setup.inputs.init_from
        )
        common = self.forward_backward, timetable, stop_check, log
        runner = StepRunner(
            cfg,
            state.model,
            setup.dims,
            state.optimizer,
            self.forward_backward,
            state.guard,
            groups,
        )
        return Trainer(
            runner=runner,
            corruption=corruption,
            data=state.data,
            progress=self.progress,
            timetable=timetable,
            stoppable=[
                *validations(setup, state.validation, compilations, common),
                *samples(setup, common),
                *task_evaluations(setup, common),
            ],
            after_step=[
                log,
                *state_disk_notes(setup, state),
                skip_limit,
                garbage,
                checkpoints.copies,
                checkpoints,
            ],
            log=log,
            garbage=garbage,
            checkpoints=checkpoints,
            stop_check=stop_check,
            skip_limit=skip_limit,
            signals=setup.signals,
            observer=setup.observer,
            profiler=self.profiler(clock),
            compilations=compilations,
        )

    def corruption(self) -> Corruption:
        """Return the search for silent data corruption. Collective."""
        holders = partial(ranks_with_copies, self.state.model, self.setup.dims)
        every = self.setup.cfg.train.check_every
        return Corruption(every, self.setup.observer.event, holders)

    def checkpoints(
        self, corruption: Corruption, timetable: Timetable, clock: StepClock, groups: ReplicaGroups
    ) -> CheckpointManager:
        return CheckpointManager(
            self.store,
            self.state,
            CopyCheck(corruption, self.state, timetable),
            self.setup.observer,
            clock,
            timetable,
            self.setup.signals,
            self.newest,
            not self.progress.pending,
            groups,
        )

    def groups(self) -> ReplicaGroups:
        """Return this group's membership among those that share the run. Collective."""
        if self.setup.cfg.replicas.method == "none":
            return OneGroup()
        # imports torchft
        from fsdp_trainer.replicas.join import join_groups

        others = partial(are_groups_beside, self.setup.folder, self.setup.cfg.replicas.id)
        return join_groups(self.setup, self.state, self.progress, others)

    def step_log(self, clock: StepClock) -> StepLog:
        # reading metrics from a GPU makes the host wait for it
        every = self.setup.cfg.logging.every or (10 if self.setup.device.type == "cuda" else 1)
        return StepLog(every, self.forward_backward.metrics.size, clock)

    def logging(
        self, step_log: StepLog, timetable: Timetable, watch: MetricWatch | None
    ) -> StepLogging:
        return StepLogging(
            step_log,
            self.forward_backward.metrics,
            self.state.guard,
            self.state.data,
            self.setup.observer,
            timetable,
            rewinds=self.setup.cfg.train.on_spike == "rewind",
            watch=watch,
        )

    def profiler(self, clock: StepClock) -> Profiler:
        world, cfg, folder = self.setup.world, self.setup.cfg.profile, self.setup.folder
        of_node = world.size // world.nodes
        return Profiler(cfg, folder, world.rank, world.size, of_node, self.setup.observer, clock)


def checkpoint_store(setup: RunSetup) -> CheckpointStore:
    """Return the store of the run's checkpoints. Collective."""
    cfg, mirror = setup.cfg, None
    if cfg.checkpoint.mirror and setup.world.main:
        bucket = Bucket(cfg.checkpoint.mirror, str(cfg.run.name))
        report = setup.observer.event, setup.observer.say
        mirror = Uploads(bucket, setup.folder, cfg.checkpoint.keep, *report)
    return CheckpointStore(
        setup.folder,
        setup.cfg.checkpoint,
        setup.timeout,
        setup.write_assets,
        on_commit=lambda event: setup.observer.checkpoint_committed(**event),
        mirror=mirror,
    )


# --- work after a step that a stop may interrupt

CommonParts = tuple[ForwardBackward, Timetable, StopCheck, StepLogging]
"""The first fields of every StoppableWork, in their order."""


def validations(
    setup: RunSetup, rows: StoredRows | None, compilations: CompilationLog, common: CommonParts
) -> list[Validation]:
    if rows is None:
        return []
    cfg = setup.cfg.train
    return [
        Validation(
            *common,
            cfg.validate_every,
            rows,
            bytes_of_targets(setup).to(setup.device),
            is_first=cfg.validate_first is not False,
            min_decrease=cfg.early_stop_delta,
            compilations=compilations,
        )
    ]


def bytes_of_targets(setup: RunSetup) -> Tensor:
    """Return the bytes of each token, [vocabulary]; all 0 if the method predicts no text."""
    sizes = torch.from_numpy(token_bytes(setup.inputs.tokenizer, setup.config.vocab_size))
    return torch.zeros_like(sizes) if setup.cfg.objective.method.scores else sizes


def state_disk_notes(setup: RunSetup, state: TrainState) -> list[StateDiskNote]:
    if isinstance(state.optimizer, DiskOptimizer):
        return [StateDiskNote(state.optimizer, setup.observer)]
    return []


def samples(setup: RunSetup, common: CommonParts) -> list[Samples]:
    """Return the answers to train.sample_prompts; empty without prompts. Raises UserError."""
    cfg, tokenizer = setup.cfg, setup.inputs.tokenizer
    context = setup.config.max_position_embeddings
    prompts = encode_prompts(cfg.train, tokenizer, setup.inputs.template, context)
    every = cfg.train.validate_every
    return [Samples(*common, every, cfg, tokenizer, prompts, setup.device)] if prompts else []


def task_evaluations(setup: RunSetup, common: CommonParts) -> list[TrainingTasks]:
    """Return the evaluation on evaluation.tasks; empty without tasks. Raises UserError."""
    cfg, inputs = setup.cfg, setup.inputs
    if not cfg.evaluation.tasks:
        return []
    open_rewards = partial(open_models, device=setup.device)
    settings = settings_of_model(model_folder(inputs.init_from)) if inputs.init_from else {}
    tasks = Tasks(cfg.evaluation, inputs.tokenizer, inputs.template, open_rewards, settings)
    split = sharded_split(setup.dims, setup.device)
    media = media_reader(cfg.model, cache_root(cfg.data, cfg.run))
    every = cfg.train.evaluate_every
    return [TrainingTasks(*common, every, cfg, tasks, split, setup.device, media)]
