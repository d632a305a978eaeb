"""Trials, on a small copy, of what a model of transformers does with packed rows and logits.

Nothing is looked up in a list of architectures: a model with fewer and narrower blocks is built
from the same configuration, with random weights, and its results are compared.
"""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.document_layers import mixing_kinds, recorded_calls
from fsdp_trainer.models.hf.hf_config import (
    ALL_EXPERTS,
    CHOSEN_EXPERTS,
    config_object,
    first_number,
    quiet_transformers,
    setting,
    sizes_of,
)
from fsdp_trainer.models.hf.hf_decoder import TransformersDecoder
from fsdp_trainer.models.hf.hf_encoder import TransformersEncoder

LENGTHS = (17, 23)
"""Tokens of the two documents that are computed packed and alone."""
WINDOW = 8
"""Attention window of the small copy, shorter than its documents."""
APART = 2e-5
"""Largest difference, relative to the largest number, between equal results in float32."""
VOCABULARY = 128
NARROW = 64
"""Width that a copy is not made narrower than."""
MULTIPLE = 16
"""Widths of the copy are multiples of this: kernels for experts need it."""
LEAST_HEADS = 4
MOST_NUMBERS = 2e8
"""Size of the largest copy that is tried."""
DIVIDED = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden"),
    *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("word_embed_proj_dim", "dense_intermediate_size", "intermediate_size_mlp", "lru_width"),
    *("mamba_d_ssm", "mamba_n_heads", "mamba_num_heads", "num_heads", "block_ff_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "conv_dim", "ffn_hidden_size"),
)
"""transformers' names of what is made smaller with the number of heads."""
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
TOWER_BLOCKS = ("depth", "num_hidden_layers")
"""transformers' names of the number of blocks of a tower for images."""
WIDTHS = ("hidden_size", "n_embd", "d_model")
FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
"""transformers' names of factors, or divisors, of the logits."""
SET = {
    "n_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "num_nextn_predict_layers": 0,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Probed(NamedTuple):
    """The findings about an architecture.

    documents_attention: our attention over documents gives transformers' results. mixing: largest
    relative change of a document's states by other documents in its row; 0: equal but for rounding;
    infinite: no small copy could be built. logit_factor: of the head's logits. document_layers:
    classes of layers that must compute each document by itself for that. autocast: the class
    multiplies float32 numbers with weights, which fails for weights of 16 bits.
    """

    documents_attention: bool
    mixing: float
    logit_factor: float
    document_layers: tuple[str, ...] = ()
    autocast: bool = False


NOT_KNOWN = Probed(False, math.inf, 1.0)


def probe(config: ModelConfig) -> Probed:
    for narrow in (True, False):
        # an architecture raises anything for sizes that it does not have, and warns of kernels that
        # are missing, which a CPU never has
        with quiet_transformers(), suppress(Exception):
            model = small_model(small_copy(config, narrow))
            return probed(model)._replace(autocast=needs_autocast(model))
    return NOT_KNOWN


def probed(model: TransformersDecoder) -> Probed:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=generator)
    trial = Trial(tokens)
    expected = trial.alone(model.states)
    if model.config.encoder:
        ours = difference(model.states(trial.tokens, trial.positions, trial.layout), expected)
        return Probed(ours <= APART, 0.0 if ours <= APART else ours, 1.0)
    first = LENGTHS[0]
    factor = factor_of(model, expected[:, :first], tokens[:, :first])
    ours, theirs = changes(model, trial, expected)
    best = min(ours, theirs)
    layers: tuple[str, ...] = ()
    if best > APART and (layers := mixing_layers(model, trial)):
        model.keep_apart(layers)
        ours, theirs = changes(model, trial, expected)
        layers = layers if min(ours, theirs) <= APART else ()
        best = min(ours, theirs) if layers else best
    return Probed(ours <= APART, 0.0 if best <= APART else best, factor, layers)


def needs_autocast(model: TransformersDecoder) -> bool:
    """Return True if the class cannot compute with weights of 16 bits and buffers of 32.

    Rounds the model's weights.
    """
    for module in model.modules():
        for name, weight in module._parameters.items():
            module._parameters[name] = None if weight is None else rounded(weight)
    tokens = torch.arange(sum(LENGTHS))[None]
    try:
        model.states(tokens, positions_of(tokens), None)
    except RuntimeError:  # torch names the two formats
        return True
    return False


def rounded(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.bfloat16(), requires_grad=False)


def changes(model: TransformersDecoder, trial: "Trial", expected: Tensor) -> tuple[float, float]:
    """Return the difference of packed states from the expected ones, by our attention and theirs.

    Infinite: not computed.
    """
    differences = []
    for ours in (True, False):
        try:
            packed = model.states(trial.tokens, trial.positions, trial.layout, ours=ours)
            differences.append(difference(packed, expected))
        except Exception:  # NotComputed, or whatever a class raises for an argument that it lacks
            differences.append(math.inf)
    return differences[0], differences[1]


def mixing_layers(model: TransformersDecoder, trial: "Trial") -> tuple[str, ...]:
    """Return the classes of the layers of a model that mix documents, but for its attention."""
    blocks = [*model.blocks().values()]
    for ours in (True, False):
        with recorded_calls(blocks) as calls, suppress(Exception):
            model.states(trial.tokens, trial.positions, trial.layout, ours=ours)
            return mixing_kinds(calls, trial.layout, APART)
    return ()


