"""Deterministic kernels: the same inputs give the same bits every time (train.deterministic)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = ":4096:8"
"""The setting that torch requires: without it, cuBLAS on several streams is not deterministic."""


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Make torch use deterministic kernels; an operation without one raises RuntimeError."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    memory: Any = torch.utils.deterministic  # mypy does not see its properties
    before = torch.are_deterministic_algorithms_enabled()
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # a debugging aid that torch turns on as well: it fills each new tensor, which costs time
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before)
