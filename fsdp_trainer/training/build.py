"""From a configuration to a trainer, in the order in which data flows. Collective: every rank builds its part."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.assets import write_hf_assets
from fsdp_trainer.checkpoint.huggingface import import_weights
from fsdp_trainer.checkpoint.state import (
    WEIGHTS,
    optimizer_state,
    prepare_optimizer,
    stored_tensors,
    weights,
)
from fsdp_trainer.checkpoint.store import CheckpointStore, everywhere, load, read_progress
from fsdp_trainer.config.paths import find_checkpoint, model_folder, step_of
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.data.build import renumbered
from fsdp_trainer.data.mixture import Mixture, build_order, validation_order
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.stream import StreamedData
from fsdp_trainer.data.summary import two_lines
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.data.workers import cores
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.models.attention_choice import Choice, choose
from fsdp_trainer.models.attention_kernels import describe_device, prefer
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.resolve import resolve_model, resolve_with_tokenizer
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.schedules import peak_learning_rate
from fsdp_trainer.parallel.compile import Compilations, can_compile
from fsdp_trainer.parallel.convert import float8_layers, require_float8, scale_after_each_step
from fsdp_trainer.parallel.fit import check_fit
from fsdp_trainer.parallel.materialize import allocate, draw_weights, grow_vocabulary
from fsdp_trainer.parallel.mesh import build_mesh, collectives_begun
from fsdp_trainer.parallel.parallelize import parallelize
from fsdp_trainer.training.batches import Batches
from fsdp_trainer.training.corruption import Corruption
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import Guard, Stream
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.resume import check_unchanged, find_start, require_whole, take_up_data
from fsdp_trainer.training.samples import Samples
from fsdp_trainer.training.saving import Saves
from fsdp_trainer.training.stop import StopRequests
from fsdp_trainer.training.streaming import StreamBatches
from fsdp_trainer.training.trainer import Trainer

SHOWN = 5  # parameters that are not the checkpoint's


@dataclass
class Material:
    """What a run is made of, ready on this machine. init_from: model.init_from, fetched."""

    tokenizer: TextTokenizer
    template: Template
    data: Prepared
    init_from: Path | None


def build(
    cfg: TrainConfig, material: Material, world: World, run: Path, stop: StopRequests
) -> Trainer:
    """A trainer that stands where the run's newest checkpoint does, or at its beginning. Raises UserError on every rank alike."""
    config = resolve_architecture(cfg, material)
    mesh = build_mesh(cfg.sharding, world.device.type)
    phases.count_collectives(collectives_begun(mesh))
    with torch.device("meta"):
        model = Decoder(config)
    model.lm_head.chunk_mib = cfg.loss.chunk_mib
    compiled, uncompiled = can_compile(cfg, world.device)
    model = parallelize(model, mesh, cfg, compiled)

    def batches(order: Mixture) -> Batches:
        return Batches(
            order,
            cfg.batch.micro_rows,
            world.rank,
            world.size,
            world.device,
            cfg.data.pad_to_multiple,
        )

    streamed = material.data.streamed
    train: Batches
    if streamed:
        processes = cfg.data.workers or min(8, cores() * world.nodes // world.size)
        place = cfg.batch.micro_rows, world.rank, world.size, world.device
        train = StreamBatches(
            streamed, *place, config.attended, processes, cfg.data.pad_to_multiple
        )
    else:
        train = batches(build_order(cfg, material.data, config.attended))
    held_out = material.data.validation
    validation = batches(validation_order(cfg, held_out, config.attended)) if held_out else None
    attention = choose_attention(
        cfg, config, attended_share(train.order, config), world.device, compiled
    )
    for part in filter(None, (train, validation)):
        part.attention = attention.layout
    total_steps, last_row = length_of_run(cfg, 0 if streamed else train.order.rows_per_epoch)
    every = cfg.logging.every or (10 if world.device.type == "cuda" else 1)
    more = bool(cfg.loss.label_smoothing or cfg.loss.z_loss)
    observer = Observer(
        run,
        world.main,
        world.device,
        config,
        cfg.batch.seq_len,
        every,
        total_steps,
        train.source_names,
        more,
    )
    observer.suspects, observer.on_spike = train.suspects, cfg.train.on_spike
    dtypes: dict[str, str] = {}
    checkpoints = CheckpointStore(
        run,
        cfg.checkpoint,
        parse_duration(cfg.launch.timeout),
        assets_writer(cfg, material, config, dtypes),
        committed=lambda told: observer.event("checkpoint", **told),
    )
    start = find_start(cfg, checkpoints, observer)
    changes = check_unchanged(cfg, train.order, start) if start else {}

    allocate(model, torch.device("cpu") if cfg.sharding.cpu_offload else world.device)
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed)
    scale_after_each_step(model, optimizer, cfg.precision)
    trainer = Trainer(
        cfg=cfg,
        model=model,
        optimizer=optimizer,
        guard=Guard(cfg.train, torch.device("cpu") if cfg.sharding.cpu_offload else world.device),
        stream=Stream(model),
        corruption=Corruption(observer.event),
        gradient_sync=GradientSync(
            model, cfg.sharding.accumulate, replicated="replicate" in (mesh.mesh_dim_names or ())
        ),
        batches=train,
        validation=validation,
        samples=Samples(
            cfg, material.tokenizer, material.template, world.device, config.max_position_embeddings
        ),
        progress=Progress(),
        total_steps=total_steps,
        last_row=last_row,
        saves=Saves(checkpoints, observer),
        dtypes=dtypes,
        observer=observer,
        profiler=Profiler(cfg.profile, run, world, observer),
        stop=stop,
        changes=changes,
        compilations=Compilations() if compiled else None,
    )
    told = take_up(trainer, start) if start else []
    if world.main:  # who alone is heard: it looks through all samples
        observer.about = [
            *describe(trainer, world, material, attention),
            *([uncompiled] if uncompiled else []),
            *told,
        ]
        for line in observer.about:
            observer.console.say(line)
    if start:
        restore(trainer, start)
    else:
        dtypes |= fill(model, cfg, material.init_from)
    return trainer


