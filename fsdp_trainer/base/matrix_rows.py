"""The rows of a tensor that is taken as one matrix."""

from collections.abc import Sequence


def matrix_rows(shape: Sequence[int]) -> int:
    """Return the number of rows of a tensor, of stacked matrices those of all; 1 for a number."""
    return shape[0] * (shape[1] if len(shape) > 2 else 1) if shape else 1
