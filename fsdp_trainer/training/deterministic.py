"""Kernels that give the same bits every time (train.deterministic)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = ":4096:8"
"""The setting that torch asks for: with several streams cuBLAS may take other kernels."""


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Have torch take deterministic kernels, and raise RuntimeError where it has none."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    memory: Any = torch.utils.deterministic  # mypy does not see its properties
    before = torch.are_deterministic_algorithms_enabled()
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # it writes all memory that is new, to find code that reads what nobody wrote
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before)
