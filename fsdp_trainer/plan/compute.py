"""The seconds that the computation of a micro-batch takes.

Three rates limit it: of matrix products, of the attention kernel, and of the device's memory. The
last one applies to elementwise operators and to unsharded parameters that FSDP2 copies.
docs/how-plan-works.md gives the reasons, and compares with published trainings.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.schema import ActivationCheckpoint, Optim, Precision
from fsdp_trainer.models.config import EXPERTS
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.plan.planned_model import PlannedModel

PRODUCTS = 0.565
"""Share of an H100's dense peak that matrix products reach at WIDTH and TOKENS."""
WIDTH, BY_WIDTH, WIDEST = 4096, 0.1, 1.1
"""Narrow models have small products, which are slower.

The rate is multiplied by (hidden size / WIDTH) ** BY_WIDTH, at most WIDEST.
"""
TOKENS, BY_TOKENS, TOKENS_RANGE = 16384, 0.1, (0.8, 1.15)
"""Micro-batches of few tokens have small products too.

The rate is multiplied by (tokens / TOKENS) ** BY_TOKENS, within TOKENS_RANGE.
"""
SPREAD = 1.18
"""Seconds at the slow end divided by those in the middle, and of the middle by the fast end."""
MEMORY = 0.8
"""Share of the device's memory rate that elementwise kernels reach."""
FLOAT8 = {"tensorwise": 1.4, "rowwise": 1.15, "rowwise_with_gw_hp": 1.1}
"""Speed-up of a compiled block's matrix products, casts included.

Without compilation the casts take as long as the products save (torchtitan's pull request 778).
"""
FASTER_ATTENTION = {"cudnn": 1.8, "fa3": 1.8, "fa4": 1.8}
"""Speed relative to FlashAttention 2.

Published: 1.7 to 2.3 for cuDNN and FlashAttention 3 on Hopper.
"""
HEAD_BYTES = 30
"""Bytes read and written for each logit: the product, its float32 copy, softmax and gradient."""
COPIED_BYTES = 20
"""Bytes read and written for each trained parameter and micro-batch, besides NCCL's own traffic.

FSDP2 copies gathered weights out of a message, in forward and in backward, and unsharded gradients
into one.
"""
COPIES_OF_FROZEN = 4
"""Number of times that a gathered frozen byte is read or written. It has no gradient to copy."""
READ_BY_A, SCALED_BY_DORA = 2, 4
"""Bytes for each input number that A reads, and for each output number that DoRA scales.

DoRA scales an output by the length of its row of the matrix.
"""
DORA_BYTES = 10
"""Bytes read and written for each number of a matrix that DoRA adapts, to find its row lengths."""