class Trial:
    """Two documents in one row of `tokens`: where they are, and their states alone."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens
        self.positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(tokens.device)
        self.layout = DocumentAttention([list(LENGTHS)], sum(LENGTHS), tokens.device)

    def alone(self, states: Callable[[Tensor, Tensor, None], Tensor]) -> Tensor:
        """Return the states of both documents, each computed by itself, one after the other.

        states: a function of tokens, positions, and no layout.
        """
        documents = self.tokens.split(LENGTHS, 1)
        return torch.cat([states(each, positions_of(each), None) for each in documents], 1)


def positions_of(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinite if not finite."""
    value = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-20))
    return value if math.isfinite(value) else math.inf


def factor_of(model: TransformersDecoder, states: Tensor, tokens: Tensor) -> float:
    own = model.own_logits(tokens, positions_of(tokens))
    text = model.hf.config.get_text_config(decoder=True)
    named = (setting(text, name) for name in FACTORS)
    values = [value for value in named if isinstance(value, int | float) and value]
    candidates = [1.0, *values, *(1 / v for v in values)]

    def misfit(factor: float) -> float:
        with torch.no_grad():
            return difference(model.lm_head.capped(model.lm_head(states * factor)), own)

    return min(candidates, key=misfit)


@torch.no_grad()
def small_model(config: ModelConfig) -> TransformersDecoder:
    with torch.device("meta"):
        model = (TransformersEncoder if config.encoder else TransformersDecoder)(config)
    if sum(p.numel() for p in model.parameters()) > MOST_NUMBERS:
        raise UserError("the copy is too large", [])
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(0, 0.1, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for module in model.hf.modules():
            if module is not model.lm_head:
                model.hf._init_weights(module)
    model.fill_buffers()
    return model.requires_grad_(False)


def small_copy(config: ModelConfig, narrow: bool) -> ModelConfig:
    """Return the configuration of a model with fewer blocks, experts and tokens.

    narrow: and with fewer channels.
    """
    hf_config = shrunk(config_object(config.source, config.folder), narrow)
    small = {**hf_config.to_dict(), "model_type": config.source.get("model_type")}
    sizes = sizes_of(config_object(small, config.folder)) | {"vocab_size": VOCABULARY}
    return replace(config, source=small, mtp_heads=0, **sizes)


def shrunk(hf_config: Any, narrow: bool, blocks: int = 2) -> Any:
    """Return a configuration object with fewer blocks, experts and tokens.

    narrow: and narrower. blocks: the least number of them, where there are as many.
    """
    hf_config = copy.deepcopy(hf_config)
    text = hf_config.get_text_config(decoder=True)
    cut_blocks(text, blocks)
    cut_tower(hf_config)
    for name, value in {**SET, "vocab_size": VOCABULARY}.items():
        if setting(text, name) is not None:
            setattr(text, name, value)
    for names, limit in ((ALL_EXPERTS, 4), (CHOSEN_EXPERTS, 2)):
        for name in names:
            if isinstance(count := setting(text, name), int):
                setattr(text, name, min(count, limit))
    by = divisor(text) if narrow else 1
    own_names = {text.attribute_map.get(name, name) for name in DIVIDED}
    for name in own_names:
        value = setting(text, name)
        if isinstance(value, int) and value > 1:
            is_count = name.endswith(("heads", "head"))
            smaller = max(1, int(value / by)) if is_count else round_up(int(value / by), MULTIPLE)
            setattr(text, name, smaller)
    return hf_config


def cut_tower(hf_config: Any) -> None:
    tower = getattr(hf_config, "vision_config", None)
    for name in TOWER_BLOCKS:
        if isinstance(setting(tower, name), int):
            setattr(tower, name, 1)


def divisor(text: Any) -> float:
    heads = first_number(text, HEADS) or 1
    width = first_number(text, WIDTHS) or NARROW

    def fits(by: int) -> bool:
        smaller = width // by
        return not heads % by and not width % (by * MULTIPLE) and smaller >= NARROW

    fitting = [n for n in range(2, heads // LEAST_HEADS + 1) if fits(n)]
    if not fitting and heads > LEAST_HEADS:
        return heads / LEAST_HEADS  # the number of heads has no divisor
    return max(fitting, default=1)


def drop_from(by_number: dict[Any, Any], first: int) -> None:
    for key in [key for key in by_number if int(key) >= first]:
        del by_number[key]


def cut_blocks(text: Any, least: int) -> None:
    """Keep as many blocks of a configuration as it takes to have one of each kind."""
    own = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = getattr(text, own)
    lists = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list | tuple) and len(value) == layers
    }
    blocks = min(layers, least)
    for values in lists.values():
        kinds = {str(value) for value in values}
        if len(kinds) < layers:
            firsts = [next(i for i, v in enumerate(values) if str(v) == kind) for kind in kinds]
            blocks = max(blocks, 1 + max(firsts))
    for name, value in lists.items():
        setattr(text, name, value[:blocks])
    for value in vars(text).values():
        if isinstance(value, dict) and all(str(key).isdigit() for key in value):
            drop_from(value, blocks)
    setattr(text, own, blocks)
