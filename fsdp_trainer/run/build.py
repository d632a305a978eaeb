"""Construction of a trainer from a configuration. Collective: every rank builds its part."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_trainer.base import slots
from fsdp_trainer.base.distributed import gather, run_on_all_ranks
from fsdp_trainer.checkpoint.frozen_weights import (
    Base,
    base_of_new_run,
    base_of_resumed_run,
    base_to_resume,
)
from fsdp_trainer.checkpoint.other_states import OtherStates, load_states, read_states
from fsdp_trainer.checkpoint.state import stored_parameters
from fsdp_trainer.checkpoint.store import CheckpointStore, read_progress
from fsdp_trainer.checkpoint.unread_tensors import Unread, unread_beside
from fsdp_trainer.config.context_methods import ContextChoice, context_method
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import checkpoint_configuration, compile_cache, model_folder, step_of
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.media.kinds import processor_of
from fsdp_trainer.data.order.mixture import Mixture, OrderMaker
from fsdp_trainer.data.store.tokenize_workers import cores
from fsdp_trainer.data.stream.row_stream import StreamedData
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.rollout_link import RolloutLink
from fsdp_trainer.launch.world import World
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.registry import build_method
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.models.attention_choice import AttentionChoice
from fsdp_trainer.models.balance import new_balance
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.outer_step import OuterStep
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.compile import can_compile, without_compiling
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.convert import precompute_float8_scales, scale_after_each_step
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize, reshard
from fsdp_trainer.run.describe import describe, lines_on_states
from fsdp_trainer.run.loop import LoopBuilder, checkpoint_store
from fsdp_trainer.run.mirrored import Mirror
from fsdp_trainer.run.offload_states import offload_states
from fsdp_trainer.run.resume import check_unchanged, find_start, resume_data, warm_up_of_checkpoint
from fsdp_trainer.training.after_step.train_state import TrainState
from fsdp_trainer.training.attention_setup import choose_attention
from fsdp_trainer.training.batches import BatchOptions
from fsdp_trainer.training.data_source import DataSource, Order, SourceContext, StoredRows
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import EmbeddingGradProbe, Guard
from fsdp_trainer.training.loss_scale import LossScale, new_loss_scale
from fsdp_trainer.training.media_loader import MediaLoader
from fsdp_trainer.training.metrics import step_metrics
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_inputs import RunInputs
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward
from fsdp_trainer.training.stopping.stop import StopSignals
from fsdp_trainer.training.streamed_source import StreamedRows
from fsdp_trainer.training.trainer import Trainer
from fsdp_trainer.training.weights import fill, restore, stored_config

SOURCES: dict[type, Callable[[Any, Progress, SourceContext], DataSource]] = {
    Mixture: StoredRows.build,
    StreamedData: StreamedRows.build,
}
"""What makes a data source, by the class of its order of rows."""


UNPACKED = "data   rows hold one document each, as when the run began: a new run packs them"
WORTH_WORKERS = 2000
"""With fewer media, starting processes takes longer than it saves."""


@dataclass
class Start:
    """The point at which a run starts or resumes.

    checkpoint: the one to resume from; None: the run starts at the beginning. newest: step of the
    run's own newest checkpoint, -1: none. changes: keys with other values than in the checkpoint,
    as [then, now]; notes: lines about data that has changed. states: those of another tool that
    the optimizer begins with.
    """

    checkpoint: Path | None
    progress: Progress
    newest: int
    changes: dict[str, list[Any]]
    notes: list[str]
    states: OtherStates | None = None


def build(
    cfg: TrainConfig,
    model_setup: ModelSetup,
    inputs: RunInputs,
    world: World,
    run: Path,
    signals: StopSignals,
    observer: Observer,
    link: RolloutLink | None = None,
) -> tuple[Trainer, Start]:
    """Return a trainer with the state of the run's newest checkpoint, or of the run's beginning.

    link: to the ranks that generate rollouts; None: the training ranks do.
    Raises the same UserError on every rank.
    """
    device = world.device
    layout = Layout(cfg.sharding, world.size, cfg.batch)
    dims = Dims(layout, device.type, parse_duration(cfg.launch.timeout))
    slots.show_coordinates(dims.place)
    slots.count_collectives(dims.collective_counter())  # in all groups that exist at this point
    compiled, why_uncompiled = can_compile(
        cfg.compile, compile_cache(cfg), cfg.activation_checkpoint, device
    )
    setup = RunSetup(cfg, inputs, model_setup, world, dims, compiled, run, signals, observer, link)
    data = data_to_read(setup)
    model = model_to_train(setup, data)
    unread = unread_of_run(setup, model.decoder, data.start) if world.main else None
    if world.main:  # only rank 0 prints them, and describing the data reads all samples
        lines = describe_run(setup, data, model, unread)
        notes = filter(None, [why_uncompiled, model.kernels_note])
        observer.introduce([*lines, *notes, *data.start.notes])
    weights = load_weights(setup, data, model)
    return trainer_of(setup, data, model, weights, unread), data.start


# --- the parts of a run, each built from those before it. Collective


@dataclass(frozen=True)
class DataToRead:
    """The order of the rows that a run reads, and the point at which it starts."""

    store: CheckpointStore
    start: Start
    order: Order
    held_out: Mixture | None

    def source(self, order: Order, context: SourceContext) -> DataSource:
        """Return the training data's rows as this rank reads them."""
        return SOURCES[type(order)](order, self.start.progress, context)


