"""The architecture of a model that transformers' own class computes, read from its folder."""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import (
    FULL,
    SLIDING,
    Json,
    ModelConfig,
    WeightNames,
)
from fsdp_trainer.models.hf.hf_mtp import add_mtp_head
from fsdp_trainer.models.hf.routers import routers
from fsdp_trainer.models.mtp import MtpBlock

UNLIMITED = 2**40
"""Positions of a model whose config.json names no limit, such as a state-space model."""
ALL_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
"""transformers' names for the number of experts, and of those that a token is sent to."""
DECODE = getattr(transformers.PreTrainedConfig, "_decode_special_floats", lambda raw: raw)
"""transformers writes infinite numbers as objects."""
NEW_TENSORS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
LARGEST_BUFFER = 2**24
"""Numbers in the largest tensor that is made while a model is built."""
MODULES = re.compile(r"(?!.*(size|dim|width|length|capacity)).*(layer|depth|expert)")
"""Keys of config.json that count modules."""
MOST_MODULES = 20_000
"""The largest number of them that is built. Doge has 16,384 experts."""
QUIET = transformers.logging.ERROR


class Described(NamedTuple):
    """Facts about a model, read from it on the meta device. See the fields of ModelConfig."""

    names: WeightNames
    hidden_size: int
    tied: bool
    counted: tuple[int, int]
    expert_blocks: tuple[int, ...]
    positions: int


def is_encoder(raw: Json) -> bool:
    """Return True for a model whose tokens see all of a text, such as BERT.

    They are those that transformers trains to fill gaps, and that do not write as well.
    """
    name = str((raw.get("architectures") or [""])[0])
    writes = raw.get("is_decoder") or raw.get("is_encoder_decoder")
    is_known = raw.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return is_known and not writes and not name.endswith(("ForCausalLM", "LMHeadModel"))


def bare_class(raw: Json) -> str:
    named: Any = MODEL_MAPPING_NAMES.get(str(raw.get("model_type")), "")
    return named if isinstance(named, str) else named[0]


def config_object(raw: Json, folder: str) -> Any:
    path = Path(folder) / "config.json"
    kind = str(raw.get("model_type"))
    has_class, has_code = kind in transformers.CONFIG_MAPPING, "auto_map" in raw
    if problem := why_no_class(raw, has_class, has_code) or absurd_count(raw):
        raise UserError(f"{path} is not supported", [problem])
    try:
        if has_code and remote_code_is_allowed():
            return AutoConfig.from_pretrained(folder, trust_remote_code=True)
        return transformers.CONFIG_MAPPING[kind].from_dict(DECODE(copy.deepcopy(raw)))
    except Exception as error:  # any, from transformers' checks of the values
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"transformers cannot read {path}", f"model_type={kind}", "\n".join(lines[:6])
        ) from None


def absurd_count(raw: Json) -> Problem | None:
    for name, value in raw.items():
        if isinstance(value, dict) and (problem := absurd_count(value)):
            return problem
        if type(value) is int and value > MOST_MODULES and MODULES.match(name):
            return Problem(f"{name}={value}", f"is above {MOST_MODULES:,}")
    return None


def why_no_class(raw: Json, has_class: bool, has_code: bool) -> Problem | None:
    """Return why transformers cannot read a configuration, or None.

    has_class: transformers knows its model_type; has_code: the folder has code for it.
    """
    what = f"model_type={raw.get('model_type')}"
    if raw.get("quantization_config"):
        reason = "quantized weights are not read: convert the folder to bfloat16, delete this key"
        return Problem("quantization_config", reason)
    if not has_class and not has_code:
        version = transformers.__version__
        return Problem(what, f"neither this decoder nor transformers {version} computes it")
    if not has_class and not remote_code_is_allowed():
        reason = (
            "the model is computed by Python code that comes with the folder. If you trust it,\n"
            "use  model.trust_remote_code=true  (of other verbs  trust_remote_code=true)"
        )
        return Problem(what, reason)
    return None


