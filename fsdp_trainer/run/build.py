"""Construction of a trainer from a configuration. Collective: every rank builds its part."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base import slots
from fsdp_trainer.checkpoint.assets import write_hf_assets
from fsdp_trainer.checkpoint.frozen_weights import Base, base_of_new_run, base_of_resumed_run
from fsdp_trainer.checkpoint.store import CheckpointStore, read_progress
from fsdp_trainer.config.context_methods import context_method, context_problems
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import compile_cache, model_folder, step_of
from fsdp_trainer.config.rules.rules_objective import (
    base_is_reference,
    frozen_source,
    has_reference,
    has_stored_teacher,
    stores_reference,
)
from fsdp_trainer.config.schema import (
    DISTIL,
    PAIRED,
    PROMPTED,
    SCORED,
    UNPAIRED,
    Adapter,
    Model,
    ObjectiveChoice,
    Train,
    TrainConfig,
)
from fsdp_trainer.config.yaml_text import dump_yaml
from fsdp_trainer.data.order.mixture import Mixture, OrderMaker
from fsdp_trainer.data.stream.row_stream import StreamedData
from fsdp_trainer.data.tokens.token_bytes import token_bytes
from fsdp_trainer.data.tokens.tokenize_workers import cores
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.scoring import sharded_shares
from fsdp_trainer.evaluation.tasks import Tasks
from fsdp_trainer.launch.world import World
from fsdp_trainer.methods.distil_step import DistilForwardBackward
from fsdp_trainer.methods.pair_step import (
    BaseReference,
    PairForwardBackward,
    no_reference,
    stored_reference,
)
from fsdp_trainer.methods.policy_gradient import rollout_figures
from fsdp_trainer.methods.preferences import PairFigures, chosen_watch
from fsdp_trainer.methods.reference_model import ReferenceModel, build_reference
from fsdp_trainer.methods.reward_scores import open_models
from fsdp_trainer.methods.rollout_step import BaseTokens, RolloutForwardBackward
from fsdp_trainer.methods.rollouts import AnswerMaker, RolloutSource
from fsdp_trainer.methods.sampler import AnswerSampler, OwnSampler
from fsdp_trainer.methods.server_sampler import ServerSampler, server_sampler
from fsdp_trainer.methods.stored_columns import ReferenceColumn, RunRows
from fsdp_trainer.methods.stored_teacher import ListedTeacher, TeacherColumn
from fsdp_trainer.methods.teacher import (
    FrozenModel,
    Teacher,
    build_teacher,
    fill_frozen,
    readers,
    record_of_lists,
    require_fitting,
    require_same,
    with_teacher,
)
from fsdp_trainer.methods.unpaired import UnpairedFigures, UnpairedForwardBackward
from fsdp_trainer.models.balance import new_balance
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.resolve import (
    expert_problems,
    resolve_model,
    resolve_with_tokenizer,
)
from fsdp_trainer.models.setup import ModelSetup, WeightSource
from fsdp_trainer.observe.flops import trained_work
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.observe.step_log import StepClock, StepLog
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel.compile import can_compile
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.convert import (
    precompute_float8_scales,
    require_float8,
    scale_after_each_step,
)
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import Alternative, Setup, check_memory
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.rewards.table import make_rewards
from fsdp_trainer.run.describe import describe
from fsdp_trainer.run.resume import Order, check_unchanged, find_start, resume_data
from fsdp_trainer.training.after_step import Timetable
from fsdp_trainer.training.attention_setup import choose_attention
from fsdp_trainer.training.batches import Batches
from fsdp_trainer.training.compilations import CompilationLog
from fsdp_trainer.training.corruption import Corruption, ranks_with_copies
from fsdp_trainer.training.data_source import DataSource, SourceContext, StoredRows
from fsdp_trainer.training.garbage import GarbageCollection
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import EmbeddingGradProbe, Guard
from fsdp_trainer.training.loss_scale import LossScale, new_loss_scale
from fsdp_trainer.training.metrics import AnswerFigures, Metrics, TeacherFigures, step_metrics
from fsdp_trainer.training.objective import build_objective, differs_from_loss
from fsdp_trainer.training.pipeline_step import PipelineForwardBackward
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.run_inputs import RunInputs
from fsdp_trainer.training.sample_prompts import Samples, encode_prompts
from fsdp_trainer.training.saving import CheckpointManager, CopyCheck
from fsdp_trainer.training.step import ForwardBackward
from fsdp_trainer.training.step_logging import SkipLimit, StepLogging
from fsdp_trainer.training.stop import StopSignals
from fsdp_trainer.training.stop_check import StopCheck, assumed_save_seconds
from fsdp_trainer.training.streamed_source import StreamedRows
from fsdp_trainer.training.task_evaluation import TrainingTasks
from fsdp_trainer.training.train_state import TrainState
from fsdp_trainer.training.trainer import Trainer
from fsdp_trainer.training.validation import Validation
from fsdp_trainer.training.weights import fill, require_kept, restore

SOURCES: dict[type, type[DataSource]] = {Mixture: StoredRows, StreamedData: StreamedRows}
"""The class of a data source, by the class of its order of rows."""


PREFERENCE_STEPS = dict.fromkeys(PAIRED, PairForwardBackward)
PREFERENCE_STEPS |= dict.fromkeys(UNPAIRED, UnpairedForwardBackward)
"""The class that runs a step's micro-batches, for each objective on preferences."""