@dataclass(frozen=True)
class ModelToTrain:
    """A training method, this rank's part of its model, without storage, and how it reads rows.

    kernels_note: a line about kernels of layers that mix tokens.
    """

    method: Method
    decoder: Decoder
    attention: AttentionChoice
    context: ContextChoice
    reading: SourceContext
    kernels_note: str | None


@dataclass(frozen=True)
class LoadedWeights:
    """The optimizer of a model whose weights and states are loaded, and what they come from.

    rows: those of the data, with the columns that the method has read or computed; digests: of
    these columns. base: origin of the frozen weights; dtypes: number formats of all weights.
    """

    optimizer: TrainerOptimizer
    loss_scale: LossScale | None
    outer: OuterStep | None
    rows: RunRows
    digests: dict[str, str]
    base: Base | None
    dtypes: dict[str, str]


def data_to_read(setup: RunSetup) -> DataToRead:
    """Return what the run reads, and where it starts. Raises UserError."""
    cfg, config = setup.cfg, setup.config
    store = checkpoint_store(setup)
    checkpoint = find_checkpoint_to_resume(setup, store)
    packs = config.packs and not begun_unpacked(setup, checkpoint)
    order, held_out = orders_of_data(cfg, setup.inputs, config, packs)
    start, order = find_where_to_start(setup, checkpoint, store, order, held_out)
    if config.packs and not packs:
        start.notes.append(UNPACKED)
    return DataToRead(store, start, order, held_out)


def model_to_train(setup: RunSetup, data: DataToRead) -> ModelToTrain:
    """Return the model, without storage, and how its ranks read rows. Raises UserError."""
    rows = RunRows(data.order, data.held_out, setup.cfg.batch.rows)
    method = build_method(setup, rows, data.start.checkpoint)
    model = build_model(setup, method.head_temperature)
    note = use_kernels(setup, model)
    attention, context = attention_of(setup, method.architectures)
    reading = source_context(setup, attention, context, model)
    return ModelToTrain(method, model, attention, context, reading, note)


def describe_run(
    setup: RunSetup, data: DataToRead, model: ModelToTrain, unread: Unread | None
) -> list[str]:
    rows_ahead = data.source(data.order, model.reading)
    parts = unread, model.decoder.whole, rows_ahead, data.start.progress
    return describe(setup, *parts, model.attention, model.context, model.method.about())


def load_weights(setup: RunSetup, data: DataToRead, model: ModelToTrain) -> LoadedWeights:
    """Give the model storage, and load weights and optimizer states. Raises UserError."""
    cfg, decoder, method = setup.cfg, model.decoder, model.method
    allocate(decoder, setup.model_device, setup.device)
    optimizer = build_optimizer(decoder, cfg.optim, cfg.run.seed, setup.dims.stage_group)
    scale_after_each_step(decoder, optimizer, cfg.precision)
    optimizer = offload_states(setup, decoder, optimizer)
    if fuses_update(setup.model_device.type, cfg.train.deterministic):
        optimizer.fuse()
    loss_scale = new_loss_scale(cfg.precision, setup.model_device)
    rows, digests = method.load(decoder, model.reading.options)
    outer = None
    if cfg.replicas.method == "diloco":
        outer = OuterStep(cfg.replicas, stored_parameters(decoder))
    filled = method.start_formats
    base, dtypes = fill_or_restore(setup, decoder, optimizer, loss_scale, outer, data.start, filled)
    if setup.config.by_transformers:
        check_transformers(setup, decoder, model.reading.options.media)
    return LoadedWeights(optimizer, loss_scale, outer, rows, digests, base, dtypes)


