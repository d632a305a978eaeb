"""The seconds that the arithmetic of a micro-batch takes.

Three rates bound it: that of matrix products, that of attention's kernel, and that of the
device's memory, for elementwise operators and for whole parameters that FSDP2 copies. docs/plan.md
has the reasons, and compares with published trainings.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fsdp_trainer.config.dimensions import own_length
from fsdp_trainer.config.schema import ActivationCheckpoint, TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.plan.units import model_parts

PRODUCTS = 0.565
"""Share of an H100's dense peak that matrix products reach at WIDTH and TOKENS."""
WIDTH, BY_WIDTH, WIDEST = 4096, 0.1, 1.1
"""Narrow models have small products: by this power of the hidden size, up to WIDEST."""
TOKENS, BY_TOKENS, TOKENS_RANGE = 16384, 0.1, (0.8, 1.15)
"""So do micro-batches of few tokens: by this power of their number, within the range."""
SPREAD = 1.18
"""Slow end over the middle, and the middle over the fast end."""
MEMORY = 0.8
"""Share of the device's memory rate that elementwise kernels reach."""
FLOAT8 = {"tensorwise": 1.4, "rowwise": 1.15, "rowwise_with_gw_hp": 1.1}
"""How much faster a compiled block's matrix products are, casts included. Uncompiled casts take
what the products save (torchtitan's pull request 778)."""
FASTER_ATTENTION = {"cudnn": 1.8, "fa3": 1.8, "fa4": 1.8}
"""Rate over FlashAttention 2's. Published: 1.7 to 2.3 for cuDNN and FlashAttention 3 on Hopper."""
HEAD_BYTES = 30
"""Read and written for each logit: the product, its float32 copy, softmax and gradient."""
COPIED_BYTES = 20
"""Read and written for each trained parameter and micro-batch: FSDP2 copies gathered weights out of
a message, forward and backward, and whole gradients into one, beside NCCL's own traffic."""
COPIES_OF_FROZEN = 4
"""Times that a gathered frozen byte is read or written: no gradient is copied."""
READ_BY_A, SCALED_BY_DORA = 2, 4
"""Bytes of each number that enters an adapted layer, and that DoRA scales by the row's length."""
DORA_BYTES = 10
"""Read and written for each number of a matrix that DoRA adapts, for the lengths of its rows."""


class Traffic(NamedTuple):
    """Bytes read and written for each bfloat16 number in one forward.

    norm: for each number normalised; residual: of each addition to the stream, gate: for each
    number of the MLP's inside; rotation: of queries and keys. adapter: of each number that an
    adapted layer gives: B's product, its scale, the sum; decoding: of each number of a 4-bit
    matrix, each time that it is decoded.
    """

    norm: float
    residual: float
    gate: float
    rotation: float
    adapter: float
    decoding: float


EAGER = Traffic(norm=36, residual=6, gate=10, rotation=20, adapter=12, decoding=10.5)
COMPILED = Traffic(norm=4, residual=3, gate=6, rotation=4, adapter=8, decoding=2.5)


class Flops(NamedTuple):
    """Operations of one row forward. Backward takes as many for gradients of inputs.

    Attention takes twice as many. trained, trained_head: of the products, those with trained
    weights, whose gradients take as many again.
    """

    products: float
    attention: float
    head: float
    trained: float
    trained_head: float


class Seconds(NamedTuple):
    """The work of one micro-batch. The head does all of its work forward."""

    forward: float
    backward: float
    head: float