@dataclass
class Start:
    """The point at which a run starts or resumes.

    checkpoint: the one to resume from; None: the run starts at the beginning. newest: step of the
    run's own newest checkpoint, -1: none. changes: keys with other values than in the checkpoint,
    as [then, now]; notes: lines about data that has changed.
    """

    checkpoint: Path | None
    progress: Progress
    newest: int
    changes: dict[str, list[Any]]
    notes: list[str]


def build(
    cfg: TrainConfig,
    setup: ModelSetup,
    inputs: RunInputs,
    world: World,
    run: Path,
    signals: StopSignals,
    observer: Observer,
) -> tuple[Trainer, Start]:
    """Return a trainer with the state of the run's newest checkpoint, or of the run's beginning.

    Raises the same UserError on every rank.
    """
    config, adapters, device = setup.config, setup.adapters, world.device
    model_device = torch.device("cpu") if cfg.sharding.cpu_offload else device
    timeout = parse_duration(cfg.launch.timeout)
    layout = Layout(cfg.sharding, world.size, cfg.batch)
    dims = Dims(layout, device.type, timeout)
    compiled, why_uncompiled = can_compile(
        cfg.compile, compile_cache(cfg), cfg.activation_checkpoint, device
    )
    frozen_model = build_frozen_model(cfg, inputs, setup, dims, compiled)
    with torch.device("meta"):
        model = Decoder(config)
    model.lm_head.chunk_mib = cfg.loss.chunk_mib
    model.lm_head.temperature = temperature(cfg)
    model = parallelize(model, dims, Computation.of(cfg, compiled), adapters, setup.freeze)
    slots.show_coordinates(dims.place)
    slots.count_collectives(dims.collective_counter())  # in all groups that exist at this point
    whole = model.whole
    observer.work = trained_work(whole)

    store = CheckpointStore(
        run,
        cfg.checkpoint,
        timeout,
        partial(write_assets, cfg, inputs, config),
        on_commit=lambda event: observer.checkpoint_committed(**event),
    )
    maker = OrderMaker.of(cfg, config.attention_cost)
    order = inputs.data.streamed or maker.training(cfg.data, inputs.data)
    held_out = None
    if inputs.data.validation:
        held_out = maker.validation(inputs.data.validation)
    start, order = find_where_to_start(cfg, store, observer, order, held_out)
    rows = RunRows(order, held_out, cfg.batch.rows)
    further, rows = listed_teacher(
        cfg, inputs, config, world, dims, rows, observer, start, signals, frozen_model
    )
    share = order.attention_cost_share(config.attention_cost)
    part = config.on_tensor_rank(cfg.sharding.tensor)
    context = context_method(cfg.sharding, cfg.batch.seq_len, part)
    attention = choose_attention(
        cfg, readers(config, frozen_model), share, device, compiled, context.method
    )
    answers = answer_maker(cfg, model, inputs, dims, device, run)
    context_of_rows = SourceContext(
        cfg,
        {
            "micro_rows": cfg.batch.micro_rows,
            "rank": dims.batch_rank,
            "ranks": dims.batch_ranks,
            "same_rows": dims.same_rows,
            "stages": dims.sizes["pipeline"],
            "device": device,
            "mark_tokens": EXPERTS in config.feed_forwards,
            "pad_to_multiple": cfg.data.pad_to_multiple,
            "context": context_ranks(dims, context.method, config.windows),
            "attention": attention.layout,
            "last_tokens": cfg.objective.name in SCORED,
            "number_documents": cfg.objective.name in (*PAIRED, *UNPAIRED),
        },
        dims,
        min(8, cores() * world.nodes // world.size),
        config.attention_cost,
        signals,
        observer,
        answers,
    )
    if world.main:  # only rank 0 prints them, and describing the data reads all samples
        data = data_source(cfg, rows.training, start.progress, context_of_rows)
        lines = describe(
            cfg, setup, whole, data, start.progress, inputs, world, dims, attention, context, run
        )
        lines += [why_uncompiled] if why_uncompiled else []
        observer.introduce([*lines, *start.notes])

    digests = fill_frozen(
        frozen_model, cfg, start.checkpoint, model_device, device, inputs.teacher_files
    )
    allocate(model, model_device, device)
    model.balance = balance = new_balance(config, cfg.loss, device)
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, dims.stage_group)
    scale_after_each_step(model, optimizer, cfg.precision)
    loss_scale = new_loss_scale(cfg.precision, model_device)
    batches = partial(Batches, **context_of_rows.assembler)
    column = ReferenceColumn(cfg, rows, dims, observer.say, model, batches)
    rows, reference = with_reference(column, setup.source, start.checkpoint)
    if start.checkpoint:
        restore(model, optimizer, start.checkpoint, loss_scale)
        dtypes = read_progress(start.checkpoint)["dtypes"]
        base = base_of_resumed_run(model, cfg.precision, start.checkpoint, adapters)
    else:
        dtypes = fill(model, setup.source, cfg.precision.param_dtype)
        base = base_of_new_run(model, setup.source, cfg.precision, adapters)
    describe_weights(answers, base, dtypes)
    if cfg.sharding.tensor > 1:
        # otherwise each rank would scale its part of a matrix separately in the first step
        precompute_float8_scales(model, cfg.precision)

    data = data_source(cfg, rows.training, start.progress, context_of_rows)
    held_out = rows.validation
    validation = StoredRows.validation(held_out, context_of_rows) if held_out else None
    differs = differs_from_loss(cfg.objective.name, cfg.loss)
    clock, progress = StepClock(), start.progress
    figures = figures_of(cfg.objective, dims)
    answer_figures = rollout_figures(cfg.objective)
    names = whole.auxiliary_names
    metrics = step_metrics(
        data.source_names, differs, names, device, balance, figures, answer_figures
    )
    forward_backward = build_step(cfg, model, metrics, dims, world, loss_scale, further)
    guard = Guard(cfg.train, model_device, progress.recent, progress.spikes_in_a_row)
    holders = partial(ranks_with_copies, model, dims)
    corruption = Corruption(cfg.train.check_every, observer.event, holders)
    # reading metrics from a GPU makes the host wait for it
    every = cfg.logging.every or (10 if device.type == "cuda" else 1)
    step_log = StepLog(every, metrics.size, clock)
    timetable = Timetable(data, cfg.checkpoint, cfg.train.early_stop)
    state = TrainState(
        model,
        optimizer,
        loss_scale,
        guard,
        data,
        validation,
        dtypes,
        base,
        digests={"reference": reference, **digests},
    )
    checkpoints = CheckpointManager(
        store,
        state,
        CopyCheck(corruption, state, timetable),
        observer,
        clock,
        timetable,
        signals,
        start.newest,
        not progress.pending,
    )
    stop_check = StopCheck(signals, checkpoints, step_log, assumed_save_seconds(model, dims.ranks))
    log = StepLogging(
        step_log,
        metrics,
        guard,
        data,
        observer,
        timetable,
        rewinds=cfg.train.on_spike == "rewind",
        chosen_watch=chosen_watch(cfg.objective),
    )
    compilations = CompilationLog(observer, compiled)
    garbage = GarbageCollection(cfg.train.gc_every)
    shared = forward_backward, timetable, stop_check, log
    target_bytes = bytes_of_targets(cfg, inputs, config).to(device)
    trainer = Trainer(
        cfg=cfg,
        model=model,
        dims=dims,
        optimizer=optimizer,
        forward_backward=forward_backward,
        guard=guard,
        corruption=corruption,
        data=data,
        progress=progress,
        timetable=timetable,
        stoppable=[
            *validations(cfg.train, validation, target_bytes, compilations, shared),
            *samples(cfg, inputs, config, device, shared),
            *task_evaluations(cfg, inputs, dims, device, shared),
        ],
        after_step=[
            log,
            SkipLimit(guard, cfg.train.max_skipped, checkpoints),
            garbage,
            checkpoints.copies,
            checkpoints,
        ],
        log=log,
        garbage=garbage,
        checkpoints=checkpoints,
        stop_check=stop_check,
        signals=signals,
        observer=observer,
        profiler=Profiler(
            cfg.profile, run, world.rank, world.size, world.size // world.nodes, observer, clock
        ),
        compilations=compilations,
    )
    return trainer, start