def trainer_of(
    setup: RunSetup,
    data: DataToRead,
    model: ModelToTrain,
    weights: LoadedWeights,
    unread: Unread | None,
) -> Trainer:
    method, decoder, start, rows = model.method, model.decoder, data.start, weights.rows
    own_rows = data.source(rows.training, model.reading)
    source = method.source(own_rows, model.reading, decoder, weights.base, weights.dtypes)
    validation = StoredRows.validation(rows.validation, model.reading) if rows.validation else None
    step = build_step(setup, method, decoder, source.source_names, weights.loss_scale)
    guard = Guard(setup.cfg.train, setup.model_device, start.progress)
    state = TrainState(
        decoder,
        weights.optimizer,
        weights.loss_scale,
        guard,
        source,
        validation,
        weights.dtypes,
        weights.base,
        weights.digests,
        unread,
        weights.outer,
    )
    loop = LoopBuilder(setup, state, start.progress, start.newest, data.store, step)
    return loop.trainer(method.watch())


# --- the model and its step


def fuses_update(device_type: str, deterministic: bool) -> bool:
    """Return True if the update may take fewer passes, and round the last bits in another way.

    device_type: where the gradients are.
    """
    return device_type == "cuda" and not deterministic


def unread_of_run(setup: RunSetup, model: Decoder, start: Start) -> Unread | None:
    """Return the tensors that only the folder of the first weights has; None if there are none."""
    named = setup.model_setup.source.folder
    if start.checkpoint and not (named and "model.init_from" in start.changes):
        return unread_beside(model.whole, start.checkpoint)
    return unread_beside(model.whole, named)


def build_model(setup: RunSetup, temperature: float) -> Decoder:
    """Return this rank's part of the model in training, without storage. Collective.

    temperature: divides the logits in training.
    """
    cfg, trained = setup.cfg, setup.model_setup
    model = meta_decoder(trained.config, new_balance(trained.config, cfg.loss, setup.device))
    model.lm_head.chunk_mib = cfg.loss.chunk_mib
    model.lm_head.temperature = temperature
    model.train_mtp(cfg.objective.mtp)
    computation = Computation.of(cfg, setup.compiled)
    return parallelize(model, setup.dims, computation, trained.adapters, trained.freeze)


def use_kernels(setup: RunSetup, model: Any) -> str | None:
    """Let layers that mix tokens use kernels for packed documents if all ranks can; return a line.

    model: a Decoder. None: it has no such layers, or there is no GPU. Collective.
    """
    config = setup.config
    if not config.document_layers or setup.device.type != "cuda":
        return None
    # imports transformers
    from fsdp_trainer.models.hf.boundary_kernels import try_boundaries

    answers = gather(try_boundaries(config, setup.device, setup.cfg.precision.param_dtype))
    chosen = next((each for each in answers if not each.arguments), answers[0])
    model.use_boundaries(chosen.arguments)
    return f"layers {' '.join(config.document_layers)}: {chosen.reason}"


def check_transformers(setup: RunSetup, model: Decoder, media: MediaLoader | None) -> None:
    """Compare a model with transformers' own results. Collective. Raises UserError.

    media: loads those of the data; None if it has none.
    """
    # imports transformers
    from fsdp_trainer.models.hf.start_check import check_model

    with without_compiling(setup.compiled):
        picture = media.processor.example() if media else None
        check_model(model, setup.device, setup.cfg.precision.param_dtype, picture)
    reshard(model)