def compute_seconds(
    cfg: TrainConfig, config: ModelConfig, device: Device, best: bool | None = None
) -> Seconds:
    """Return the seconds of a micro-batch at the fast or slow end; None: in the middle."""
    if device.efficiency:
        return _at_efficiency(cfg, config, device, device.efficiency)
    rows, flops = cfg.batch.micro_rows, forward_flops(cfg, config)
    again = recomputed(cfg.activation_checkpoint)
    rate = product_rate(cfg, config, device)
    products = rows / rate / float8_speedup(cfg)
    attention = rows * flops.attention / attention_rate(cfg, device, rate)
    elementwise = elementwise_seconds(cfg, config, device)
    weights = weight_seconds(cfg, config, device)
    logits = rows * own_length(cfg.sharding, cfg.batch.seq_len) * config.vocab_size * HEAD_BYTES
    head = rows * (2 * flops.head + flops.trained_head) / rate
    spread = {True: 1 / SPREAD, False: SPREAD, None: 1.0}[best]
    reached = model_parts(config, cfg).backward_share
    return Seconds(
        forward=spread * (products * flops.products + attention + elementwise + weights.forward),
        backward=spread
        * (
            products * (reached * flops.products * (1 + again.products) + flops.trained)
            + attention * reached * (2 + again.attention)
            + elementwise * reached * (2 + again.elementwise)
            + weights.backward
        ),
        head=spread * (head + logits / (device.memory_rate * MEMORY)),
    )


def _at_efficiency(
    cfg: TrainConfig, config: ModelConfig, device: Device, efficiency: float
) -> Seconds:
    """Return the seconds if all counted operations reach this share of the peak together."""
    rows, flops = cfg.batch.micro_rows, forward_flops(cfg, config)
    again = recomputed(cfg.activation_checkpoint)
    rate = peak_rate(cfg, device) * efficiency / rows
    speedup = float8_speedup(cfg)
    reached = model_parts(config, cfg).backward_share
    products = (reached * flops.products * (1 + again.products) + flops.trained) / speedup
    return Seconds(
        forward=(flops.products / speedup + flops.attention) / rate,
        backward=(products + reached * flops.attention * (2 + again.attention)) / rate,
        head=(2 * flops.head + flops.trained_head) / rate,
    )


class WeightSeconds(NamedTuple):
    """Traffic for weights in each micro-batch, however many tokens it has."""

    forward: float
    backward: float


def weight_seconds(cfg: TrainConfig, config: ModelConfig, device: Device) -> WeightSeconds:
    """Return the seconds to copy gathered weights and gradients, and to decode 4-bit matrices."""
    parts = model_parts(config, cfg)
    whole = parts.units(cfg, 1).all
    compute = getattr(torch, cfg.precision.param_dtype).itemsize
    trained = whole.trained * COPIED_BYTES
    frozen = (whole.gathered - whole.trained * compute) * COPIES_OF_FROZEN
    of_experts = parts.adapters.encoded_experts / cfg.sharding.expert
    decoded = (parts.adapters.encoded + of_experts) * traffic(cfg).decoding
    again = recomputed(cfg.activation_checkpoint).products
    lengths = 0.0
    if cfg.adapter.name == "dora":
        lengths = parts.adapters.adapted * DORA_BYTES + decoded
    rate = device.memory_rate * MEMORY
    return WeightSeconds(
        forward=(trained / 3 + frozen / 2 + decoded + lengths) / rate,
        backward=(trained * 2 / 3 + frozen / 2 + decoded + (decoded + lengths) * again) / rate,
    )


class Recomputed(NamedTuple):
    """Shares of a block's forward that backward computes again."""

    products: float
    attention: float
    elementwise: float


def recomputed(cfg: ActivationCheckpoint) -> Recomputed:
    """Return what activation checkpointing computes again."""
    if cfg.mode == "none":
        return Recomputed(0.0, 0.0, 0.0)
    if cfg.mode == "budget":  # at most: the compiler begins with what costs least
        return Recomputed(*[1 - cfg.budget] * 3)
    saved = cfg.save if cfg.mode == "selective" else []
    products = 0.0 if "matmul" in saved else 0.5 if "second_matmul" in saved else 1.0
    every = cfg.every
    return Recomputed(products / every, ("attention" not in saved) / every, 1 / every)