def listed_teacher(
    cfg: TrainConfig,
    inputs: RunInputs,
    config: ModelConfig,
    world: World,
    dims: Dims,
    rows: RunRows,
    observer: Observer,
    start: Start,
    signals: StopSignals,
    in_memory: FrozenModel | None,
) -> tuple[FrozenModel | ListedTeacher | None, RunRows]:
    """Return a ListedTeacher, and the rows with its columns.

    Returns `in_memory` if no lists are stored for this run. Collective. Raises UserError. start:
    the start of the run; a checkpoint must have been trained with the same teacher.
    """
    if inputs.frozen_model is None or inputs.teacher_files is None:
        return in_memory, rows

    def leave_if_agreed() -> None:
        signals.sync()
        signals.raise_if_agreed()

    require_same(Teacher, cfg, start.checkpoint, record_of_lists(inputs.teacher_files))
    column = TeacherColumn(
        cfg=cfg,
        rows=rows,
        source=inputs.frozen_model,
        student=config,
        dims=dims,
        world=world,
        say=observer.say,
        progress=observer.console.paced(),
        check=leave_if_agreed,
    )
    rows = column.prepare(inputs.teacher_files)
    return ListedTeacher(cfg.objective, column.vocabulary), rows


def with_reference(
    column: ReferenceColumn, start: WeightSource, checkpoint: Path | None
) -> tuple[RunRows, str | None]:
    """Return the rows with a stored reference, if the run has one, and its digest.

    See ReferenceColumn.of_run. Collective.
    """
    if not stores_reference(column.cfg):
        return column.rows, None
    return column.of_run(start, checkpoint)