def fill_or_restore(
    setup: RunSetup,
    model: Decoder,
    optimizer: TrainerOptimizer,
    loss_scale: LossScale | None,
    outer: OuterStep | None,
    start: Start,
    filled: dict[str, str] | None,
) -> tuple[Base | None, dict[str, str]]:
    """Read the state of a checkpoint, or the weights that a new run begins with. Collective.

    filled: their number formats if the model has the latter already; None if it has not. Returns
    the origin of the frozen weights, and the number formats of all weights.
    """
    cfg, trained = setup.cfg, setup.model_setup
    base: Base | None
    if start.checkpoint:
        named = trained.source if "model.init_from" in start.changes else None
        base = base_to_resume(start.checkpoint, named)
        restore(model, optimizer, start.checkpoint, loss_scale, base, outer)
        dtypes = read_progress(start.checkpoint)["dtypes"]
        base = base_of_resumed_run(model, cfg.precision, base, trained.adapters)
    else:
        dtypes = filled or fill(model, trained.source, cfg.precision.param_dtype)
        if start.states:
            vocabulary = stored_config(Path(str(trained.source.folder))).vocab_size
            load_states(model, optimizer, start.states, vocabulary)
        base = base_of_new_run(model, trained.source, cfg.precision, trained.adapters)
        if outer:
            outer.begin()
    if cfg.sharding.tensor > 1:
        # otherwise each rank would scale its part of a matrix separately in the first step
        precompute_float8_scales(model, cfg.precision)
    return base, dtypes


def build_step(
    setup: RunSetup,
    method: Method,
    model: Decoder,
    source_names: list[str],
    loss_scale: LossScale | None,
) -> ForwardBackward:
    """Return the object that runs a step's micro-batches. Collective."""
    sharding, dims = setup.cfg.sharding, setup.dims
    metrics = step_metrics(
        source_names,
        method.objective_differs,
        model.whole.auxiliary_names,
        setup.device,
        model.balance,
        method.metric(),
        has_mtp=model.mtp_weight > 0,
    )
    probe, sync = EmbeddingGradProbe(model), None
    if sharding.pipeline == 1:
        sync = GradientSync(model, sharding.accumulate, dims.sizes["replicate"] > 1)
    objective = method.objective()
    return method.step(StepParts(model, objective, metrics, dims, probe, sync, loss_scale))


# --- data


def orders_of_data(
    cfg: TrainConfig, inputs: RunInputs, config: ModelConfig, packs: bool
) -> tuple[Order, Mixture | None]:
    """Return the order of the training data's rows, and that of the held-out data, if any.

    packs: False: rows hold one document each.
    """
    maker = OrderMaker.of(cfg, config.attention_cost, packs)
    held_out = inputs.data.validation
    order = inputs.data.streamed or maker.training(cfg.data, inputs.data)
    return order, maker.validation(held_out) if held_out else None


def begun_unpacked(setup: RunSetup, checkpoint: Path | None) -> bool:
    """Return True for a checkpoint of a version that did not pack the rows of this model."""
    cfg, config, data = setup.cfg, setup.config, setup.inputs.data
    if not checkpoint or cfg.data.packing != "best_fit":
        return False
    if not (config.document_layers or config.encoder):
        return False
    segments = read_progress(checkpoint).get("segments")
    then = checkpoint_configuration(checkpoint).get("data", {}).get("packing", cfg.data.packing)
    if not segments or data.streamed or then != cfg.data.packing:
        return False
    alone = OrderMaker.of(cfg, config.attention_cost, packs=False).training(cfg.data, data)
    return bool(segments[-1]["key"] == alone.key)


def attention_of(
    setup: RunSetup, readers: list[ModelConfig]
) -> tuple[AttentionChoice, ContextChoice]:
    """Return how attention is computed, and how the ranks of a row divide it. Collective.

    readers: the architectures of all models that read the rows, the trained model's first.
    """
    cfg, config = setup.cfg, setup.config
    part = config.on_tensor_rank(cfg.sharding.tensor)
    context = context_method(cfg.sharding, cfg.batch.seq_len, part)
    attention = choose_attention(cfg, readers, setup.device, setup.compiled, context.method)
    return attention, context


def media_loader(setup: RunSetup, model: Decoder, workers: int) -> MediaLoader | None:
    """Return what loads the media of the rows; None for data without media.

    workers: number of processes if data.workers is null.
    """
    data, folder = setup.inputs.data, setup.inputs.init_from
    stores = [*data.train, *([data.validation] if data.validation else [])]
    media = sum(store.samples_with_media for store in stores)
    if not media or folder is None:
        return None
    if media < WORTH_WORKERS and setup.cfg.data.workers is None:
        workers = 0
    workers = setup.cfg.data.workers or workers
    processor = processor_of(str(model_folder(folder)))
    return MediaLoader(processor, model.media_positions, workers if workers > 1 else 0)


