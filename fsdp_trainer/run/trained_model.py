"""The model that a run trains: checks before any data is read, then its ModelSetup."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_trainer.config.context_methods import context_problems
from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Adapter, Model, TrainConfig
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.methods.teacher import require_fitting, with_second_model
from fsdp_trainer.methods.text_reader import with_types
from fsdp_trainer.methods.trained_head import with_head
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.from_config.resolve import (
    expert_problems,
    frozen_names,
    keys_set,
    length_problems,
    resolve_model,
    resolve_with_tokenizer,
    with_trained_head,
)
from fsdp_trainer.models.from_config.setup import ModelSetup, WeightSource
from fsdp_trainer.models.hf.hf_rules import transformers_problems
from fsdp_trainer.parallel.convert import require_float8
from fsdp_trainer.parallel.memory_check import Alternative, StateSetup, check_memory
from fsdp_trainer.training.setup.run_inputs import RunInputs
from fsdp_trainer.training.weights import require_kept


def check_room(
    cfg: TrainConfig, init_from: Path | None, world: World, second_folder: Path | None = None
) -> None:
    """Check that the ranks can train this model. Called before data or weights are read.

    Raises UserError for a layout that does not fit the number of ranks, number formats that the
    device lacks, or a model that cannot fit in memory. second_folder: see RunInputs.
    """
    layout = Layout(cfg.sharding, world.size, cfg.batch)
    if layout.problem:
        raise UserError("the mesh does not divide", [layout.problem])
    if layout.pipeline_problem:
        raise UserError("a step is too small for the pipeline", [layout.pipeline_problem])
    require_float8(cfg.precision, world.device)
    resolved = resolve_model(fetched_model(cfg.model, init_from))
    config = with_trained_head(resolved, cfg.objective.mtp)
    source = WeightSource.of(cfg.model, cfg.adapter, init_from, cfg.run.seed)
    if config.by_transformers:
        refused = [
            *transformers_problems(cfg.sharding, config.family, keys_set(cfg.model)),
            *length_problems(config, cfg.batch.seq_len),
        ]
        if refused:
            raise UserError("transformers' class cannot be divided like this", refused)
    frozen = frozen_names(cfg.train.freeze, cfg.objective.mtp, config)
    # the labels of an adapter's head are known once the data is read
    adapter = replace(cfg.adapter, init_from=None) if cfg.objective.method.scores else cfg.adapter
    setup = ModelSetup.resolve(config, adapter, frozen, source)
    ranks, adapters = cfg.sharding.tensor, setup.adapters
    moments = moments_format(cfg.optim, cfg.precision.master_dtype)
    problems = [
        *setup.tensor_problems(ranks, cfg.batch.seq_len, moments),
        *context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, config),
    ]
    if problems:
        raise UserError("the ranks cannot share the model and its rows like this", problems)
    if problems := list(expert_problems(config, cfg.sharding, cfg.loss, adapters is not None)):
        raise UserError("the ranks cannot divide experts like this", problems)
    if cfg.second_model and cfg.second_model.mode == "loaded":
        require_fitting(cfg, *with_second_model(config, second_folder, cfg.sharding.tensor))
    averages = cfg.replicas.method == "diloco"
    states = StateSetup(layout, cfg.precision, cfg.optim, adapters, averages)
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
    """Return the setup of the model in training, which is resolved only here. Raises UserError."""
    config = resolve_architecture(cfg, inputs)
    source = WeightSource.of(cfg.model, cfg.adapter, inputs.init_from, cfg.run.seed)
    frozen = frozen_names(cfg.train.freeze, cfg.objective.mtp, config)
    return ModelSetup.resolve(config, cfg.adapter, frozen, source)


def resolve_architecture(cfg: TrainConfig, inputs: RunInputs) -> ModelConfig:
    """Return the model's configuration, checked against the tokenizer. Raises UserError.

    The vocabulary is padded so that each rank of a tensor group has equally many rows of it, and as
    many as of the vocabulary of a second model, if there is one.
    """
    resolved = resolve_for(cfg, inputs.init_from, inputs.tokenizer)
    data, stores = inputs.data, inputs.data.train
    if isinstance(cfg.data.validation, float) and data.validation:
        stores = [*stores, data.validation]  # a share: chance decides which labels are in it
    config = with_head(resolved, cfg.objective, cfg.model.init_from, stores)
    if config.encoder:
        require_positions(config, [*data.train, *filter(None, [data.validation])])
    config = with_types(config, inputs.tokenizer)
    if inputs.second_folder:
        return with_second_model(config, inputs.second_folder, cfg.sharding.tensor)[0]
    return config.with_equal_rows(cfg.sharding.tensor)


def resolve_for(cfg: TrainConfig, init_from: Path | None, tokenizer: TextTokenizer) -> ModelConfig:
    """Return the configured architecture. Raises UserError if it has no row for a token."""
    grows = bool(cfg.tokenizer.add_tokens)
    model = fetched_model(cfg.model, init_from)
    return resolve_with_tokenizer(model, tokenizer.vocab_size, grows, len(tokenizer.new))


def require_positions(config: ModelConfig, stores: Sequence[TokenStore]) -> None:
    """Raise UserError for a text that is longer than an encoder's context."""
    positions = config.max_position_embeddings
    for store in stores:
        lengths = np.asarray(store.lengths)
        if len(lengths) and lengths.max() > positions:
            where, size = store.where(int(lengths.argmax())), lengths.max()
            reason = f"has {size:,} tokens, and {config.family} has {positions:,} positions.\n"
            raise UserError(
                "a text is longer than the model's context",
                where,
                f"{reason}Use  batch.seq_len={positions}",
            )


def fetched_model(model: Model, init_from: Path | None) -> Model:
    return replace(model, init_from=str(init_from) if init_from else None)