def build_step(
    cfg: TrainConfig,
    model: Decoder,
    metrics: Metrics,
    dims: Dims,
    world: World,
    loss_scale: LossScale | None,
    frozen_model: FrozenModel | ListedTeacher | None = None,
) -> ForwardBackward:
    """Return the object that runs a step's micro-batches. Collective."""
    objective = build_objective(cfg.objective, cfg.loss)
    probe = EmbeddingGradProbe(model)
    if cfg.sharding.pipeline == 1:
        sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
        parts = model, objective, metrics, dims, probe, sync, loss_scale
        if cfg.objective.name in PREFERENCE_STEPS:
            return PREFERENCE_STEPS[cfg.objective.name](
                *parts,
                figures_of(cfg.objective, dims),
                choice=cfg.objective,
                reference=reference_of(cfg, model, dims),
            )
        if cfg.objective.name in PROMPTED:
            of_tokens = reference_of_tokens(cfg, model, frozen_model)
            return RolloutForwardBackward(*parts, choice=cfg.objective, reference=of_tokens)
        if isinstance(frozen_model, Teacher | ListedTeacher):
            return DistilForwardBackward(
                *parts, figures_of(cfg.objective, dims), teacher=frozen_model
            )
        return ForwardBackward(*parts)
    dtype = getattr(torch, cfg.precision.param_dtype)
    pipeline = Pipeline(model, dims, dtype, world.device)
    return PipelineForwardBackward(
        model, objective, metrics, dims, probe, loss_scale=loss_scale, pipeline=pipeline
    )