def check_room(cfg: TrainConfig, init_from: Path | None, world: World) -> None:
    """Refuse number formats that the device lacks, and a model whose states cannot fit, before data or weights are read. Raises UserError."""
    require_float8(cfg.precision, world.device)
    model = cfg.model if init_from is None else replace(cfg.model, init_from=str(init_from))
    with torch.device("meta"):
        check_fit(
            Decoder(resolve_model(model)),
            cfg.sharding,
            cfg.precision,
            cfg.optim,
            world.size,
            world.device,
        )


def resolve_architecture(cfg: TrainConfig, material: Material) -> ModelConfig:
    """The model's configuration, checked against the tokenizer."""
    model = (
        cfg.model
        if material.init_from is None
        else replace(cfg.model, init_from=str(material.init_from))
    )
    return resolve_with_tokenizer(
        model, material.tokenizer.vocab_size, bool(cfg.tokenizer.add_tokens)
    )


def choose_attention(
    cfg: TrainConfig, config: ModelConfig, share: float, device: torch.device, compiled: bool
) -> Choice:
    """How attention is computed, settled for this process. Raises UserError for what this machine or model does not allow."""
    situation = replace(
        describe_device(device),
        dtype=cfg.precision.param_dtype,
        head_dim=config.head_dim,
        softcap=config.attn_logit_softcapping is not None,
        windowed=any(
            window is not None and window < cfg.batch.seq_len for window in config.windows
        ),
        compiled=compiled,
        selective=cfg.activation_checkpoint.mode == "selective",
        share=share,
    )
    choice = choose(cfg.model.attention, cfg.model.attention_kernel, situation)
    prefer(
        choice,
        config,
        getattr(torch, cfg.precision.param_dtype),
        device,
        asked=cfg.model.attention_kernel != "auto",
    )
    return choice


def attended_share(order: Mixture | StreamedData, config: ModelConfig) -> float:
    """What attention costs of what it would if every row were one document."""
    if isinstance(order, StreamedData):
        return config.attended(order.lengths).sum() / (order.lengths.sum() * order.seq_len)
    of_rows = [
        of.totals(0, of.rows_per_epoch)[3] / of.rows_per_epoch for of in order.orders
    ]  # of one epoch: small sources have thousands
    return (
        sum(share * squares for share, squares in zip(order.shares, of_rows, strict=True))
        / order.seq_len**2
    )