def forward_flops(cfg: TrainConfig, config: ModelConfig) -> Flops:
    """Return the operations of one row on each of the ranks that share it, its attention as if the
    row were one document."""
    seq_len, parts = own_length(cfg.sharding, cfg.batch.seq_len), model_parts(config, cfg)
    whole_cost = float(config.attention_cost(np.array([cfg.batch.seq_len]))[0])
    attention_cost = whole_cost / cfg.sharding.context
    # the kernels' values are as wide as keys, with channels of 0 (models.latent_attention)
    heads_width = config.num_attention_heads * max(config.head_dim, config.value_dim)
    ends = replace(config, num_hidden_layers=0).parameters()
    blocks = config.parameters(active=True) - ends
    # of a tensor group each rank sends its own tokens to experts
    others = 1 - 1 / cfg.sharding.tensor
    routed, trained_routed = (others * numbers for numbers in parts.routed)
    head = 2.0 * config.embedding_rows * config.hidden_size * seq_len
    return Flops(
        products=2.0 * (blocks - routed + parts.adapters.numbers) * seq_len,
        attention=2.0 * config.num_hidden_layers * heads_width * attention_cost,
        head=head,
        trained=2.0 * (parts.trained_active - trained_routed) * seq_len,
        trained_head=head * parts.head.requires_grad,
    )


def peak_rate(cfg: TrainConfig, device: Device) -> float:
    """Return the device's peak in the format that is computed in, FLOP/s."""
    in_16_bits = cfg.precision.param_dtype != "float32"
    return (device.flops or 0.0) if in_16_bits else device.flops_float32


def product_rate(cfg: TrainConfig, config: ModelConfig, device: Device) -> float:
    """Return the FLOP/s that matrix products reach, the middle of the range."""
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    slowest, fastest = TOKENS_RANGE
    by_tokens = min(fastest, max(slowest, (tokens / TOKENS) ** BY_TOKENS))
    by_width = min(WIDEST, (config.hidden_size / WIDTH) ** BY_WIDTH)
    return peak_rate(cfg, device) * PRODUCTS * device.reach * by_tokens * by_width


def newton_schulz_rate(cfg: TrainConfig, device: Device) -> float:
    """Return the FLOP/s of Muon's products, the middle of the range: those of wide matrices."""
    in_bfloat16 = cfg.optim.ns_dtype == "bfloat16"
    peak = (device.flops or 0.0) if in_bfloat16 else device.flops_float32
    return peak * (device.efficiency or PRODUCTS * device.reach)


def attention_rate(cfg: TrainConfig, device: Device, products: float) -> float:
    """Return the FLOP/s of attention, counted as causal. products: the rate of matrix products."""
    kernel = FASTER_ATTENTION.get(cfg.model.attention_kernel, 1.0)
    return products / device.attention * kernel


def float8_speedup(cfg: TrainConfig) -> float:
    """Return how much less time matrix products take in the chosen float8 format."""
    return FLOAT8.get(cfg.precision.float8 or "", 1.0) if cfg.compile.enabled else 1.0


def elementwise_seconds(cfg: TrainConfig, config: ModelConfig, device: Device) -> float:
    """Return the seconds of all blocks' norms, rotations, gates and additions in one forward."""
    each = traffic(cfg)
    family, hidden = config.family_spec, config.hidden_size
    norms = sum(name is not None for name in NORMS[family.norms])
    sizes = config.projection_sizes
    heads = sizes["q_proj"] + sizes["k_proj"]
    routed_width = config.num_experts_per_tok * config.expert_size
    # of experts a rank computes its own tokens, of dense feed-forwards its own channels
    others = 1 - 1 / cfg.sharding.tensor
    widths = [
        config.feed_forward_width(kind) - others * routed_width * (kind == EXPERTS)
        for kind in config.feed_forwards
    ]
    inner = sum(widths) / config.num_hidden_layers
    numbers = (
        hidden * (norms * each.norm + 2 * each.residual) / cfg.sharding.tensor
        + heads * (each.rotation + (each.norm if family.qk_norm else 0))
        + inner * each.gate
    )
    adapters = model_parts(config, cfg).adapters
    of_adapters = adapters.inputs * READ_BY_A + adapters.outputs * each.adapter
    if cfg.adapter.name == "dora":
        of_adapters += adapters.outputs * SCALED_BY_DORA
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    wider = getattr(torch, cfg.precision.param_dtype).itemsize / torch.bfloat16.itemsize
    moved = (numbers * config.num_hidden_layers + of_adapters) * wider * tokens
    return moved / (device.memory_rate * MEMORY)


def traffic(cfg: TrainConfig) -> Traffic:
    """Return what elementwise operators move, compiled or not."""
    return COMPILED if cfg.compile.enabled else EAGER