def figures_of(cfg: ObjectiveChoice, dims: Dims) -> AnswerFigures | None:
    """Return the metrics of an objective's compared answers or of its teacher, if it has any."""
    if cfg.name == DISTIL:
        return TeacherFigures()
    if cfg.name in UNPAIRED:
        return UnpairedFigures(cfg, dims)
    return PairFigures(cfg, dims) if cfg.name in PAIRED else None


def data_source(
    cfg: TrainConfig, order: Order, progress: Progress, context: SourceContext
) -> DataSource:
    """Return the source of the micro-batches."""
    if cfg.objective.name in PROMPTED:
        assert isinstance(order, Mixture)
        return RolloutSource.build(order, progress, context)
    return SOURCES[type(order)].build(order, progress, context)


def temperature(cfg: TrainConfig) -> float:
    """Return the temperature that divides the logits in training: the one used for sampling."""
    return cfg.objective.temperature if cfg.objective.name in PROMPTED else 1.0


def answer_maker(
    cfg: TrainConfig,
    model: Decoder,
    inputs: RunInputs,
    dims: Dims,
    device: torch.device,
    run: Path,
) -> AnswerMaker | None:
    """Return the object that answers prompts and scores the answers.

    None if the objective has no prompts. Collective. Raises UserError for a server that cannot be
    used.
    """
    if cfg.objective.name not in PROMPTED:
        return None
    shares = sharded_shares(dims, device)
    is_first = dims.coordinates["tensor"] == 0
    sampler: AnswerSampler
    if cfg.objective.server:
        assets = partial(write_assets, cfg, inputs, model.config)
        sampler = server_sampler(cfg, model, inputs.tokenizer, run, is_first, assets)
    else:
        sampler = OwnSampler(cfg, model, inputs.tokenizer, shares, device)
    rewards = open_models(make_rewards(cfg.objective.rewards), device)
    return AnswerMaker(sampler, rewards, inputs.tokenizer, shares.share, shares.shares, is_first)


def describe_weights(
    answers: AnswerMaker | None, base: Base | None, dtypes: dict[str, str]
) -> None:
    """Set the origin and formats of the weights that are sent to a server: see PolicyWeights."""
    sampler = answers.sampler if answers else None
    if isinstance(sampler, ServerSampler):
        sampler.weights.describe(base, dtypes)


def bytes_of_targets(cfg: TrainConfig, inputs: RunInputs, config: ModelConfig) -> torch.Tensor:
    """Return the bytes of each token, [vocabulary]; all 0 if the objective predicts no text."""
    sizes = torch.from_numpy(token_bytes(inputs.tokenizer, config.vocab_size))
    return torch.zeros_like(sizes) if cfg.objective.name in SCORED else sizes


def reference_of(
    cfg: TrainConfig, model: Decoder, dims: Dims
) -> Callable[[MicroBatch], MicroBatch]:
    """Return a function that adds the reference's sums to a micro-batch of pairs."""
    if not has_reference(cfg.objective):
        return no_reference
    return BaseReference(model, dims) if base_is_reference(cfg) else stored_reference


def reference_of_tokens(
    cfg: TrainConfig, model: Decoder, frozen_model: FrozenModel | ListedTeacher | None
) -> Callable[[MicroBatch], Tensor] | None:
    """Return a function for the reference's log-probabilities of answers; None: no reference."""
    if isinstance(frozen_model, ReferenceModel):
        return frozen_model
    return BaseTokens(model) if has_reference(cfg.objective) else None