def source_context(
    setup: RunSetup, attention: AttentionChoice, context: ContextChoice, model: Decoder
) -> SourceContext:
    """Return what a data source needs besides its rows."""
    cfg, config, dims, world = setup.cfg, setup.config, setup.dims, setup.world
    workers = min(8, cores() * world.nodes // world.size)
    media = media_loader(setup, model, workers)
    options = batch_options(setup, attention.layout, context.method, media)
    cost = config.attention_cost
    return SourceContext(cfg, options, dims, workers, cost, setup.signals, setup.observer)


def batch_options(
    setup: RunSetup, attention: str, method: str, media: MediaLoader | None
) -> BatchOptions:
    """Return the form of this rank's micro-batches.

    attention: a key of LAYOUTS. method: how ranks that split rows compute attention.
    """
    cfg, config, dims = setup.cfg, setup.config, setup.dims
    return BatchOptions(
        micro_rows=cfg.batch.micro_rows,
        rank=dims.batch_rank,
        ranks=dims.batch_ranks,
        same_rows=dims.same_rows,
        stages=dims.sizes["pipeline"],
        device=setup.device,
        mark_tokens=EXPERTS in config.feed_forwards,
        pad_to_multiple=cfg.data.pad_to_multiple,
        context=context_ranks(dims, method, config.windows),
        attention=attention,
        pooling=config.pooling or ("last" if config.scores and not config.tags else ""),
        number_documents=cfg.objective.compares_answers or config.tags,
        media=media,
    )


def new_start(setup: RunSetup) -> Start:
    """Return the start of a new run, after the last step of another tool's states if it has some.

    Collective. Raises UserError.
    """
    cfg = setup.cfg
    path = cfg.optim.init_from
    if path is None:
        return Start(None, Progress(), -1, {}, [])
    found: list[OtherStates] = []

    def read() -> None:
        found.append(read_states(Path(path), setup.config))

    run_on_all_ranks(f"read {path}", read)
    (states,) = found
    last = cfg.train.steps
    if last is not None and last <= states.step:
        more = f"train.steps={last + states.step}"
        reason = (
            f"the states in {path} are of step {states.step:,}, and steps count on from there.\n"
            f"To train as many more:  {more}"
        )
        raise UserError("there is nothing left to train", f"train.steps={last}", reason)
    progress = Progress(step=states.step, first_step=states.step)
    rate = None
    if last is not None:
        peak = peak_learning_rate(cfg.optim, cfg.batch)
        rate = learning_rate(cfg.schedule, peak, states.step + 1, last)
    return Start(None, progress, -1, {}, lines_on_states(states, cfg.optim, rate), states)


def find_checkpoint_to_resume(setup: RunSetup, store: CheckpointStore) -> Path | None:
    """Return the checkpoint from which the run goes on, perhaps one of its mirror. Collective."""
    cfg, fetch = setup.cfg, None
    if cfg.checkpoint.mirror:
        patience = parse_duration(cfg.launch.data_timeout)
        place = cfg.checkpoint.mirror, str(cfg.run.name), setup.folder
        mirror = Mirror(*place, cfg.replicas.id, patience, setup.observer.say)
        fetch = partial(mirror.fetch_again, setup.world)
    return find_start(cfg.checkpoint.resume, store, setup.observer, fetch)


def find_where_to_start(
    setup: RunSetup,
    checkpoint: Path | None,
    store: CheckpointStore,
    order: Order,
    held_out: Mixture | None,
) -> tuple[Start, Order]:
    """Return the start of the run, and the order of rows from there on.

    checkpoint: where it resumes. Collective. Raises UserError.
    """
    if checkpoint is None:
        return new_start(setup), order
    changes = check_unchanged(setup, order, checkpoint)
    stored = read_progress(checkpoint)
    validation = held_out.fingerprint if held_out else None
    progress = Progress.for_data(stored, order.fingerprint, validation)
    order, progress, notes = resume_data(order, progress, stored.get("data"))
    listed = store.listed()
    # False for a checkpoint of another run and for one that is no longer listed
    own = checkpoint.resolve() in [path.resolve() for path in listed]
    if not own:
        progress.forget_validation()
    progress.forget_missing_best([step_of(path) for path in listed])
    progress.settle_warm_up(warm_up_of_checkpoint(setup, changes, progress))
    return Start(checkpoint, progress, progress.step if own else -1, changes, notes), order