def length_of_run(cfg: TrainConfig, rows_per_epoch: int) -> tuple[int, int | None]:
    """Optimizer steps in all, and the row at which the data ends (None where steps are what counts)."""
    if cfg.train.steps is not None:
        return cfg.train.steps, None
    last = last_row(cfg, rows_per_epoch, [])
    return math.ceil(last / cfg.batch.rows), last


def last_row(cfg: TrainConfig, rows_per_epoch: int, segments: list[dict[str, Any]]) -> int:
    """Where train.epochs end: what earlier segments have done of them, by their own measure, is done. Streams have no epochs."""
    measured = [(before, after) for before, after in pairwise(segments) if before["rows_per_epoch"]]
    done = [
        Fraction(after["start"] - before["start"], before["rows_per_epoch"])
        for before, after in measured
    ]
    start = segments[-1]["start"] if segments else 0
    return start + max(0, math.ceil(((cfg.train.epochs or 1) - sum(done)) * rows_per_epoch))


def fill(model: Decoder, cfg: TrainConfig, init_from: Path | None) -> dict[str, str]:
    """Weights at the start. Returns the number formats of the export: by parameter, and for all others `default`."""
    default = cfg.precision.param_dtype
    if init_from is None:
        draw_weights(model, cfg.run.seed)
        return {"default": default}
    checkpoint = find_checkpoint(init_from)
    if checkpoint:
        require_whole(checkpoint)
        load(checkpoint, weights(model))
    else:
        formats: dict[str, str] = {}
        everywhere("read the weights", lambda: formats.update(import_weights(model, init_from)))
    known = ModelConfig.from_hf(model_folder(init_from)).vocab_size
    if model.config.embedding_rows > known:
        grow_vocabulary(model, known)
    if checkpoint:
        return read_progress(checkpoint)["dtypes"]
    default = max(set(formats.values()), key=list(formats.values()).count)
    return {"default": default} | {
        name: found for name, found in formats.items() if found != default
    }


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Weights and optimizer state as they were, on any number of ranks. Raises UserError for weights of other shapes."""
    require_shapes(trainer.model, checkpoint)
    prepare_optimizer(trainer.model, trainer.optimizer, str(checkpoint))
    load(checkpoint, weights(trainer.model) | optimizer_state(trainer.model, trainer.optimizer))


def take_up(trainer: Trainer, checkpoint: Path) -> list[str]:
    """Stand where the checkpoint does, but for weights and optimizer state. Returns what becomes of the data, if it has changed since."""
    kept = read_progress(checkpoint)
    trainer.dtypes |= kept["dtypes"]
    trainer.progress = progress = Progress(
        **{name: kept[name] for name in asdict(Progress()) if name in kept}
    )
    told = take_up_data(trainer.batches.order, progress, kept["data"])
    if trainer.last_row is not None:
        trainer.last_row = last_row(
            trainer.cfg, trainer.batches.order.rows_per_epoch, progress.segments
        )
    if kept["data"] != trainer.fingerprints()["data"]:
        progress.streams = []
        if isinstance(trainer.batches.order, StreamedData):
            told.append("data   the streams begin anew: what was seen may come again")
    trainer.count_steps()
    listed = trainer.saves.store.listed()
    ours = checkpoint.resolve() in [
        path.resolve() for path in listed
    ]  # not one of another run, nor one that was left aside
    trainer.saves.newest = progress.step if ours else -1
    if not ours or kept.get("validation") != trainer.fingerprints()["validation"]:
        progress.forget_validation()
    elif progress.best_step not in [step_of(path) for path in listed]:
        progress.best_step = progress.best_loss = (
            None  # checkpoint.best was off, or the best one is gone
        )
    return told


def require_shapes(model: Decoder, checkpoint: Path) -> None:
    """Raise UserError unless the checkpoint holds the model's parameters, all and no others: its optimizer state would not belong to them."""
    stored = {
        name.removeprefix(WEIGHTS): shape
        for name, shape in stored_tensors(str(checkpoint)).items()
        if name.startswith(WEIGHTS)
    }
    ours = {name: parameter.shape for name, parameter in model.named_parameters()}
    problems = []
    for name in sorted({*stored, *ours}):
        if stored.get(name) != ours.get(name):
            here, there = (
                f"has shape {list(shapes[name])}" if name in shapes else "is not"
                for shapes in (ours, stored)
            )
            problems.append(Problem(name, f"{here} in this model and {there} in the checkpoint"))
    if problems:
        more = f"\n… and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        problems = problems[:SHOWN]
        problems[
            -1
        ].why += f"{more}\nA run cannot change its weights' shapes; a new one can:  run.name=NEW model.init_from={checkpoint}"
        raise UserError(f"the weights are not those of {checkpoint}", problems)