def build_frozen_model(
    cfg: TrainConfig,
    inputs: RunInputs,
    setup: ModelSetup,
    dims: Dims,
    compiled: bool,
) -> FrozenModel | None:
    """Return the second, frozen model of the run, without weights; None: there is none.

    Collective.
    """
    reference = build_reference(cfg, inputs.frozen_model, setup, dims, compiled)
    return reference or build_teacher(cfg, inputs.frozen_model, setup.config, dims, compiled)


def check_room(
    cfg: TrainConfig, init_from: Path | None, world: World, frozen_model: Path | None = None
) -> None:
    """Check that the ranks can train this model. Called before data or weights are read.

    Raises UserError for a layout that does not fit the number of ranks, number formats that the
    device lacks, or a model that cannot fit in memory. frozen_model: the folder of a teacher or
    reference, if there is one.
    """
    layout = Layout(cfg.sharding, world.size, cfg.batch)
    if layout.problem:
        raise UserError("the mesh does not divide", [layout.problem])
    if layout.pipeline_problem:
        raise UserError("a step is too small for the pipeline", [layout.pipeline_problem])
    require_float8(cfg.precision, world.device)
    config = resolve_model(fetched_model(cfg, init_from))
    source = WeightSource.of(cfg.model, cfg.adapter, init_from, cfg.run.seed)
    setup = ModelSetup.resolve(config, cfg.adapter, cfg.train.freeze, source)
    ranks, adapters = cfg.sharding.tensor, setup.adapters
    moments = moments_format(cfg.optim, cfg.precision.master_dtype)
    problems = setup.tensor_problems(ranks, cfg.batch.seq_len, moments)
    shared = context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, config)
    if problems := [*problems, *shared]:
        raise UserError("the ranks cannot share the model and its rows like this", problems)
    if problems := list(expert_problems(config, cfg.sharding, cfg.loss, adapters is not None)):
        raise UserError("the ranks cannot divide experts like this", problems)
    if frozen_source(cfg) and not has_stored_teacher(cfg):
        require_fitting(cfg, *with_teacher(config, frozen_model, cfg.sharding.tensor))
    states = Setup(layout, cfg.precision, cfg.optim, adapters)
    require_kept(setup)
    check_memory(setup.model, states, world.device, lambda: adapted_models(setup))


def adapted_models(setup: ModelSetup) -> list[Alternative]:
    """Return adapters to suggest in place of fine-tuning all weights; empty if none apply."""
    if setup.source.folder is None or setup.adapters is not None:
        return []
    models = []
    for option, base in (("lora", "auto"), ("qlora", "nf4")):
        with suppress(UserError):  # a rank that is too high for the model
            adapter = Adapter(name="lora", base=base)
            adapted = ModelSetup.resolve(setup.config, adapter, setup.freeze)
            models.append(Alternative(f"adapter={option}", adapted.model, adapted.adapters))
    return models


def resolve_setup(cfg: TrainConfig, inputs: RunInputs) -> ModelSetup:
    """Return the model to train, its adapters and what is frozen. Raises UserError.

    The process hands it on to all that need to know.
    """
    config = resolve_architecture(cfg, inputs)
    source = WeightSource.of(cfg.model, cfg.adapter, inputs.init_from, cfg.run.seed)
    return ModelSetup.resolve(config, cfg.adapter, cfg.train.freeze, source)


def resolve_architecture(cfg: TrainConfig, inputs: RunInputs) -> ModelConfig:
    """Return the model's configuration, checked against the tokenizer. Raises UserError.

    The vocabulary is padded so that each rank of a tensor group has equally many rows of it, and as
    many as of the vocabulary of a frozen model, if there is one.
    """
    model, grows = fetched_model(cfg, inputs.init_from), bool(cfg.tokenizer.add_tokens)
    config = resolve_with_tokenizer(model, inputs.tokenizer.vocab_size, grows)
    config = with_head(config, cfg)
    if inputs.frozen_model:
        return with_teacher(config, inputs.frozen_model, cfg.sharding.tensor)[0]
    return config.with_equal_rows(cfg.sharding.tensor)


