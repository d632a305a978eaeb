"""The architecture that the `model` group defines, and its problems. Does not import torch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.context_methods import context_problems
from fsdp_trainer.config.formats import FOUR_BIT_BLOCK, block_size, moments_format
from fsdp_trainer.config.parts.families import BIASED, FAMILIES, LATENT
from fsdp_trainer.config.paths import is_hub_id, model_folder
from fsdp_trainer.config.pipeline_schedules import Stages
from fsdp_trainer.config.schema import Adapter, Loss, Model, Sharding, TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.folders.other_weights import is_described
from fsdp_trainer.models.adapters.adapter_spec import ALL_TARGETS, NF4, A, adapter_name
from fsdp_trainer.models.config import (
    DENSE,
    EXPERTS,
    EXTRAS,
    NOT_COMPUTED,
    ModelConfig,
    direction_problems,
    factors_misfit,
    needs_transformers,
    one_rope_type,
    read_config_file,
    rope_problems,
    why_unknown,
)
from fsdp_trainer.models.hf.further_blocks import start_of_names
from fsdp_trainer.models.hf.hf_rules import transformers_problems, without_folder
from fsdp_trainer.models.hf.mtp_architecture import with_mtp_head
from fsdp_trainer.models.hf.read_architecture import missing_extra, read_architecture

installed_version = cache(version)  # asked for hundreds of times by a plan
TWO_MESHES = (2, 13)
"""The first torch version whose FSDP2 supports parameters of one unit on two meshes."""
CONTEXT_KEYS = ("max_position_embeddings", "rope_theta", "rope_scaling")
FREE = ("vocab_size", "attention_direction")
"""Keys in which a run may differ from the model that it begins with."""


def resolve_model(model: Model, vocab_size: int | None = None) -> ModelConfig:
    """Return the architecture of init_from, or of the tiny model, changed by the keys that are set.

    vocab_size: the tokenizer's size, used for random weights unless model.vocab_size is set.
    Raises UserError.
    """
    keys = keys_set(model)
    if model.init_from is not None:
        stored = read_architecture(model_folder(model.init_from), model.implementation)
        problems = [] if stored.by_transformers else _differences(model, keys, stored)
        if problems or (problems := _too_few_rows(model, keys, stored)):
            raise UserError("the requested model is not the one in model.init_from", problems)
        free = (*CONTEXT_KEYS, *NOT_COMPUTED, *FREE)
        return directed(
            dataclasses.replace(stored, **{name: keys[name] for name in free if name in keys})
        )
    defaults = FAMILIES[model.family or "llama"].defaults
    keys = {"vocab_size": vocab_size or 0, **defaults, **keys}
    width = keys.get("hidden_size", ModelConfig.hidden_size)
    heads = keys.get("num_attention_heads", ModelConfig.num_attention_heads)
    if FAMILIES[keys.get("family", "llama")].mixer == LATENT:
        keys.setdefault("num_key_value_heads", heads)
        channels = keys["qk_nope_head_dim"] + keys["qk_rope_head_dim"]
        keys.setdefault("head_dim", channels)
    keys.setdefault("head_dim", width // heads)
    return directed(ModelConfig(**keys))


def directed(config: ModelConfig) -> ModelConfig:
    if problems := [*direction_problems(config)]:
        raise UserError("the model cannot attend to later tokens", problems)
    return config


def with_trained_head(config: ModelConfig, mtp: float) -> ModelConfig:
    """Return the architecture with the MTP head that objective.mtp trains, if it is above 0.

    Raises UserError for a model without one.
    """
    setting = f"objective.mtp={mtp:g}"
    return with_mtp_head(config, setting, "objective.mtp=0") if mtp else config


def frozen_names(freeze: Sequence[str], mtp: float, config: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of train.freeze, and that of an MTP head that is not trained.

    mtp: objective.mtp.
    """
    untrained = config.mtp_heads and not mtp
    return (*freeze, *([f"{start_of_names(config)}*"] if untrained else []))


