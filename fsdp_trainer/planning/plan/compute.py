"""The seconds that the computation of a micro-batch takes.

Three rates limit it: of matrix products, of the attention kernel, and of the device's memory. The
last one applies to elementwise operators and to unsharded parameters that FSDP2 copies.
docs/how-plan-works.md gives the reasons, and compares with published trainings.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fsdp_trainer.config.devices import DEVICES, Device
from fsdp_trainer.config.schema import ActivationCheckpoint, Optim, Precision
from fsdp_trainer.models.config import EXPERTS
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.planning.plan.expert_exchange import mixtures
from fsdp_trainer.planning.plan.planned_model import PlannedModel

PRODUCTS = 0.565
"""Share of an H100's dense peak that matrix products reach at WIDTH and TOKENS."""
WIDTH, BY_WIDTH, WIDEST = 4096, 0.15, 1.15
"""Narrow models have small products, which are slower.

The rate is multiplied by (hidden size / WIDTH) ** BY_WIDTH, at most WIDEST.
"""
TOKENS, BY_TOKENS, SMALLEST = 16384, 0.08, 0.7
"""Micro-batches of few tokens have small products too.

The rate is multiplied by (tokens / TOKENS) ** BY_TOKENS, at least SMALLEST and at most 1. TOKENS is
for an H100, and grows with the peak of a device. For experts the tokens are the rows of one expert,
and the width is the smaller one of its matrices.
"""
SPREAD, SPREAD_OF_EXPERTS = 1.18, 1.4
"""Seconds at the slow end divided by those in the middle, and of the middle by the fast end.

Mixtures of experts depend more on kernels: Qwen3 30B-A3B on 8 B200 went from 221 to 670 TFLOP/s by
tuning (torchtitan's pull request 4605).
"""
MEMORY = 0.8
"""Share of the device's memory rate that elementwise kernels reach."""
FLASH_BACKWARD = 2.5
"""Operations of attention's backward divided by those of its forward.

FlashAttention computes the scores again: five products instead of two (Dao 2023, section 4.1).
"""
FASTER_ATTENTION = {"cudnn": 1.7, "fa3": 1.7, "fa4": 3.5}
"""Speed relative to FlashAttention 2.

Published: 1.7 to 2.3 for cuDNN and FlashAttention 3 on Hopper. FlashAttention 4 is for Blackwell,
where FlashAttention 2 is no faster than on Hopper.
"""
HEAD_BYTES = {True: 12, False: 30}
"""Bytes read and written for each logit, if the head is compiled, and if not.

Compiled: the product is written, read for the scores, replaced by its derivative, and that is read
by two products. Not compiled: the passes over some rows in float32 besides, which are cached.
"""
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
    and keys; sorting: for each number of a token's copies, one for each of its experts, which are
    sorted by expert, sorted back, weighted and summed; adapter: for each output number of an
    adapted layer (product with B, scale, sum); decoding: for each number of a 4-bit matrix, each
    time that it is decoded.
    """

    norm: float
    residual: float
    gate: float
    rotation: float
    sorting: float
    adapter: float
    decoding: float


EAGER = Traffic(norm=36, residual=6, gate=10, rotation=20, sorting=14, adapter=12, decoding=10.5)
COMPILED = Traffic(norm=4, residual=3, gate=6, rotation=4, sorting=10, adapter=8, decoding=2.5)


class Float8(NamedTuple):
    """A float8 format of a compiled block's matrix products.

    speedup: of the products themselves on Hopper; cast: bytes read and written for each bfloat16
    number that is cast: to find the scale, to cast, and to transpose for the weights' gradients.
    """

    speedup: float
    cast: float


FLOAT8 = {
    "tensorwise": Float8(speedup=1.75, cast=7),
    "rowwise": Float8(speedup=1.4, cast=10),
    "rowwise_with_gw_hp": Float8(speedup=1.3, cast=8),
}
"""By precision.float8. Without compilation the casts take as long as the products save
(torchtitan's pull request 778)."""


class Flops(NamedTuple):
    """Floating-point operations of one row in forward.

    For the gradients of inputs backward takes as many, and FLASH_BACKWARD times as many for
    attention. trained, trained_head: the part of `products` and `head` with trained weights; in
    backward the gradients of these weights take as many again. experts: the part of `products` in
    routed experts.
    """

    products: float
    attention: float
    head: float
    trained: float
    trained_head: float
    experts: float


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
    of_experts = flops.experts / flops.products * (experts_slowdown(model, device) - 1)
    products = rows / rate / float8_speedup(model, device) * (1 + of_experts)
    attention = rows * flops.attention / attention_rate(model, device)
    elementwise = elementwise_seconds(model, device)
    adapters = adapter_seconds(model, device)
    casts = cast_seconds(model, device)
    weights = weight_seconds(model, device)
    columns = model.config.scores or model.part.shape.vocab_size
    logits = model.layout.tokens * columns * HEAD_BYTES[model.compiled]
    head = rows * (2 * flops.head + flops.trained_head) / rate
    spread = spread_of(model, best)
    reached = model.own.backward_share
    tower = tower_seconds(model, device)
    return Seconds(
        forward=spread
        * (
            tower.forward
            + products * flops.products
            + attention
            + elementwise
            + adapters
            + casts.inputs
            + weights.forward
        ),
        backward=spread
        * (
            tower.backward
            + products * (reached * flops.products * (1 + again.products) + flops.trained)
            + attention * reached * (FLASH_BACKWARD + again.attention)
            + elementwise * reached * (2 + again.elementwise)
            + (adapters + casts.inputs * again.products) * reached
            + adapters * reached * again.elementwise
            + casts.gradients * reached
            + weights.backward
        ),
        head=spread * (head + logits / (device.memory_rate * MEMORY)),
    )


class TowerSeconds(NamedTuple):
    """Seconds of a tower for images in a micro-batch."""

    forward: float = 0.0
    backward: float = 0.0


def tower_seconds(model: PlannedModel, device: Device) -> TowerSeconds:
    """Return the seconds of a tower, whose elementwise operators are not compiled."""
    tower = model.tower
    if tower is None:
        return TowerSeconds()
    flops, again = tower.flops, recomputed(model.checkpointing)
    by_size = size_factor(tower.patches, tower.sizes.width, device)
    of_peak, of_attention = PRODUCTS * device.reach * by_size, attention_rate(model, device)
    peak = peak_rate(model.precision, device)
    widths = tower.sizes.width * 2 * (EAGER.norm + EAGER.residual)
    moved = tower.depth * tower.patches * (widths + tower.inner_width * EAGER.gate)
    elementwise = _moving_seconds(moved, model, device) / model.layout.tokens
    if device.efficiency:
        of_peak, of_attention, elementwise = device.efficiency, peak * device.efficiency, 0.0
    products, attention = flops.products / (peak * of_peak), flops.attention / of_attention
    return TowerSeconds(
        forward=products + attention + elementwise,
        backward=flops.trained / flops.products * products
        + flops.reached
        * (
            products * (1 + again.products)
            + attention * (FLASH_BACKWARD + again.attention)
            + elementwise * (2 + again.elementwise)
        ),
    )


def spread_of(model: PlannedModel, best: bool | None) -> float:
    """Return the factor on the seconds of the middle for an end of the range; best: see above."""
    spread = SPREAD_OF_EXPERTS if mixtures(model.config) else SPREAD
    return {True: 1 / spread, False: spread, None: 1.0}[best]


def _at_efficiency(model: PlannedModel, device: Device, efficiency: float) -> Seconds:
    """Return the seconds if all counted operations together reach this share of the peak."""
    rows, flops = model.layout.batch.micro_rows, forward_flops(model)
    again = recomputed(model.checkpointing)
    rate = peak_rate(model.precision, device) * efficiency / rows
    speedup = float8_speedup(model, device)
    reached = model.own.backward_share
    products = (reached * flops.products * (1 + again.products) + flops.trained) / speedup
    tower = tower_seconds(model, device)
    return Seconds(
        forward=(flops.products / speedup + flops.attention) / rate + tower.forward,
        backward=(products + reached * flops.attention * (2 + again.attention)) / rate
        + tower.backward,
        head=(2 * flops.head + flops.trained_head) / rate,
    )


class WeightSeconds(NamedTuple):
    """Seconds of memory traffic for weights in a micro-batch, whatever its number of tokens."""

    forward: float
    backward: float


def weight_seconds(model: PlannedModel, device: Device) -> WeightSeconds:
    """Return the seconds to copy gathered weights and gradients, and to decode 4-bit matrices."""
    sharding, adapters = model.layout.sharding, model.own.adapters
    gathered, reduced = copied_bytes(model)
    of_experts = adapters.encoded_experts / sharding.expert
    decoded = (adapters.encoded + of_experts) * traffic(model.compiled).decoding
    again = recomputed(model.checkpointing).products
    lengths = 0.0
    if model.adapter.name == "dora":
        lengths = adapters.adapted * DORA_BYTES + decoded
    rate = device.memory_rate * MEMORY
    layout = model.layout
    in_forward = gathered / layout.micro_batches if layout.gathers_once else gathered
    in_backward = (0.0 if model.keeps_gathered else gathered) + reduced
    return WeightSeconds(
        forward=(in_forward + decoded + lengths) / rate,
        backward=(in_backward + decoded + (decoded + lengths) * again) / rate,
    )


def copied_bytes(model: PlannedModel) -> tuple[float, float]:
    """Return the bytes read and written to gather all weights once, and for their gradients.

    A rank that holds all of a weight makes a cast at most: see torch_private.spare_one_rank.
    """
    layout, sizes = model.layout, model.sizes
    whole = model.own.units(sizes, layout.sharding, 1).all
    if layout.fsdp_ranks == 1:
        cast = whole.trained * (sizes.master + sizes.compute)
        is_cast = sizes.master != sizes.compute
        gathers = is_cast and model.optim.offload == "none"
        return cast * (gathers or model.precision.float8 == "tensorwise"), cast * is_cast
    trained = whole.trained * COPIED_BYTES
    frozen = (whole.gathered - whole.trained * model.number) * COPIES_OF_FROZEN
    # of the three copies of a trained weight two are of gathered weights, the third of its gradient
    return trained / 3 + frozen / 2, trained / 3


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
    if config.by_transformers:
        config = config.dense_stand_in()
    sharding, tokens = layout.sharding, layout.row_tokens
    whole_cost = float(config.attention_cost(np.array([layout.batch.seq_len]))[0])
    attention_cost = whole_cost / sharding.context
    # kernels need values as wide as keys: they are padded with zeros (models.latent_attention)
    heads_width = config.num_attention_heads * max(config.head_dim, config.value_dim)
    ends = replace(config, num_hidden_layers=0, mtp_heads=0).parameters()
    blocks = config.parameters(active=True) - ends
    # each rank of a tensor group sends only its own tokens to experts
    others = 1 - 1 / sharding.tensor
    routed, trained_routed = (others * numbers for numbers in parts.routed)
    heads = 1 + model.part.shape.mtp_heads
    head = 2.0 * heads * config.embedding_rows * config.hidden_size * tokens
    of_experts = 3 * config.num_experts_per_tok * config.hidden_size * config.expert_size
    return Flops(
        products=2.0 * (blocks - routed + parts.adapters.numbers) * tokens,
        attention=2.0 * config.num_hidden_layers * heads_width * attention_cost,
        head=head,
        trained=2.0 * (parts.trained_active - trained_routed) * tokens,
        trained_head=head * parts.head.requires_grad,
        experts=2.0 * mixtures(config) * of_experts * tokens / sharding.tensor,
    )


def peak_rate(precision: Precision, device: Device) -> float:
    """Return the device's peak in FLOP/s, in the format of the computation."""
    in_16_bits = precision.param_dtype != "float32"
    return (device.flops or 0.0) if in_16_bits else device.flops_float32


def product_rate(model: PlannedModel, device: Device) -> float:
    """Return the FLOP/s that matrix products reach, in the middle of the range."""
    by_size = size_factor(model.layout.tokens, model.config.hidden_size, device)
    return peak_rate(model.precision, device) * PRODUCTS * device.reach * by_size


def size_factor(rows: float, width: int, device: Device) -> float:
    """Return the factor on the rate of products with this many rows and matrices of this width."""
    enough = TOKENS * (device.flops or 0.0) / (DEVICES["h100"].flops or 1.0)
    by_rows = min(1.0, max(SMALLEST, (rows / enough) ** BY_TOKENS))
    return by_rows * min(WIDEST, (width / WIDTH) ** BY_WIDTH)


def experts_slowdown(model: PlannedModel, device: Device) -> float:
    """Return by how much the products of experts are slower than a dense layer's; 1 without.

    With even routing: an expert has fewer rows than a micro-batch has tokens, and is narrower.
    """
    config, layout = model.config, model.layout
    if not mixtures(config):
        return 1.0
    copies = layout.tokens / layout.sharding.tensor * config.num_experts_per_tok
    rows = copies * layout.sharding.expert / config.num_experts
    narrow = min(config.hidden_size, config.expert_size)
    dense = size_factor(layout.tokens, config.hidden_size, device)
    return dense / size_factor(rows, narrow, device)


def newton_schulz_rate(optim: Optim, device: Device) -> float:
    """Return the FLOP/s of Muon's products, in the middle of the range and for wide matrices."""
    in_bfloat16 = optim.ns_dtype == "bfloat16"
    peak = (device.flops or 0.0) if in_bfloat16 else device.flops_float32
    return peak * (device.efficiency or PRODUCTS * device.reach)


def attention_rate(model: PlannedModel, device: Device) -> float:
    """Return the FLOP/s of attention in forward and backward, counted as causal."""
    faster = FASTER_ATTENTION.get(model.options.attention_kernel, 1.0)
    return peak_rate(model.precision, device) * device.attention * faster


def float8_speedup(model: PlannedModel, device: Device) -> float:
    """Return the speed-up of matrix products by the chosen float8 format; 1 without one."""
    chosen = FLOAT8.get(model.precision.float8 or "")
    return 1 + (chosen.speedup - 1) * device.float8 if chosen and model.compiled else 1.0


class CastSeconds(NamedTuple):
    """Seconds to cast the inputs of a micro-batch's linear layers, and their outputs' gradients."""

    inputs: float = 0.0
    gradients: float = 0.0


def cast_seconds(model: PlannedModel, device: Device) -> CastSeconds:
    """Return the seconds of casts to float8, with one cast for all layers with the same input."""
    chosen = FLOAT8.get(model.precision.float8 or "")
    if chosen is None or not model.compiled:
        return CastSeconds()
    config = model.part.shape
    sizes, inner = config.projection_sizes, inner_width(model)
    inputs = 2 * config.hidden_size + sizes["q_proj"] + inner
    outputs = sum(sizes.values()) + 2 * inner + config.hidden_size
    tokens = model.layout.tokens * config.num_hidden_layers
    each = chosen.cast * tokens / (device.memory_rate * MEMORY)
    return CastSeconds(inputs * each, outputs * each)


def elementwise_seconds(model: PlannedModel, device: Device) -> float:
    """Return the seconds of norms, rotations, gates and additions of all blocks in one forward."""
    config, tensor, each = model.part.shape, model.layout.sharding.tensor, traffic(model.compiled)
    family, hidden = config.family_spec, config.hidden_size
    norms = sum(name is not None for name in NORMS[family.norms])
    sizes = config.projection_sizes
    heads = sizes["q_proj"] + sizes["k_proj"]
    numbers = (
        hidden * (norms * each.norm + 2 * each.residual) / tensor
        + heads * (each.rotation + (each.norm if family.qk_norm else 0))
        + inner_width(model) * each.gate
    )
    copies = hidden * config.num_experts_per_tok / tensor * mixtures(config)
    return _moving_seconds(
        numbers * config.num_hidden_layers + copies * each.sorting, model, device
    )


def inner_width(model: PlannedModel) -> float:
    """Return the inner channels of a feed-forward on this rank, the mean over the blocks.

    A rank of a tensor group computes experts for its own tokens, but its own channels of dense
    feed-forwards for all tokens.
    """
    config, others = model.part.shape, 1 - 1 / model.layout.sharding.tensor
    routed_width = config.num_experts_per_tok * config.expert_size
    widths = [
        config.feed_forward_width(kind) - others * routed_width * (kind == EXPERTS)
        for kind in config.feed_forwards
    ]
    return sum(widths) / config.num_hidden_layers


def adapter_seconds(model: PlannedModel, device: Device) -> float:
    """Return the seconds of the elementwise operators of adapters in one forward.

    Backward has as many: the gradients are scaled, and the two gradients of an input are added.
    """
    adapters = model.own.adapters
    moved = adapters.inputs * READ_BY_A + adapters.outputs * traffic(model.compiled).adapter
    if model.adapter.name == "dora":
        moved += adapters.outputs * SCALED_BY_DORA
    return _moving_seconds(moved, model, device)


def _moving_seconds(moved: float, model: PlannedModel, device: Device) -> float:
    """Return the seconds to read and write this many bytes for each token in bfloat16."""
    wider = model.number / torch.bfloat16.itemsize
    return moved * wider * model.layout.tokens / (device.memory_rate * MEMORY)


def traffic(compiled: bool) -> Traffic:
    """Return the memory traffic of elementwise operators, compiled or not."""
    return COMPILED if compiled else EAGER