def assets_writer(
    cfg: TrainConfig, material: Material, config: ModelConfig, dtypes: dict[str, str]
) -> Callable[[Path], None]:
    """Writes what a checkpoint holds besides tensors and progress: the configuration, and a Hugging Face folder without weights."""

    def write(folder: Path) -> None:
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False))
        source = model_folder(material.init_from) if material.init_from else None
        template = (
            material.template.source
            if cfg.data.template or not material.tokenizer.chat_template
            else None
        )
        write_hf_assets(
            folder / "hf", config, material.tokenizer, template, dtypes["default"], source
        )

    return write


def describe(trainer: Trainer, world: World, material: Material, attention: Choice) -> list[str]:
    """What is about to happen: the lines above the progress line."""
    cfg, config, order = trainer.cfg, trainer.model.config, trainer.batches.order
    head = trainer.model.lm_head
    slots = cfg.batch.micro_rows * world.size
    micro_batches = math.ceil(cfg.batch.rows / slots)
    surplus = micro_batches * slots - cfg.batch.rows
    if isinstance(order, StreamedData):
        data, epochs = material.data.report, ""
    else:
        last = (
            trainer.last_row
            or trainer.progress.rows
            + (trainer.total_steps - trainer.progress.step) * cfg.batch.rows
        )
        data = [
            *two_lines(material.data, order.seq_len, order),
            *order.plan(last),
            *dict.fromkeys(of.note for of in order.orders if of.note),
        ]
        epochs = f", {(last - order.start) / order.rows_per_epoch:.2f} epochs"
    origin = cfg.model.init_from or "random weights"
    size = f"{short(config.parameters())} parameters, {config.num_hidden_layers} blocks, {config.vocab_size:,} tokens"
    numbers = f"{cfg.precision.param_dtype} (weights {cfg.precision.master_dtype})"
    lr = (
        f"optim.lr {cfg.optim.lr:g} at {cfg.optim.lr_batch_tokens:,} tokens a step"
        if cfg.optim.lr_batch_tokens
        else ""
    )
    float8 = float8_layers(trainer.model)
    slow = world.device.type == "cpu" and cfg.precision.param_dtype == "bfloat16"
    return [
        f"run    {trainer.saves.store.run}",
        f"model  {config.family}, {size}, from {origin}",
        *(f"token  {note}" for note in renumbered(cfg, material.tokenizer, material.init_from)),
        f"world  {world.size} × {world.device.type}, {cfg.sharding.strategy}, {numbers}",
        *(
            [
                "       few CPUs have instructions for bfloat16; without them  precision=fp32  is ten times faster"
            ]
            if slow
            else []
        ),
        *(
            [
                f"       float8 products ({cfg.precision.float8}) in {float8} linear layers; MFU counts against the bfloat16 peak"
            ]
            if float8
            else []
        ),
        *(
            ["       float8 without  compile=enabled  is slower than bfloat16"]
            if float8 and not cfg.compile.enabled
            else []
        ),
        *(f"data   {line}" for line in data),
        f"attend {attention}",
        f"head   logits of at most {head.rows_at_once(cfg.batch.micro_rows * order.seq_len, world.device.type):,} tokens at once",
        f"step   {cfg.batch.rows} rows = {micro_batches} micro-batches × {cfg.batch.micro_rows} rows × {world.size} ranks"
        + (f", {surplus} of the slots empty" if surplus else ""),
        *(
            [
                f"lr     {peak_learning_rate(cfg.optim, cfg.batch):.3g} for {cfg.batch.rows * cfg.batch.seq_len:,} tokens a step: {lr}"
            ]
            if lr
            else []
        ),
        f"train  {trainer.total_steps:,} steps{epochs}",
    ]