def keys_set(model: Model) -> Json:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    values = {name: getattr(model, name, None) for name in names}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if scaling := values["rope_scaling"]:
        values["rope_scaling"] = one_rope_type(scaling)
    return {name: value for name, value in values.items() if value is not None}


def resolve_with_tokenizer(model: Model, tokens: int, grows: bool, added: int = 0) -> ModelConfig:
    """Return the architecture for a tokenizer of `tokens` tokens. Raises UserError.

    grows: True if the run adds tokens to the tokenizer, so that the model gets rows for them.
    added: number of those that its file lacks, for which it gets rows if the others fit.
    """
    config = resolve_model(model, tokens)
    grows = grows or tokens - added <= config.vocab_size
    if grows and model.vocab_size is None:
        config = dataclasses.replace(config, vocab_size=max(config.vocab_size, tokens))
    if tokens > config.vocab_size:
        reason = (
            f"the tokenizer has {tokens:,} tokens, more than the model's embedding has rows.\n"
            f"Use the model's own tokenizer, or add rows with  model.vocab_size={tokens}"
        )
        raise UserError(
            "tokenizer and model do not fit", f"model.vocab_size={config.vocab_size}", reason
        )
    return config


def _differences(model: Model, keys: Json, stored: ModelConfig) -> list[Problem]:
    is_named = model.name != "auto"
    free = {*NOT_COMPUTED, *FREE, *(() if is_named else CONTEXT_KEYS)}
    free |= {"tie_word_embeddings"} if stored.scores else set()
    different = {
        name: getattr(stored, name)
        for name, value in keys.items()
        if name not in free and value != getattr(stored, name)
    }
    file = f"config.json of {model.init_from}"
    if is_named and different:
        lines = [f"{name} is {value}, not {keys[name]}" for name, value in different.items()]
        reason = f"{file} is another model's: use  model=auto  to use it"
        return [Problem(f"model={model.name}", "\n".join([reason, *lines]))]
    problems = [
        Problem(f"model.{name}={keys[name]}", f"{file} has {value}: drop it")
        for name, value in different.items()
    ]
    return problems


def _too_few_rows(model: Model, keys: Json, stored: ModelConfig) -> list[Problem]:
    rows = keys.get("vocab_size", stored.vocab_size)
    if rows >= stored.vocab_size:
        return []
    reason = (
        f"config.json of {model.init_from} has {stored.vocab_size} rows. "
        "Rows can be added, not taken away: drop it"
    )
    return [Problem(f"model.vocab_size={rows}", reason)]


def model_problems(cfg: TrainConfig) -> list[Problem]:
    """Return the model's problems, as far as known without torch, data and tokenizer.

    A missing folder is reported elsewhere, as a missing path.
    """
    model = cfg.model
    if problems := rope_problems(model.rope_scaling or {}, "model.rope_scaling"):
        return problems
    if problems := list(without_folder(model)):
        return problems
    if model.init_from and (
        is_hub_id(model.init_from) or not is_described(model_folder(model.init_from))
    ):
        return []
    try:
        if model.init_from:
            file = model_folder(model.init_from) / "config.json"
            raw = read_config_file(file)
            if needs_transformers(raw, model.implementation):
                return problems_without_reading(model, cfg.sharding, raw)
            if problems := architecture_problems(file.parent):
                return problems
        config = with_trained_head(resolve_model(model), cfg.objective.mtp)
    except UserError as error:
        return error.problems
    return [
        *_size_problems(config),
        *factors_misfit(config),
        *sharding_problems(cfg, config),
        *length_problems(config, cfg.batch.seq_len),
        *_family_problems(cfg.model, config),
        *context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, config),
    ]


def architecture_problems(folder: Path) -> list[Problem]:
    try:
        ModelConfig.from_hf(folder)
    except UserError as error:
        file = str(folder / "config.json")
        return [
            problem if file in problem.what else Problem(f"{file}: {problem.what}", problem.reason)
            for problem in error.problems
        ]
    return []


