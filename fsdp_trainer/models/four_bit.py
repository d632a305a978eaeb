"""Frozen matrices in 4 bits per number: NF4 (Dettmers et al. 2023, QLoRA).

A block of 64 numbers of a row has one bfloat16 scale, so a number takes 4.25 bits. Blocks do not
span rows, and each scale precedes its codes: a shard of rows, or of complete blocks of columns, is
a slice of the encoded bytes.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.base.compiled import compiled_if_possible
from fsdp_trainer.config.formats import FOUR_BIT_BLOCK as BLOCK

SCALE = 2  # bytes per scale
BLOCK_BYTES = SCALE + BLOCK // 2
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the 16 codes, to be multiplied by the block's scale: quantiles of a normal
distribution (Dettmers et al. 2023, appendix E)."""
MIDDLES = tuple(((torch.tensor(LEVELS)[1:] + torch.tensor(LEVELS)[:-1]) / 2).tolist())
"""Midpoints between levels: the boundaries at which a number's code changes."""


def encoded_columns(columns: int) -> int:
    """Return the bytes of an encoded row: two codes per byte, and two bytes per scale."""
    return -(-columns // 2) + SCALE * -(-columns // BLOCK)


def is_encoded(weight: Tensor) -> bool:
    return weight.dtype == torch.uint8


def encode(numbers: Tensor) -> Tensor:
    """Return a matrix encoded as nearest codes and scales: [rows, encoded_columns] uint8.

    A scale is the block's largest absolute value. The last block of a row may be shorter.
    """
    columns = numbers.shape[1]
    padded = F.pad(numbers.float(), (0, -columns % BLOCK))
    blocks = padded.view(len(numbers), -1, BLOCK)
    scales = blocks.abs().amax(2).bfloat16()
    divisors = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    scaled = blocks.div(divisors.unsqueeze(2)).flatten(1)
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=numbers.device)
    for middle in MIDDLES:  # three times as fast as a search for each number
        codes += scaled > middle
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
    of_blocks = pairs.view(len(numbers), -1, BLOCK // 2)
    scale_bytes = scales.unsqueeze(2).view(torch.uint8)
    whole = torch.cat([scale_bytes, of_blocks], 2).flatten(1)
    return whole[:, : encoded_columns(columns)].contiguous()


def decode(
    encoded: Tensor, columns: int, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    """Return the matrix [rows, columns] that `encode` encoded, in `dtype`.

    Levels and scales are rounded to `dtype` and multiplied in it. after: see `decode_in_graph`.
    """
    if torch.compiler.is_compiling() or type(encoded) not in (Tensor, nn.Parameter):
        return decode_in_graph(encoded, columns, dtype, after)
    rows = len(encoded)
    if columns % BLOCK:
        encoded = F.pad(encoded, (0, -encoded.shape[1] % BLOCK_BYTES))
    by = decode_compiled() if encoded.is_cuda else decode_blocks
    numbers = by(encoded.reshape(-1, BLOCK_BYTES), dtype)
    return numbers.view(rows, -1)[:, :columns].contiguous()


@torch.library.custom_op("fsdp_trainer::decode", mutates_args=())
def decode_in_graph(
    encoded: Tensor, columns: int, dtype: torch.dtype, after: Tensor | None
) -> Tensor:
    """Return `decode`, as a single operator of a compiled block, and for fake tensors.

    after: in backward, the gradient of the product. Else the compiler would see that forward
    decodes the same matrix, and keep the decoded one from forward to backward.
    """
    return decode(encoded, columns, dtype)


@decode_in_graph.register_fake
def _(encoded: Tensor, columns: int, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    return encoded.new_empty(encoded.shape[0], columns, dtype=dtype)


def decode_blocks(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return decoded blocks: [blocks, BLOCK]. blocks: [blocks, BLOCK_BYTES] uint8.

    A lookup of two bytes gives four numbers.
    """
    if blocks.storage_offset() % SCALE:
        blocks = blocks.clone()
    words = blocks.view(torch.uint16)
    scales = words[:, :1].view(torch.bfloat16).to(dtype)
    return F.embedding(words[:, 1:].int(), quads(dtype, blocks.device)).flatten(1).mul_(scales)


def decode_bytes(encoded: Tensor, levels: Tensor) -> Tensor:
    """Return `decode_blocks` by operations that the compiler makes one kernel of.

    encoded, levels: flat blocks and `level_pairs`, so that only the number of blocks is variable.
    """
    blocks, levels = encoded.view(-1, BLOCK_BYTES), levels.view(256, 2)
    low, high = blocks[:, :1].int(), blocks[:, 1:SCALE].int()
    scales = ((low | high << 8) << 16).view(torch.float32).to(levels.dtype)
    return F.embedding(blocks[:, SCALE:].int(), levels).flatten(1) * scales


@lru_cache
def decode_compiled() -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return `decode_blocks` for a GPU, where it reads codes and writes numbers once."""
    compiled = compiled_if_possible(decode_bytes, "cuda", "decoding of 4-bit weights")
    # `data`: the compiler would make a graph for each shape that `blocks` is a view of
    return lambda blocks, dtype: compiled(
        blocks.view(-1).data, level_pairs(dtype, blocks.device).view(-1)
    )


@lru_cache
def level_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of the two codes of each byte: [256, 2]. Synchronises with a GPU."""
    levels = torch.tensor(LEVELS, dtype=dtype, device="cpu")
    return torch.cartesian_prod(levels, levels).to(device)


@lru_cache
def quads(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of the four codes of each two bytes: [65536, 4]."""
    each = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.uint8)
    return level_pairs(dtype, torch.device("cpu"))[each.int()].view(-1, 4).to(device)


class DecodedProduct(torch.autograd.Function):
    """Product x Wᵀ with a 4-bit matrix, decoded only during forward and during backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, encoded: Tensor, bias: Tensor | None) -> Tensor:
        """Return [..., out].

        x: [..., in]; encoded: [out, encoded_columns(in)] uint8; bias: [out].
        """
        ctx.save_for_backward(encoded)
        ctx.columns = x.shape[-1]
        return F.linear(x, decode(encoded, x.shape[-1], x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (encoded,) = ctx.saved_tensors
        by_x = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = gradient @ decode(encoded, ctx.columns, gradient.dtype, gradient)
        if ctx.needs_input_grad[2]:
            by_bias = gradient.flatten(0, -2).sum(0)
        return by_x, None, by_bias


class Linear4(nn.Module):
    """A linear layer with a frozen 4-bit matrix.

    weight: [out_features, encoded_columns(in_features)] uint8. dtype: number format of the decoded
    matrix in `decoded`.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = dtype
        shape = self.out_features, encoded_columns(self.in_features)
        encoded = torch.empty(shape, dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(encoded, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return DecodedProduct.apply(x, self.weight, self.bias)

    def decoded(self, rows: Tensor) -> Tensor:
        return decode(rows, self.in_features, self.dtype)


def quantize_linears(model: nn.Module, weights: Iterable[str], dtype: torch.dtype) -> None:
    """Replace the linear layers of these weights by `Linear4`, before adapters are added.

    weights: names of weight parameters. dtype: see Linear4.
    """
    for weight in weights:
        name = weight.removesuffix(".weight")
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), child, Linear4(linear, dtype))