class Traffic(NamedTuple):
    """Bytes read and written for each bfloat16 number in one forward.

    norm: for each number that is normalised; residual: for each number of an addition to the
    residual stream; gate: for each inner number of the MLP; rotation: for each number of queries
    and keys; adapter: for each output number of an adapted layer (product with B, scale, sum);
    decoding: for each number of a 4-bit matrix, each time that it is decoded.
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
    """Floating-point operations of one row in forward.

    For the gradients of inputs backward takes as many, and twice as many for attention. trained,
    trained_head: the part of `products` and `head` with trained weights; in backward the gradients
    of these weights take as many again.
    """

    products: float
    attention: float
    head: float
    trained: float
    trained_head: float


class Seconds(NamedTuple):
    """Seconds of computation in one micro-batch. head: all work of the head, done in forward."""

    forward: float
    backward: float
    head: float


def compute_seconds(model: PlannedModel, device: Device, best: bool | None = None) -> Seconds:
    """Return the seconds of a micro-batch.

    best: True for the fast end of the range, False for the slow end, None for the middle.
    """
    if device.efficiency:
        return _at_efficiency(model, device, device.efficiency)
    rows, flops = model.layout.batch.micro_rows, forward_flops(model)
    again = recomputed(model.checkpointing)
    rate = product_rate(model, device)
    products = rows / rate / float8_speedup(model)
    attention = (
        rows * flops.attention / attention_rate(model.options.attention_kernel, device, rate)
    )
    elementwise = elementwise_seconds(model, device)
    weights = weight_seconds(model, device)
    logits = model.layout.tokens * model.part.shape.vocab_size * HEAD_BYTES
    head = rows * (2 * flops.head + flops.trained_head) / rate
    spread = {True: 1 / SPREAD, False: SPREAD, None: 1.0}[best]
    reached = model.own.backward_share
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


def _at_efficiency(model: PlannedModel, device: Device, efficiency: float) -> Seconds:
    """Return the seconds if all counted operations together reach this share of the peak."""
    rows, flops = model.layout.batch.micro_rows, forward_flops(model)
    again = recomputed(model.checkpointing)
    rate = peak_rate(model.precision, device) * efficiency / rows
    speedup = float8_speedup(model)
    reached = model.own.backward_share
    products = (reached * flops.products * (1 + again.products) + flops.trained) / speedup
    return Seconds(
        forward=(flops.products / speedup + flops.attention) / rate,
        backward=(products + reached * flops.attention * (2 + again.attention)) / rate,
        head=(2 * flops.head + flops.trained_head) / rate,
    )


class WeightSeconds(NamedTuple):
    """Seconds of memory traffic for weights in a micro-batch, whatever its number of tokens."""

    forward: float
    backward: float


def weight_seconds(model: PlannedModel, device: Device) -> WeightSeconds:
    """Return the seconds to copy gathered weights and gradients, and to decode 4-bit matrices."""
    sharding, adapters = model.layout.sharding, model.own.adapters
    whole = model.own.units(model.formats, sharding, 1).all
    trained = whole.trained * COPIED_BYTES
    frozen = (whole.gathered - whole.trained * model.number) * COPIES_OF_FROZEN
    of_experts = adapters.encoded_experts / sharding.expert
    decoded = (adapters.encoded + of_experts) * traffic(model.compiled).decoding
    again = recomputed(model.checkpointing).products
    lengths = 0.0
    if model.adapter == "dora":
        lengths = adapters.adapted * DORA_BYTES + decoded
    rate = device.memory_rate * MEMORY
    return WeightSeconds(
        forward=(trained / 3 + frozen / 2 + decoded + lengths) / rate,
        backward=(trained * 2 / 3 + frozen / 2 + decoded + (decoded + lengths) * again) / rate,
    )


class Recomputed(NamedTuple):
    """Shares of a block's forward that backward recomputes."""

    products: float
    attention: float
    elementwise: float


def recomputed(cfg: ActivationCheckpoint) -> Recomputed:
    """Return the shares of forward that activation checkpointing recomputes."""
    if cfg.mode == "none":
        return Recomputed(0.0, 0.0, 0.0)
    if cfg.mode == "budget":  # upper bound: the compiler first recomputes the cheapest operators
        return Recomputed(*[1 - cfg.budget] * 3)
    saved = cfg.save if cfg.mode == "selective" else []
    products = 0.0 if "matmul" in saved else 0.5 if "second_matmul" in saved else 1.0
    every = cfg.every
    return Recomputed(products / every, ("attention" not in saved) / every, 1 / every)


def forward_flops(model: PlannedModel) -> Flops:
    """Return the operations of one row on each of the ranks that split it.

    Attention is counted as if the row were one document.
    """
    layout, config, parts = model.layout, model.part.shape, model.own
    sharding, tokens = layout.sharding, layout.row_tokens
    whole_cost = float(config.attention_cost(np.array([layout.batch.seq_len]))[0])
    attention_cost = whole_cost / sharding.context
    # kernels need values as wide as keys: they are padded with zeros (models.latent_attention)
    heads_width = config.num_attention_heads * max(config.head_dim, config.value_dim)
    ends = replace(config, num_hidden_layers=0).parameters()
    blocks = config.parameters(active=True) - ends
    # each rank of a tensor group sends only its own tokens to experts
    others = 1 - 1 / sharding.tensor
    routed, trained_routed = (others * numbers for numbers in parts.routed)
    head = 2.0 * config.embedding_rows * config.hidden_size * tokens
    return Flops(
        products=2.0 * (blocks - routed + parts.adapters.numbers) * tokens,
        attention=2.0 * config.num_hidden_layers * heads_width * attention_cost,
        head=head,
        trained=2.0 * (parts.trained_active - trained_routed) * tokens,
        trained_head=head * parts.head.requires_grad,
    )