def problems_without_reading(model: Model, sharding: Sharding, raw: Json) -> list[Problem]:
    """Return the problems of a model of transformers that show without importing it.

    raw: the content of its config.json.
    """
    kind = raw.get("model_type")
    missing = missing_extra(kind, why_unknown(raw))
    return [missing] if missing else list(transformers_problems(sharding, kind, keys_set(model)))


def _size_problems(config: ModelConfig) -> Iterator[Problem]:
    kv_heads = config.num_key_value_heads
    if config.num_attention_heads % kv_heads:
        reason = f"must divide num_attention_heads={config.num_attention_heads}"
        yield Problem(f"model.num_key_value_heads={kv_heads}", reason)
    if config.rotary_dim % 2 or not config.rotary_dim:
        reason = "must be even for rotary position embedding"
        name = "qk_rope_head_dim" if config.is_latent else "head_dim"
        yield Problem(f"model.{name}={getattr(config, name)}", reason)
    if config.is_latent:
        yield from _latent_problems(config)


def length_problems(config: ModelConfig, length: int) -> Iterator[Problem]:
    """Yield a problem if rows of `length` tokens are longer than the model's context.

    A row of an encoder may hold several texts, each of which has positions of its own.
    """
    positions = config.max_position_embeddings
    if length > positions and not config.encoder:
        reason = (
            f"longer than the model's context ({positions:,} positions).\n"
            f"Use  batch.seq_len={positions}  or  model.max_position_embeddings={length}"
            "  with a  model.rope_scaling={…}"
        )
        yield Problem(f"batch.seq_len={length}", reason)


def _latent_problems(config: ModelConfig) -> Iterator[Problem]:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if keys != heads:
        reason = "all heads have keys of their own in latent attention"
        instead = f"Use  model.num_key_value_heads={heads}"
        yield Problem(f"model.num_key_value_heads={keys}", f"{reason}.\n{instead}")
    channels = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.head_dim != channels:
        reason = "is the sum of qk_nope_head_dim and qk_rope_head_dim in latent attention"
        instead = f"Use  model.head_dim={channels}"
        yield Problem(f"model.head_dim={config.head_dim}", f"{reason}.\n{instead}")


def sharding_problems(cfg: TrainConfig, config: ModelConfig) -> Iterator[Problem]:
    sharding, adapter = cfg.sharding, cfg.adapter
    has_adapter = adapter.name != "none"
    yield from expert_problems(config, sharding, cfg.loss, has_adapter)
    in_eight_bits = moments_format(cfg.optim, cfg.precision.master_dtype) == "8bit"
    yield from tensor_problems(config, sharding.tensor, cfg.batch.seq_len) or block_problems(
        config,
        sharding.tensor,
        has_adapter and adapter.base == NF4,
        lambda rows: in_eight_bits and _trains_rows(adapter, cfg.train.freeze, config, rows),
    )
    yield from _stage_problems(config, sharding)


def expert_problems(
    config: ModelConfig, sharding: Sharding, loss: Loss, has_adapter: bool
) -> Iterator[Problem]:
    size = sharding.expert
    yield from _balance_problems(config, loss, has_adapter)
    if EXPERTS not in config.feed_forwards:
        if size > 1:
            reason = f"{config.family} has no experts.\nUse  sharding.expert=1"
            yield Problem(f"sharding.expert={size}", reason)
        return
    chosen = config.num_experts_per_tok
    if chosen > config.num_experts:
        reason = f"must not be more than num_experts={config.num_experts}"
        yield Problem(f"model.num_experts_per_tok={chosen}", reason)
    yield from _group_problems(config)
    if config.num_experts % size:
        nearest = max(n for n in range(1, size) if config.num_experts % n == 0)
        reason = f"must divide num_experts={config.num_experts}.\nUse  sharding.expert={nearest}"
        yield Problem(f"sharding.expert={size}", reason)
    for key in ("expert", "tensor"):
        if getattr(sharding, key) > 1:
            yield from _separate_expert_problems(f"sharding.{key}", getattr(sharding, key))
            return