def with_head(config: ModelConfig, cfg: TrainConfig) -> ModelConfig:
    """Return the architecture with the head that the objective trains.

    Raises UserError for a reward model if the objective trains on text.
    """
    if cfg.objective.name in SCORED:
        return config.as_reward_model()
    if config.scalar_head:
        what = f"model.init_from={cfg.model.init_from}"
        reason = "is a reward model, which has a head for scores alone.\nUse  objective=reward"
        raise UserError("the model writes no text", [Problem(what, reason)])
    return config


def fetched_model(cfg: TrainConfig, init_from: Path | None) -> Model:
    """Return cfg.model with the folder that model.init_from was fetched to."""
    return replace(cfg.model, init_from=str(init_from) if init_from else None)


# --- work after a step

Shared = tuple[ForwardBackward, Timetable, StopCheck, StepLogging]
"""The parts of every StoppableWork."""


def validations(
    cfg: Train,
    rows: StoredRows | None,
    token_bytes: Tensor,
    compilations: CompilationLog,
    shared: Shared,
) -> list[Validation]:
    """Return the validation; empty without a validation set."""
    if rows is None:
        return []
    return [
        Validation(
            *shared,
            cfg.validate_every,
            rows,
            token_bytes,
            is_first=cfg.validate_first is not False,
            min_decrease=cfg.early_stop_delta,
            compilations=compilations,
        )
    ]


def samples(
    cfg: TrainConfig, inputs: RunInputs, config: ModelConfig, device: torch.device, shared: Shared
) -> list[Samples]:
    """Return the answers to train.sample_prompts; empty without prompts. Raises UserError."""
    context, tokenizer = config.max_position_embeddings, inputs.tokenizer
    prompts = encode_prompts(cfg.train, tokenizer, inputs.template, context)
    every = cfg.train.validate_every
    return [Samples(*shared, every, cfg, tokenizer, prompts, device)] if prompts else []


def task_evaluations(
    cfg: TrainConfig, inputs: RunInputs, dims: Dims, device: torch.device, shared: Shared
) -> list[TrainingTasks]:
    """Return the evaluation on evaluation.tasks; empty without tasks. Raises UserError."""
    if not cfg.evaluation.tasks:
        return []
    tasks = Tasks(cfg.evaluation, inputs.tokenizer, inputs.template)
    shares = sharded_shares(dims, device)
    return [TrainingTasks(*shared, cfg.train.evaluate_every, cfg, tasks, shares, device)]


# --- data


def find_where_to_start(
    cfg: TrainConfig,
    store: CheckpointStore,
    observer: Observer,
    order: Order,
    held_out: Mixture | None,
) -> tuple[Start, Order]:
    """Return the start of the run, and the order of rows from there on.

    Collective. Raises UserError.
    """
    checkpoint = find_start(cfg.checkpoint.resume, store, observer)
    if checkpoint is None:
        return Start(None, Progress(), -1, {}, []), order
    changes = check_unchanged(cfg, order, checkpoint)
    stored = read_progress(checkpoint)
    validation = held_out.fingerprint if held_out else None
    progress = Progress.for_data(stored, order.fingerprint, validation)
    order, progress, notes = resume_data(order, progress, stored["data"])
    listed = store.listed()
    # False for a checkpoint of another run and for one that is no longer listed
    own = checkpoint.resolve() in [path.resolve() for path in listed]
    if not own:
        progress.forget_validation()
    progress.forget_missing_best([step_of(path) for path in listed])
    return Start(checkpoint, progress, progress.step if own else -1, changes, notes), order


def write_assets(
    cfg: TrainConfig, inputs: RunInputs, config: ModelConfig, folder: Path, state: dict[str, Any]
) -> None:
    """Write the configuration and a Hugging Face folder without weights into a checkpoint."""
    (folder / "config.yaml").write_text(dump_yaml(asdict(cfg)))
    source = model_folder(inputs.init_from) if inputs.init_from else None
    chosen = cfg.data.template or cfg.data.template_args
    as_it_came = inputs.tokenizer.chat_templates and not chosen
    template = None if as_it_came else inputs.template.exported
    dtype = state["dtypes"]["default"]
    write_hf_assets(folder / "hf", config, inputs.tokenizer, template, dtype, source)
