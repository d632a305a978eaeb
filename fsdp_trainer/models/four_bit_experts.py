"""Frozen stacked matrices of experts in 4 bits per number, each encoded as in models.four_bit."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.models.four_bit import decode, encoded_columns, quantize_linears
from fsdp_trainer.models.grouped import grouped_linear


class DecodedGroups(torch.autograd.Function):
    """`grouped_linear` with 4-bit matrices, decoded only during forward and during backward.

    Decodes the complete stack at once, including experts without rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, stack: Tensor, ends: Tensor, columns: int, is_transposed: bool
    ) -> Tensor:
        """Return [rows, out].

        rows: [rows, in]; stack: [groups, rows of a matrix, encoded_columns(columns)] uint8; ends:
        see `grouped_linear`. is_transposed: True if matrices are [in, out], not [out, in].
        """
        ctx.save_for_backward(stack, ends)
        ctx.columns, ctx.is_transposed = columns, is_transposed
        weights = decode_stack(stack, columns, rows.dtype)
        return grouped_linear(rows, weights.transpose(1, 2) if is_transposed else weights, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        stack, ends = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weights = decode_stack(stack, ctx.columns, gradient.dtype, gradient)
        weights = weights if ctx.is_transposed else weights.transpose(1, 2)
        return grouped_linear(gradient.contiguous(), weights, ends), None, None, None, None


def decode_stack(
    stack: Tensor, columns: int, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    """Return the decoded matrices of a stack: [groups, rows, columns] of `dtype`.

    after: see `decode_in_graph`.
    """
    groups, rows, _ = stack.shape
    return decode(stack.flatten(0, 1), columns, dtype, after).view(groups, rows, columns)


def quantize_weights(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Replace the named matrices of linear layers and experts by uninitialised 4-bit ones.

    Must be called before adapters are added. dtype: see Linear4; experts are decoded to the number
    format of their input.
    """
    names = list(names)
    quantize_linears(model, [name for name in names if not is_stacked(name)], dtype)
    for name in filter(is_stacked, names):
        module, _, matrix = name.rpartition(".")
        experts = model.get_submodule(module)
        dense: Tensor = getattr(experts, matrix)
        shape = (*dense.shape[:-1], encoded_columns(dense.shape[-1]))
        codes = torch.empty(shape, dtype=torch.uint8, device=dense.device)
        setattr(experts, matrix, nn.Parameter(codes, requires_grad=False))