def _group_problems(config: ModelConfig) -> Iterator[Problem]:
    experts, groups, chosen = config.num_experts, config.n_group, config.topk_group
    if groups == 1:
        return
    if experts % groups or experts < 2 * groups:
        reason = f"must divide num_experts={experts} into groups of at least two"
        yield Problem(f"model.n_group={groups}", reason)
    elif chosen > groups:
        yield Problem(f"model.topk_group={chosen}", f"must not be more than n_group={groups}")
    elif chosen * (experts // groups) < config.num_experts_per_tok:
        reason = (
            f"groups of {experts // groups} experts have fewer than "
            f"num_experts_per_tok={config.num_experts_per_tok}"
        )
        yield Problem(f"model.topk_group={chosen}", reason)


def _balance_problems(config: ModelConfig, loss: Loss, has_adapter: bool) -> Iterator[Problem]:
    reason = None
    if EXPERTS not in config.feed_forwards:
        having = ", ".join(n for n, s in FAMILIES.items() if s.feed_forward == EXPERTS)
        reason = f"this model has no experts; {having} have: drop it"
    for key in ("load_balancing", "router_z_loss", "bias_update_speed"):
        value = getattr(loss, key)
        if reason and value:
            yield Problem(f"loss.{key}={value}", reason)
    if reason is None and loss.bias_update_speed:
        yield from _bias_problems(config, loss.bias_update_speed, has_adapter)


def _bias_problems(config: ModelConfig, speed: float, has_adapter: bool) -> Iterator[Problem]:
    if config.family_spec.router != BIASED:
        having = ", ".join(n for n, s in FAMILIES.items() if s.router == BIASED)
        reason = (
            f"{config.family}'s routers have no bias; {having} has.\nUse  loss.load_balancing=0.001"
        )
        yield Problem(f"loss.bias_update_speed={speed}", reason)
    elif has_adapter:
        reason = "an adapter's folder does not hold the routers' biases: drop it"
        yield Problem(f"loss.bias_update_speed={speed}", reason)


def _separate_expert_problems(key: str, size: int) -> Iterator[Problem]:
    torch = installed_version("torch")
    if tuple(map(int, torch.split(".")[:2])) < TWO_MESHES:
        needed = ".".join(map(str, TWO_MESHES))
        yield Problem(
            f"{key}={size}",
            f"with experts needs torch {needed}; installed is {torch}.\nUse  {key}=1",
        )


def tensor_problems(config: ModelConfig, ranks: int, length: int) -> list[Problem]:
    misfits = tensor_misfits(config, length, ranks)
    if not misfits:
        return []
    nearest = max(n for n in range(1, ranks) if not tensor_misfits(config, length, n))
    reason = f"{'; '.join(misfits)}.\nUse  sharding.tensor={nearest}"
    return [Problem(f"sharding.tensor={ranks}", reason)]


def block_problems(
    config: ModelConfig, ranks: int, in_four_bits: bool, in_eight_bits: Callable[[str], bool]
) -> list[Problem]:
    """Return a problem for each format whose blocks would be cut by sharding rows of o and down.

    in_four_bits: True if frozen matrices are. in_eight_bits: returns True if the optimizer's state
    of a module of blocks is, for the name of the module within a block.
    """
    problems: list[Problem] = []
    for module, (what, width) in _row_widths(config).items() if ranks > 1 else ():
        part = width // ranks
        start = f"{what}={width:,} leaves each of {ranks} ranks {part:,} numbers of a row"
        if in_four_bits and part % FOUR_BIT_BLOCK:
            reason = (
                f"{start}, which cuts blocks of {FOUR_BIT_BLOCK}.\n"
                "Use  adapter.base=bf16  or fewer ranks"
            )
            problems.append(Problem("adapter.base=nf4", reason))
        block = block_size((1, width))
        if part % block and in_eight_bits(module):
            reason = f"{start}, which cuts blocks of {block}.\nUse  optim.state_dtype=bfloat16"
            problems.append(Problem("optim.state_dtype=8bit", reason))
    return problems


def _row_widths(config: ModelConfig) -> dict[str, tuple[str, int]]:
    heads = config.num_attention_heads * config.value_dim
    widths = {"self_attn.o_proj": ("num_attention_heads × head_dim", heads)}
    if DENSE in config.feed_forwards:
        widths["mlp.down_proj"] = ("intermediate_size", config.intermediate_size)
    if EXPERTS in config.feed_forwards and config.shared_size:
        key = _shared_key(config).replace("model.", "")
        widths[f"mlp.{config.family_spec.shared_expert}.down_proj"] = (key, config.shared_size)
    return widths


def _trains_rows(adapter: Adapter, freeze: Sequence[str], config: ModelConfig, module: str) -> bool:
    """Return True if the module's matrix or its adapter's A is trained in any block.

    module: name of the module within a block.
    """
    if adapter.init_from:
        return False  # the layers are defined by its folder; `ModelSetup` sees them
    layers = [f"model.layers.{block}.{module}" for block in range(config.num_hidden_layers)]
    trained = [f"{layer}.weight" for layer in layers]
    if adapter.name != "none":
        targets = adapter.targets if isinstance(adapter.targets, list) else [adapter.targets]
        targets = ["*" if target in ALL_TARGETS else target for target in targets]
        trained = [adapter_name(layer, A) for layer in layers if _fits(layer, targets)]
        trained += [f"{layer}.weight" for layer in layers if _fits(layer, adapter.also)]
    return not all(any(fnmatchcase(name, p) for p in freeze) for name in trained)


def _fits(layer: str, patterns: list[str]) -> bool:
    forms = [form for pattern in patterns for form in (pattern, f"*.{pattern}")]
    return any(fnmatchcase(layer, form) for form in forms)


def _stage_problems(config: ModelConfig, sharding: Sharding) -> Iterator[Problem]:
    blocks, stages = config.num_hidden_layers, Stages.of(sharding).count
    if blocks < stages:
        ranks = sharding.pipeline
        nearest = max(1, blocks * ranks // stages)
        reason = (
            f"with sharding.pipeline_schedule={sharding.pipeline_schedule} makes {stages} "
            f"stages, each of at least one of {blocks} blocks.\nUse  sharding.pipeline={nearest}"
        )
        yield Problem(f"sharding.pipeline={ranks}", reason)


def tensor_misfits(config: ModelConfig, seq_len: int, ranks: int) -> list[str]:
    """Return a message for each size that `ranks` ranks of a tensor group cannot divide evenly."""
    sizes = {
        "model.num_attention_heads": config.num_attention_heads,
        "model.intermediate_size": config.intermediate_size,
        "batch.seq_len": seq_len,
    }
    if DENSE not in config.feed_forwards:
        del sizes["model.intermediate_size"]  # ranks hold complete experts
    if EXPERTS in config.feed_forwards and config.shared_size:
        sizes[_shared_key(config)] = config.shared_size
    misfits = [f"must divide {key}={size}" for key, size in sizes.items() if size % ranks]
    heads = config.num_key_value_heads
    width = heads * config.head_dim
    if heads % ranks and (ranks % heads or width % ranks):
        misfits.append(f"must divide model.num_key_value_heads={heads}, or be a multiple of it")
    return misfits


def _shared_key(config: ModelConfig) -> str:
    if config.shared_expert_intermediate_size:
        return "model.shared_expert_intermediate_size"
    return "model.n_shared_experts × model.moe_intermediate_size"


def _family_problems(model: Model, config: ModelConfig) -> Iterator[Problem]:
    window = model.sliding_window
    if config.family_spec.windows == "none" and window is not None:
        windowed = [name for name, spec in FAMILIES.items() if spec.windows != "none"]
        reason = f"{config.family} has no windows; {', '.join(windowed)} have"
        yield Problem(f"model.sliding_window={window}", reason)
    for name in EXTRAS:
        value = getattr(model, name)
        if value and name not in config.family_spec.options:
            having = ", ".join(family for family, spec in FAMILIES.items() if name in spec.options)
            reason = f"transformers would not compute it for {config.family}, {having} have it"
            yield Problem(f"model.{name}={value}", f"{reason}: drop it")