def sizes_of(hf_config: Any) -> dict[str, Any]:
    text = hf_config.get_text_config(decoder=True)

    def first(default: Any, *names: str) -> Any:
        return first_number(text, names) or default

    width = first(0, "hidden_size", "d_model")
    heads = first(1, "num_attention_heads", "n_head")
    layers = first(1, "num_hidden_layers", "n_layer", "num_layers")
    window = setting(text, "sliding_window")
    types = setting(text, "layer_types") or []
    in_windows = bool(window) and {*types} <= {FULL, SLIDING}
    return {
        "vocab_size": first(0, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": first(4 * width, "intermediate_size", "ffn_dim", "n_inner"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": first(heads, "num_key_value_heads"),
        "head_dim": first(max(1, width // heads), "head_dim"),
        "max_position_embeddings": first(UNLIMITED, "max_position_embeddings", "n_positions"),
        "num_experts": first(0, *ALL_EXPERTS),
        "num_experts_per_tok": first(0, *CHOSEN_EXPERTS),
        "final_logit_softcapping": setting(text, "final_logit_softcapping")
        or setting(text, "logits_soft_cap"),  # RecurrentGemma
        "attn_logit_softcapping": setting(text, "attn_logit_softcapping"),
        "sliding_window": window if in_windows else None,
        "layer_types": tuple(types) if in_windows else (),
    }


def setting(text: Any, name: str) -> Any:
    """Return a value of a configuration object; None if it has none, or one for each block."""
    try:
        return getattr(text, name, None)
    except Exception:  # transformers' own, of a value that differs between blocks
        return None


def first_number(text: Any, names: Sequence[str]) -> int:
    """Return the first of these values that is a whole number above 0; 0 if none is."""
    values = (setting(text, name) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), 0)


def build_hf_model(config: ModelConfig) -> PreTrainedModel:
    """Return transformers' model in float32.

    Its parameters are on the meta device, its buffers on the CPU. A model that embeds texts has no
    head, and an encoder that of its labels. Raises UserError if transformers has no such class.
    """
    # texts are scored by a head of this program's, which takes the place of that of the vocabulary
    has_own_head = not config.encoder and (config.reads_images or not config.tags)
    auto = published_class(replace(config, labels=()) if has_own_head else config)
    hf_config = config_object(config.source, config.folder)
    text = hf_config.get_text_config(decoder=True)
    text.update({"vocab_size": config.vocab_size or text.vocab_size})
    try:
        with quiet_transformers(), torch.device("cpu"), parameters_on_meta():
            if config.scores:
                hf_config.update({"num_labels": config.scores})
            hf = auto.from_config(
                hf_config, trust_remote_code=remote_code_is_allowed(), dtype=torch.float32
            )
            if config.mtp_heads:
                add_mtp_head(hf, config, *block_list(hf))
            return hf
    except Exception as error:  # any, from what transformers' class makes of the values
        lines = str(error).strip().splitlines() or [type(error).__name__]
        problem = Problem(f"model_type={config.family}", lines[0][:300])
        kind = "causal language model" if config.predicts else "model with this head"
        title = f"transformers cannot build a {kind} from this configuration"
        raise UserError(title, [problem]) from None


def build_classifier(config: ModelConfig) -> PreTrainedModel:
    """Return transformers' model with a head for labels and a tower, on the meta device.

    Raises UserError.
    """
    bare = build_hf_model(replace(config, labels=(), problem="", pooling="last"))
    bare.config.update({"num_labels": config.scores})
    with quiet_transformers(), torch.device("cpu"), parameters_on_meta():
        model: PreTrainedModel = class_with_tower(config, type(bare))._from_config(
            bare.config, dtype=torch.float32
        )
    return model


def class_with_tower(config: ModelConfig, bare: type) -> Any:
    """Return transformers' class of a model with a head for labels and a tower.

    Where transformers has none, it is made of its generic one, as the export's README.md does.
    bare: the class of the model without a head.
    """
    generic = GenericForTokenClassification if config.tags else GenericForSequenceClassification
    parent = next(c for c in bare.__mro__ if c.__name__.endswith("PreTrainedModel"))
    known = getattr(transformers, config.architecture, None)
    return known or type(config.architecture, (generic, parent), {})


def published_class(config: ModelConfig) -> Any:
    """Return the class by which transformers loads a folder of this model with its head."""
    if config.scores and config.reads_images:
        described = config_object(config.source, config.folder)
        bare: Any = transformers.MODEL_MAPPING[type(described)]
        return class_with_tower(config, bare)
    if config.scores:
        kinds = AutoModelForSequenceClassification, AutoModelForTokenClassification
        return kinds[bool(config.tags)]
    if config.pooling or config.encoder:
        return AutoModel
    return AutoModelForImageTextToText if config.reads_images else AutoModelForCausalLM


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Print no warnings of transformers within the context, and never those that come once."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(QUIET)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are built within have parameters on the meta device, and real buffers.

    Constructors compute buffers, such as frequencies of rotations, that no file holds.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a tied one is already
            trained = parameter.requires_grad
            self._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=trained)

    with patch.object(nn.Module, "register_parameter", register_on_meta), LargeOnMeta():
        yield


class LargeOnMeta(TorchFunctionMode):
    """Makes large new tensors on the meta device: parameters, before they are registered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NEW_TENSORS and "device" not in kwargs:
            size = kwargs.get("size", args)
            size = size[0] if size and isinstance(size[0], tuple | list) else size
            if all(isinstance(n, int) for n in size) and math.prod(size) > LARGEST_BUFFER:
                kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def describe(hf: PreTrainedModel) -> Described:
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if head is None and is_encoder(hf.config.to_dict()):
        return describe_encoder(hf)
    if head is None:
        raise UserError(
            "the model writes no text", type(hf).__name__, "has no head that makes logits"
        )
    named = {id(module): name for name, module in hf.named_modules()}
    names = WeightNames(
        embedding=f"{named[id(embedding)]}.weight",
        head=f"{named[id(head)]}.weight",
        head_bias="" if head.bias is None else f"{named[id(head)]}.bias",
        blocks=block_list(hf)[0] + ".",
        base="" if hf.base_model is hf else f"{hf.base_model_prefix}.",
    )
    mark_experts(hf)
    of_text = language_model(hf) | {head}
    shares = {
        id(parameter): getattr(module, "active_share", 1) if module in of_text else 0
        for module in hf.modules()
        for parameter in module.parameters(recurse=False)
    }
    numbers = sum(p.numel() for p in hf.parameters())
    used = sum(round(p.numel() * shares[id(p)]) for p in hf.parameters())
    watched = tuple(routers(hf, block_list(hf)[1]))
    width, tied = head.weight.shape[1], head.weight is embedding.weight
    return Described(names, width, tied, (numbers, used), watched, 0)


def describe_encoder(hf: PreTrainedModel) -> Described:
    """Return what an encoder without a head says about itself."""
    named = {id(module): name for name, module in hf.named_modules()}
    names = WeightNames(
        embedding=f"{named[id(hf.get_input_embeddings())]}.weight",
        head="",
        blocks=block_list(hf)[0] + ".",
        base=f"{hf.base_model_prefix}.",
    )
    numbers = sum(p.numel() for p in hf.parameters())
    sizes = sizes_of(hf.config)
    positions = sizes["max_position_embeddings"] - unused_positions(hf)
    return Described(names, sizes["hidden_size"], False, (numbers, numbers), (), positions)


def unused_positions(hf: PreTrainedModel) -> int:
    """Return the number of an encoder's first positions that are no token's: RoBERTa's padding."""
    tables = [module for name, module in hf.named_modules() if name.endswith("position_embeddings")]
    paddings = [getattr(table, "padding_idx", None) for table in tables]
    return max([0, *(padding + 1 for padding in paddings if padding is not None)])


def mark_experts(hf: PreTrainedModel) -> None:
    """Set `active_share` on each module that holds the matrices of all experts of a block.

    It is the share of the experts that a token is sent to.
    """
    text = hf.config.get_text_config(decoder=True)
    count, chosen = first_number(text, ALL_EXPERTS), first_number(text, CHOSEN_EXPERTS)
    if not count or not chosen:
        return
    module: Any
    for module in hf.modules():
        own = list(module.parameters(recurse=False))
        if any(p.ndim == 3 and len(p) == count for p in own):
            vars(module)["active_share"] = chosen / count


def language_model(hf: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that compute text; all, if the model has no part for anything else."""
    decoder = hf.get_decoder() if hasattr(hf, "get_decoder") else None
    return set((decoder if isinstance(decoder, nn.Module) else hf).modules())


def block_list(hf: PreTrainedModel) -> tuple[str, dict[str, nn.Module]]:
    """Return the name of the list of blocks, and the blocks by number.

    These are the modules that transformers does not split over devices, if it names any, else the
    modules of the longest list.
    """
    language = language_model(hf)
    lists = {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and module in language
    }
    whole = set(getattr(hf, "_no_split_modules", None) or ())
    named = {
        name: modules
        for name, modules in lists.items()
        if whole and all(type(module).__name__ in whole for module in modules)
    }
    candidates = named or lists
    if not candidates:
        raise UserError(
            "the model has no blocks",
            type(hf).__name__,
            "has no list of blocks to shard one by one",
        )
    longest = max(candidates, key=lambda name: len(candidates[name]))
    blocks = [each for each in candidates[longest] if not isinstance(each, MtpBlock)]
    return longest, {str(i): module for i, module in enumerate(blocks)}
