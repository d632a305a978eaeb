"""The lines printed before training starts, which describe the run."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.base.counted import counted
from fsdp_trainer.checkpoint.other_states import OtherStates
from fsdp_trainer.checkpoint.unread_tensors import Unread
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.context_methods import ContextChoice
from fsdp_trainer.config.depth import depth_in_words
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import is_adapter, model_folder
from fsdp_trainer.config.schema import Launch, Optim, Precision
from fsdp_trainer.data.prepared_data import lossy, new_rows, other_size, renumbered
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE
from fsdp_trainer.models.adapters.adapters import adapted_layers
from fsdp_trainer.models.adapters.expert_adapters import adapted_experts
from fsdp_trainer.models.adapters.peft_config import read_config, without_effect
from fsdp_trainer.models.attention_choice import AttentionChoice
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.freeze import frozen_parameters
from fsdp_trainer.models.hf.read_architecture import read_architecture, stored_vocabulary
from fsdp_trainer.observe.console import short
from fsdp_trainer.optim.schedules import peak_learning_rate, warmup_steps
from fsdp_trainer.parallel.convert import float8_layers
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.pipeline import blocks_by_stage
from fsdp_trainer.training.data_source import DataSource, StoredRows
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_length import RunLength
from fsdp_trainer.training.setup.run_setup import RunSetup

RANDOM_ENDINGS = ("pdrop", "dropout", "layerdrop", "jitter_noise")
"""How keys of config.json end whose value is the strength of something random in training."""
OF_OTHER_HEADS = ("classifier_", "summary_")
"""How their keys begin: a language model does not have those heads."""


def describe(
    setup: RunSetup,
    unread: Unread | None,
    model: Decoder,
    data: DataSource,
    progress: Progress,
    attention: AttentionChoice,
    context: ContextChoice,
    about_method: list[str],
) -> list[str]:
    """Return lines on the run, model, ranks, data, attention, head, step and number of steps.

    unread: see TrainState. about_method: further lines on the data, see Method.about.
    """
    cfg, inputs, world, dims = setup.cfg, setup.inputs, setup.world, setup.dims
    config, trained = setup.config, setup.model_setup.trained_numbers
    origin = cfg.model.init_from or "random weights"
    exported_type = str(config.source.get("model_type") or config.family)
    token_notes = renumbered(cfg.tokenizer, inputs.tokenizer, cfg.model.init_from, inputs.init_from)
    if config.predicts:  # others write no text
        token_notes += lossy(inputs.tokenizer)
    token_notes += inputs.tokenizer.notes_with(exported_type)
    if inputs.init_from:
        rows = stored_vocabulary(model_folder(inputs.init_from))
        token_notes += new_rows(inputs.tokenizer, rows)
        warned = [str(one) for one in other_size(inputs.tokenizer, rows) if one.is_warning]
        token_notes += [line.strip() for text in warned for line in text.splitlines()]
    number = getattr(torch, cfg.precision.param_dtype).itemsize
    if cfg.objective.method.second == "teacher":
        number = 4  # a comparison is made in float32
    at_once = model.lm_head.rows_at_once(dims.layout.tokens, world.device.type, number)
    stored = "trained weights" if frozen_parameters(model) else "weights"
    frozen = f" ({short(trained)} trained)" if trained != config.parameters() else ""
    return [
        f"run    {setup.folder}",
        f"model  {config.family}, {short(config.parameters())} parameters{frozen}, "
        f"{counted(config.num_hidden_layers, 'block')}, "
        f"{config.vocab_size:,} tokens, from {origin}",
        *([f"       {depth_in_words(cfg)}"] if cfg.model.depth else []),
        *line_on_mtp_head(config, cfg.objective.mtp),
        *unread_tensors(unread, config.vocab_size),
        *by_transformers(config, cfg.data.packing),
        *left_out_of_training(config.source),
        *adapters(model),
        *(f"adapt  {line}" for line in not_followed(cfg.adapter.init_from)),
        *line_on_second_model(setup),
        *(f"token  {note}" for note in token_notes),
        f"world  {world.size} × {world.device.type}, {cfg.sharding.strategy}"
        f"{tensor_groups(dims)}, "
        f"{cfg.precision.param_dtype} ({stored} {cfg.precision.master_dtype})",
        *rollout_ranks(cfg.launch),
        *number_formats(cfg.precision, cfg.compile.enabled, model, world.device.type),
        *(f"data   {line}" for line in (*data.about(inputs.data, progress), *about_method)),
        f"attend {attention_line(config, attention)}",
        *row_parts(dims.layout, context),
        *stages(dims.layout, model),
        f"head   logits of at most {at_once:,} tokens at once",
        *step_arithmetic(dims.layout, cfg.optim),
        *(f"train  {line}" for line in length_of_run(setup, data, progress)),
    ]


def length_of_run(setup: RunSetup, data: DataSource, progress: Progress) -> list[str]:
    cfg = setup.cfg
    steps, epochs = data.total_steps(progress), data.epochs(progress)
    by_keys = warmup_steps(cfg.schedule, steps)
    warmup = by_keys if progress.warmup_steps is None else progress.warmup_steps
    amounts = [counted(steps, "step"), f"{epochs:.2f} epochs" if epochs is not None else ""]
    rows, rows_per_epoch = (steps - progress.first_step) * cfg.batch.rows, 0
    if isinstance(data, StoredRows) and epochs is not None:
        rows_per_epoch = data.order.rows_per_epoch
        rows = round(epochs * rows_per_epoch * data.order.fill)  # full ones
    if not cfg.objective.method.samples:
        amounts.append(f"{short(rows * cfg.batch.seq_len)} tokens")
    length = RunLength(cfg.train, cfg.batch, cfg.optim, cfg.schedule, rows_per_epoch)
    if progress.step < steps:
        rate, step = length.highest_rate(progress.step + 1, steps, warmup)
        amounts.append(f"learning rate at most {rate:.3g}, in step {step:,}")
    lines = [", ".join(filter(None, amounts))]
    if warmup != by_keys:
        lines.append(
            f"the warm-up has the checkpoint's {warmup:,} steps; "
            f"for {by_keys:,}  checkpoint.allow_changes=[schedule]"
        )
    if progress.at_start:
        lines += map(str, length.findings())
    return [part.strip() for line in lines for part in line.splitlines()]


def rollout_ranks(launch: Launch) -> list[str]:
    ranks = launch.rollout_ranks
    more = "1 more rank only generates" if ranks == 1 else f"{ranks} more ranks only generate"
    return [f"       {more} rollouts"] if ranks else []


def tensor_groups(dims: Dims) -> str:
    size = dims.sizes["tensor"]
    tensor = f" over groups of {size} ranks (sharding.tensor)" if size > 1 else ""
    size = dims.expert_sizes["expert"]
    return tensor + (f", experts divided by {size} ranks (sharding.expert)" if size > 1 else "")


def row_parts(layout: Layout, context: ContextChoice) -> list[str]:
    size = layout.sharding.context
    if size == 1:
        return []
    return [f"rows   shared by {size} ranks, {layout.row_tokens:,} tokens each, {context}"]


def stages(layout: Layout, model: Decoder) -> list[str]:
    division = layout.stages
    if division.ranks == 1:
        return []
    blocks = [f"{part[0]}-{part[-1]}" for part in blocks_by_stage(model, division.count)]
    return [
        f"stages {', '.join(blocks)} (blocks) on {division.ranks} ranks in a row, "
        f"{division.schedule}: idle {layout.idle:.0%} of a step if all take equally long"
    ]


def line_on_mtp_head(config: ModelConfig, mtp: float) -> list[str]:
    if not config.mtp_heads:
        return []
    does = f"its loss counts {mtp:g} (objective.mtp)" if mtp else "it stays as it is"
    return [f"       with an MTP head, which predicts the token after the next one: {does}"]


def unread_tensors(unread: Unread | None, vocabulary: int) -> list[str]:
    lines = []
    if unread and unread.count:
        exports = "exports of all weights have them"
        if not unread.fits(vocabulary):
            exports = f"no export has them, made for {unread.vocabulary:,} tokens"
        lines.append(f"       not read and not trained: {unread}; {exports}")
    if unread and unread.of_tower:
        lines.append(f"       {unread.of_tower} are not read, and not exported")
    return lines


def by_transformers(config: ModelConfig, packing: str) -> list[str]:
    if not config.by_transformers:
        return []
    lines = [f"computed by transformers' class {config.architecture}"]
    if config.folder:
        lines[0] += f", with Python code of {config.folder} (model.trust_remote_code)"
    if config.document_layers and packing != "none":
        named = " ".join(config.document_layers)
        lines.append(f"documents of a row are computed one by one in {named}")
    if not config.packs and packing == "best_fit":
        known = math.isfinite(config.mixing)
        change = f"change each other by {config.mixing:.1g} of the largest state"
        how = change if known else "may change each other: no small copy could be tried"
        lines.append(f"rows hold one document each, padded: packed ones {how}")
    return [f"       {line}" for line in lines]


def left_out_of_training(source: dict[str, Any]) -> list[str]:
    named = ", ".join(random_settings(source))
    reason = "dropout and noise are not applied, a step depends on its rows alone"
    return [f"       {named} in config.json: {reason}"] if named else []


def random_settings(source: dict[str, Any], part: str = "") -> Iterator[str]:
    """Yield the settings of a config.json that ask for something random, as NAME=VALUE.

    part: the name of the model's part that they belong to, with a dot.
    """
    for name, value in source.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from random_settings(value, f"{name}.")
        elif not name.endswith(RANDOM_ENDINGS) or name.startswith(OF_OTHER_HEADS):
            continue
        elif type(value) in (int, float) and value > 0:
            yield f"{part}{name}={value}"


def attention_line(config: ModelConfig, attention: AttentionChoice) -> str:
    if not config.by_transformers or config.documents_attention:
        return str(attention)
    if config.packs:
        return "by transformers, with a mask of row × row for the documents of a row"
    return "by transformers, each row alone"


def adapters(model: Decoder) -> list[str]:
    layers, experts = adapted_layers(model), adapted_experts(model)
    names = dict.fromkeys(name.rpartition(".")[2] for name in (*layers, *experts))
    if not names:
        return []
    kind = "DoRA" if any(hasattr(layer, MAGNITUDE) for layer in layers.values()) else "LoRA"
    all_ranks = {layer.lora_A.out_features for layer in layers.values()}
    all_scales = {round(layer.lora_scale, 4) for layer in layers.values()}
    for module, matrix in experts.values():
        all_ranks.add(getattr(module.lora_A, matrix).shape[1])
        all_scales.add(round(module.lora_scales[matrix], 4))
    ranks, scales = sorted(all_ranks), sorted(all_scales)
    formats = dict.fromkeys(str(p.dtype)[6:] for p in frozen_parameters(model).values())
    of_experts = f" and {len(experts)} stacks of experts" if experts else ""
    frozen = " and ".join("4 bits" if name == "uint8" else name for name in formats)
    return [
        f"adapt  {kind} on {counted(len(layers), 'layer')}{of_experts} ({', '.join(names)}), "
        f"rank {one_or_range(ranks)}, scale {one_or_range(scales)}; frozen weights in {frozen}"
    ]


def not_followed(init_from: str | None) -> list[str]:
    folder = Path(init_from or "")
    if not init_from or not is_adapter(folder):
        return []
    return [f"{init_from}: {line}" for line in without_effect(read_config(folder))]


def line_on_second_model(setup: RunSetup) -> list[str]:
    second, folder = setup.cfg.second_model, setup.inputs.second_folder
    if second is None or not second.is_separate:
        return []
    choice = setup.cfg.objective
    config = read_architecture(model_folder(folder)) if folder else setup.config
    size = f"{config.family}, {short(config.parameters())} parameters, from {second.source}"
    if second.role == "reference":
        return [f"refer  {size}; kl {choice.kl:g}"]
    stored = f"; not in memory, its {choice.top_k} likeliest tokens are stored"
    return [
        f"teach  {size}; "
        f"share {choice.share:g} of the loss, temperature {choice.temperature:g}, "
        f"{choice.divergence} divergence{stored if choice.top_k else ''}"
    ]


def one_or_range(values: list[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def number_formats(
    precision: Precision, compiles: bool, model: Decoder, device_type: str
) -> list[str]:
    """Return notes on 16-bit formats on a CPU and on float8."""
    lines = []
    if device_type == "cpu" and precision.param_dtype != "float32":
        lines.append(
            f"few CPUs have instructions for {precision.param_dtype}; without them  "
            "precision=fp32  is ten times faster"
        )
    layers = float8_layers(model)
    if layers:
        lines.append(
            f"float8 products ({precision.float8}) in {layers} linear layers; "
            "MFU counts against the bfloat16 peak"
        )
    if layers and not compiles:
        lines.append("float8 without  compile=enabled  is slower than bfloat16")
    return [f"       {line}" for line in lines]


def lines_on_states(states: OtherStates, optim: Optim, next_rate: float | None) -> list[str]:
    """Return lines on another tool's states, and on options that they were made with otherwise.

    next_rate: learning rate of the first step; None: not known yet.
    """
    options = {name: value for name, value in states.options.items() if name != "lr"}
    now = {name: getattr(optim, name) for name in options}
    others = [
        f"{name} {as_text(_as_list(then))}, here {as_text(now[name])}"
        for name, then in options.items()
        if _as_list(then) != now[name]
    ]
    lines = [f"optim  AdamW goes on after step {states.step:,} of {states.place}"]
    last_rate = states.options.get("lr")
    if last_rate is not None and next_rate is not None:
        lines.append(f"       learning rate {float(last_rate):.3g} before, {next_rate:.3g} next")
    return lines + [f"       it was trained with {line}" for line in others]


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def step_arithmetic(layout: Layout, optim: Optim) -> list[str]:
    """Return a line on how a step's rows are divided.

    A second line shows the learning rate if it depends on the step's tokens.
    """
    batch = layout.batch
    readers = counted(layout.batch_ranks, "rank" if layout.same_rows == 1 else "group")
    count = layout.micro_batches
    empty = count * batch.micro_rows * layout.batch_ranks - batch.rows
    lines = [
        f"step   {counted(batch.rows, 'row')} = {counted(count, 'micro-batch')} × "
        f"{counted(batch.micro_rows, 'row')} "
        f"× {readers}" + (f", {empty} of the slots empty" if empty else "")
    ]
    if optim.lr_batch_tokens:
        lines.append(
            f"lr     {peak_learning_rate(optim, batch):.3g} for {batch.rows * batch.seq_len:,} "
            f"tokens a step: optim.lr {optim.lr:g} at {optim.lr_batch_tokens:,} tokens a step"
        )
    return lines