def peak_rate(precision: Precision, device: Device) -> float:
    """Return the device's peak in FLOP/s, in the format of the computation."""
    in_16_bits = precision.param_dtype != "float32"
    return (device.flops or 0.0) if in_16_bits else device.flops_float32


def product_rate(model: PlannedModel, device: Device) -> float:
    """Return the FLOP/s that matrix products reach, in the middle of the range."""
    slowest, fastest = TOKENS_RANGE
    by_tokens = min(fastest, max(slowest, (model.layout.tokens / TOKENS) ** BY_TOKENS))
    by_width = min(WIDEST, (model.config.hidden_size / WIDTH) ** BY_WIDTH)
    return peak_rate(model.precision, device) * PRODUCTS * device.reach * by_tokens * by_width


def newton_schulz_rate(optim: Optim, device: Device) -> float:
    """Return the FLOP/s of Muon's products, in the middle of the range and for wide matrices."""
    in_bfloat16 = optim.ns_dtype == "bfloat16"
    peak = (device.flops or 0.0) if in_bfloat16 else device.flops_float32
    return peak * (device.efficiency or PRODUCTS * device.reach)


def attention_rate(kernel: str, device: Device, products: float) -> float:
    """Return the FLOP/s of attention, counted as causal.

    kernel: model.attention_kernel; products: FLOP/s of matrix products.
    """
    return products / device.attention * FASTER_ATTENTION.get(kernel, 1.0)


def float8_speedup(model: PlannedModel) -> float:
    """Return the speed-up of matrix products by the chosen float8 format; 1 without one."""
    return FLOAT8.get(model.precision.float8 or "", 1.0) if model.compiled else 1.0


def elementwise_seconds(model: PlannedModel, device: Device) -> float:
    """Return the seconds of norms, rotations, gates and additions of all blocks in one forward."""
    config, tensor, each = model.part.shape, model.layout.sharding.tensor, traffic(model.compiled)
    family, hidden = config.family_spec, config.hidden_size
    norms = sum(name is not None for name in NORMS[family.norms])
    sizes = config.projection_sizes
    heads = sizes["q_proj"] + sizes["k_proj"]
    routed_width = config.num_experts_per_tok * config.expert_size
    # a rank of a tensor group computes experts for its own tokens, but its own channels of dense
    # feed-forwards for all tokens
    others = 1 - 1 / tensor
    widths = [
        config.feed_forward_width(kind) - others * routed_width * (kind == EXPERTS)
        for kind in config.feed_forwards
    ]
    inner = sum(widths) / config.num_hidden_layers
    numbers = (
        hidden * (norms * each.norm + 2 * each.residual) / tensor
        + heads * (each.rotation + (each.norm if family.qk_norm else 0))
        + inner * each.gate
    )
    adapters = model.own.adapters
    of_adapters = adapters.inputs * READ_BY_A + adapters.outputs * each.adapter
    if model.adapter == "dora":
        of_adapters += adapters.outputs * SCALED_BY_DORA
    wider = model.number / torch.bfloat16.itemsize
    moved = (numbers * config.num_hidden_layers + of_adapters) * wider * model.layout.tokens
    return moved / (device.memory_rate * MEMORY)


def traffic(compiled: bool) -> Traffic:
    """Return the memory traffic of elementwise operators, compiled or not."""
    return COMPILED if compiled else EAGER
