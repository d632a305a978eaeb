"""The seconds that the computation of a micro-batch takes.

Three rates limit it: of matrix products, of the attention kernel, and of the device's memory. The
last one applies to elementwise operators and to unsharded parameters that FSDP2 copies.
docs/how-plan-works.md gives the reasons, and compares with published trainings.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_trainer.config.devices import DEVICES, Device
from fsdp_trainer.config.schema import ActivationCheckpoint, Optim, Precision
from fsdp_trainer.planning.plan.block_memory import trace_blocks
from fsdp_trainer.planning.plan.expert_exchange import mixtures
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.work import (
    ATTENTION,
    BACKWARD,
    EXPERTS,
    FORWARD,
    HEAD,
    OPERATIONS,
    PASSES,
    PRODUCTS,
    SCALED,
    WEIGHTS,
    Work,
    added,
)

REACHED = 0.565
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
FUSED = 0.28
"""Memory traffic of a compiled block's elementwise operators over that of the same ones alone.

Counted in rehearsals of Llama; a rehearsal counts the kernels of each model.
"""
FLOAT8 = {"tensorwise": 1.75, "rowwise": 1.4, "rowwise_with_gw_hp": 1.3}
"""Speed-up of a compiled block's matrix products on Hopper, by precision.float8.

Without compilation the casts take as long as the products save (torchtitan's pull request 778).
"""
CASTS = 1.12
"""Seconds of float8 products with casts over those without, where no rehearsal counts casts."""


class Seconds(NamedTuple):
    """Seconds of computation in one micro-batch. head: all work of the head, done in forward."""

    forward: float
    backward: float
    head: float


def compute_seconds(model: PlannedModel, device: Device, best: bool) -> Seconds:
    """Return the seconds of a micro-batch of a whole model, by what its blocks do when traced.

    best: True for the fast end of the range, False for the slow end.
    """
    work = planned_work(model, range(model.config.num_hidden_layers), is_last=True)
    return seconds_of(work, unit_seconds(model, device, best))


def seconds_of(work: Work, each: dict[str, float]) -> Seconds:
    return Seconds(*(phase_seconds(work, phase, each) for phase in (FORWARD, BACKWARD, HEAD)))


def phase_seconds(work: Work, phase: str, each: dict[str, float]) -> float:
    return sum(work.get(f"{phase} {kind}", 0.0) * seconds for kind, seconds in each.items())


def unit_seconds(model: PlannedModel, device: Device, best: bool) -> dict[str, float]:
    """Return the seconds of an operation or a byte, by kind of work. best: see `times`."""
    peak = peak_rate(model.precision, device)
    if device.efficiency:  # all operations together reach this share of the peak
        operation = 1 / (peak * device.efficiency)
        each = dict.fromkeys(OPERATIONS, operation)
        return each | {SCALED: operation / float8_speedup(model, device)}
    product = 1 / product_rate(model, device)
    byte = 1 / (device.memory_rate * MEMORY)
    faster = FASTER_ATTENTION.get(model.options.attention_kernel, 1.0)
    middle = {
        PRODUCTS: product,
        SCALED: product / float8_speedup(model, device),
        EXPERTS: product * experts_slowdown(model, device),
        ATTENTION: 1 / (peak * device.attention * faster),
        PASSES: byte,
        WEIGHTS: byte,
    }
    spread = spread_of(model, best)
    return {kind: spread * seconds for kind, seconds in middle.items()}


def planned_work(
    model: PlannedModel, blocks: Iterable[int], is_last: bool, load: float = 1.0
) -> Work:
    """Return the work of a micro-batch, from traces of the blocks and from sizes.

    blocks: numbers of those of a rank; is_last: True if it has the head; load: see trace_blocks.
    """
    traced, _ = trace_blocks(model, "cuda", load)
    whole: Work = {}
    for number in blocks:
        whole = added(whole, traced[number].work)
    if tower := model.tower:
        whole = added(whole, tower.work)
    if model.compiled:
        scaled = model.precision.float8 is not None
        whole = dict(compiled(*each, scaled) for each in whole.items())
    gathered, reduced = copied_bytes(model)
    layout = model.layout
    once = layout.micro_batches if layout.gathers_once else 1
    again = 0.0 if model.keeps_gathered else gathered
    weights = {FORWARD: gathered / once, BACKWARD: again + reduced}
    whole |= {f"{phase} {WEIGHTS}": size for phase, size in weights.items()}
    return whole | (head_work(model) if is_last else {})


def compiled(name: str, size: float, scaled: bool) -> tuple[str, float]:
    """Return the work of a compiled block. scaled: True if its products are in float8."""
    if PASSES in name:
        return name, FUSED * size
    if PRODUCTS in name and scaled:
        return name.replace(PRODUCTS, SCALED), CASTS * size
    return name, size


def head_work(model: PlannedModel) -> Work:
    config, tokens = model.part.shape, model.layout.tokens
    columns = config.vocab_size if config.predicts else config.scores
    rows = config.embedding_rows if config.predicts else config.scores
    product = 2.0 * (1 + config.mtp_heads) * rows * config.hidden_size * tokens
    return {
        f"{HEAD} {PRODUCTS}": product * (2 + model.own.head.requires_grad),
        f"{HEAD} {PASSES}": float(tokens * columns * HEAD_BYTES[model.compiled]),
    }


def spread_of(model: PlannedModel, best: bool) -> float:
    """Return the factor on the seconds of the middle for an end of the range. best: see `times`."""
    spread = SPREAD_OF_EXPERTS if mixtures(model.config) else SPREAD
    return 1 / spread if best else spread


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


def recomputed(cfg: ActivationCheckpoint) -> float:
    """Return the share of forward's elementwise operators and messages that backward repeats."""
    if cfg.mode in ("none", "budget"):  # upper bound: a compiler first repeats the cheapest ones
        return 1 - cfg.budget if cfg.mode == "budget" else 0.0
    return 1 / cfg.every


def peak_rate(precision: Precision, device: Device) -> float:
    in_16_bits = precision.param_dtype != "float32"
    return (device.flops or 0.0) if in_16_bits else device.flops_float32


def product_rate(model: PlannedModel, device: Device) -> float:
    """Return the FLOP/s that matrix products reach, in the middle of the range."""
    by_size = size_factor(model.layout.tokens, model.config.hidden_size, device)
    return peak_rate(model.precision, device) * REACHED * device.reach * by_size


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
    return peak * (device.efficiency or REACHED * device.reach)


def float8_speedup(model: PlannedModel, device: Device) -> float:
    """Return the speed-up of matrix products by the chosen float8 format; 1 without one."""
    chosen = FLOAT8.get(model.precision.float8 or "", 1.0)
    return 1 + (chosen - 1) * device.float8 if model.compiled else 1.0
