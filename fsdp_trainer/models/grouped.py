"""Grouped matrix products: each group of rows is multiplied by its own matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_BYTES = 16  # torch 2.13: "strides should be multiple of 16 bytes"
ALIGNED = 8
"""Widths in bfloat16 must be multiples of this for grouped_mm's kernels: 16 bytes."""


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each group of rows times its own matrix: [rows, out].

    rows: [rows, in]; weights: [groups, out, in]; ends: [groups] int32, ascending, the end of each
    group; the last is the number of rows, since results after it would be undefined.
    """
    aligned = weights.shape[1] % ALIGNED == 0 == weights.shape[2] % ALIGNED
    if rows.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    # torch computes these too, but its fake kernel refuses them (2.13: "Expected inputs of BF16
    # type"), and the compiler and the memory plan need shapes
    return grouped_forward(rows, weights, ends)


def grouped_bias(rows: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
    """Return the bias of each row's group: [rows, out]. biases: [groups, out].

    Computed as a product with ones, whose gradient sums the rows of a group in a fixed order; the
    gradient of indexing uses atomic additions.
    """
    ones = rows.new_ones(len(rows), ALIGNED)
    return grouped_linear(ones, F.pad(biases.unsqueeze(-1), (0, ALIGNED - 1)), ends)


@torch.library.custom_op("fsdp_trainer::grouped_linear", mutates_args=())
def grouped_forward(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _product(rows, weights.transpose(1, 2), ends)


@torch.library.custom_op("fsdp_trainer::grouped_gradient_of_rows", mutates_args=())
def grouped_backward(grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _product(grad.contiguous(), weights, ends)


@torch.library.custom_op("fsdp_trainer::grouped_gradient_of_weights", mutates_args=())
def grouped_outer(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    grad = grad.contiguous()
    if _has_kernel(rows, grad.shape[1], rows.shape[1]):
        return F.grouped_mm(grad.T, rows, offs=ends)
    sums = [part.T @ rows[first:last] for first, last, part in _groups(grad, ends)]
    return torch.stack(sums)


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each group of rows times its own matrix [in, out]."""
    if _has_kernel(rows, *matrices.shape[1:]):
        return F.grouped_mm(rows, matrices, offs=ends)
    groups = zip(_groups(rows, ends), matrices, strict=True)
    return torch.cat([part @ matrix for (_, _, part), matrix in groups])


def _has_kernel(rows: Tensor, *widths: int) -> bool:
    """Return True if torch computes the grouped product: on a CPU, for widths of 16 bytes.

    widths: numbers per row of inputs and results.
    """
    return not rows.is_cuda and all(w * rows.element_size() % KERNEL_BYTES == 0 for w in widths)


def _groups(rows: Tensor, ends: Tensor) -> list[tuple[int, int, Tensor]]:
    lasts = ends.tolist()
    firsts = [0, *lasts[:-1]]
    return [(first, last, rows[first:last]) for first, last in zip(firsts, lasts, strict=True)]


@grouped_forward.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@grouped_backward.register_fake
def _(grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weights.shape[2])


@grouped_outer.register_fake
def _(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0], grad.shape[1], rows.shape[1])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    needed = ctx.needs_input_grad
    of_rows = grouped_backward(grad, weights, ends) if needed[0] else None
    of_weights = grouped_outer(grad, rows, ends) if needed[1] else None
    return of_rows, of_weights, None


grouped_forward.register_autograd(_differentiate, setup_context=_save)
