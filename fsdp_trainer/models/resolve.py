"""From the `model` group to an architecture, and what is wrong with it. No torch."""

import dataclasses
from typing import Any

from fsdp_trainer.config.paths import is_hub_id, model_folder
from fsdp_trainer.config.schema import Model, TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import EXTRAS, ModelConfig, rope_problems
from fsdp_trainer.models.families import FAMILIES

CONTEXT_KEYS = ("max_position_embeddings", "rope_theta", "rope_scaling")
OURS = ("vocab_multiple", "initializer", "initializer_range")  # of no architecture: free beside any


def resolve_model(model: Model, vocab_size: int | None = None) -> ModelConfig:
    """The architecture that `model` asks for: init_from's, else the tiny model's, with the keys that are set laid over it.

    vocab_size: the tokenizer's, which random weights follow unless model.vocab_size says otherwise. Raises UserError.
    """
    asked = {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(ModelConfig)
        if getattr(model, f.name, None) is not None
    }
    if model.init_from is not None:
        found = ModelConfig.from_hf(model_folder(model.init_from))
        if problems := _differences(model, asked, found):
            raise UserError("the model asked for is not the one in model.init_from", problems)
        return dataclasses.replace(
            found,
            **{name: asked[name] for name in (*CONTEXT_KEYS, *OURS, "vocab_size") if name in asked},
        )
    asked = FAMILIES[asked.get("family", "llama")].defaults | asked
    asked.setdefault("vocab_size", vocab_size or 0)
    if "hidden_size" in asked or "num_attention_heads" in asked:
        tiny = ModelConfig()
        asked.setdefault(
            "head_dim",
            asked.get("hidden_size", tiny.hidden_size)
            // asked.get("num_attention_heads", tiny.num_attention_heads),
        )
    return ModelConfig(**asked)


def resolve_with_tokenizer(model: Model, tokens: int, grows: bool) -> ModelConfig:
    """The architecture for a tokenizer of so many tokens. grows: tokens were added to it, and the model gets rows for them. Raises UserError."""
    config = resolve_model(model, tokens)
    if grows and model.vocab_size is None:
        config = dataclasses.replace(config, vocab_size=max(config.vocab_size, tokens))
    if tokens > config.vocab_size:
        why = f"the tokenizer has {tokens:,} tokens, more than the model's embedding.\nUse the model's own tokenizer, or add rows with  model.vocab_size={tokens}"
        raise UserError(
            "tokenizer and model do not fit", [Problem(f"vocabulary={config.vocab_size:,}", why)]
        )
    return config


def _differences(model: Model, asked: dict[str, Any], found: ModelConfig) -> list[Problem]:
    named = model.name != "auto"
    free = {*OURS, "vocab_size", *(() if named else CONTEXT_KEYS)}
    different = {
        name: getattr(found, name)
        for name, value in asked.items()
        if name not in free and value != getattr(found, name)
    }
    where = f"config.json of {model.init_from}"
    if named and different:
        details = "\n".join(
            f"{name} is {value}, not {asked[name]}" for name, value in different.items()
        )
        return [
            Problem(
                f"model={model.name}",
                f"{where} is another model's: use  model=auto  to take it as it is\n{details}",
            )
        ]
    problems = [
        Problem(f"model.{name}={asked[name]}", f"{where} has {value}: drop it")
        for name, value in different.items()
    ]
    if asked.get("vocab_size", found.vocab_size) < found.vocab_size:
        why = f"{where} has {found.vocab_size} rows. Rows can be added, not taken away: drop it"
        problems.append(Problem(f"model.vocab_size={asked['vocab_size']}", why))
    return problems


def model_problems(cfg: TrainConfig) -> list[Problem]:
    """What is wrong with the model, seen without torch, data or tokenizer."""
    if cfg.model.rope_scaling and (
        problems := rope_problems(cfg.model.rope_scaling, "model.rope_scaling")
    ):
        return problems
    if cfg.model.init_from and is_hub_id(cfg.model.init_from):
        return []
    if cfg.model.init_from and not (model_folder(cfg.model.init_from) / "config.json").is_file():
        return []  # reported as a missing path
    try:
        config = resolve_model(cfg.model)
    except UserError as error:
        return error.problems
    problems = []
    if config.num_attention_heads % config.num_key_value_heads:
        why = f"must divide num_attention_heads={config.num_attention_heads}"
        problems.append(Problem(f"model.num_key_value_heads={config.num_key_value_heads}", why))
    if config.rotary_dim % 2 or not config.rotary_dim:
        problems.append(
            Problem(
                f"model.head_dim={config.head_dim}", "must be even for rotary position embedding"
            )
        )
    if config.form.windows == "none" and cfg.model.sliding_window is not None:
        windowed = ", ".join(name for name, form in FAMILIES.items() if form.windows != "none")
        why = f"{config.family} has no windows; {windowed} have"
        problems.append(Problem(f"model.sliding_window={cfg.model.sliding_window}", why))
    for name in EXTRAS:
        if getattr(cfg.model, name) and name not in config.form.options:
            having = ", ".join(family for family, form in FAMILIES.items() if name in form.options)
            why = (
                f"transformers would not compute it for {config.family}, {having} have it: drop it"
            )
            problems.append(Problem(f"model.{name}={getattr(cfg.model, name)}", why))
    if cfg.batch.seq_len > config.max_position_embeddings:
        problems.append(
            Problem(
                f"batch.seq_len={cfg.batch.seq_len}",
                f"longer than the model's context ({config.max_position_embeddings:,} positions).\n"
                f"Use  batch.seq_len={config.max_position_embeddings}  or  model.max_position_embeddings={cfg.batch.seq_len}"
                "  with a  model.rope_scaling={…}",
            )
        )
    return problems
