"""The work of a step: operations and bytes of its operators, counted while they run."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_iter

from fsdp_trainer.base.live_bytes import LiveBytes
from fsdp_trainer.base.torch_private import is_in_backward

FORWARD, BACKWARD, HEAD, READING = PHASES = ("forward", "backward", "head", "reading")
"""Head: all work of the output head, with its gradients; reading: forwards without gradients."""
PRODUCTS, SCALED, EXPERTS, ATTENTION = OPERATIONS = ("products", "float8", "experts", "attention")
"""Kinds of work in floating-point operations: of attention those between tokens that see each
other."""
PASSES, WEIGHTS, MOVED = BYTES = ("elementwise", "parameters", "moved")
"""Kinds of work in bytes: those that elementwise operators read and write, those of copies of
gathered weights and of gradients, and those of activations that move to the host."""
Work = dict[str, float]
"""Amounts by phase and kind, such as `forward products`."""
FLASH_BACKWARD = 2.5
"""Operations of attention's backward divided by those of its forward.

FlashAttention computes the scores again: five products instead of two (Dao 2023, section 4.1).
"""
GROUPED = (
    "_grouped_mm",
    "grouped_linear",
    "grouped_gradient_of_rows",
    "grouped_gradient_of_weights",
)
UNREAD = ("copy_", "zero_", "fill_", "normal_", "uniform_")
"""Operators that write over a tensor without reading it."""
CHOOSING = ("embedding", "index_select", "index", "gather")
"""Operators that read a part of a tensor."""
DECODING = 10.5
"""Bytes read and written for each number that is decoded from 4 bits, with lookups of its level."""
CACHED = 1 / 3
"""Time for a byte in the device's cache, which is not read from memory."""
FREE = (
    "_unsafe_view",
    "detach",
    "lift_fresh",
    "resize_",
    "set_",
    "_local_scalar_dense",
    "record_stream",
)
"""Operators that move nothing, beside views and those that only allocate."""
LOCAL = ("aten", "fsdp", "fsdp_trainer", "torchao", "torch_attn")
"""Namespaces of operators that compute or copy; others communicate or trace."""


class Amount(NamedTuple):
    kind: str
    size: float


NOTHING = Amount(PASSES, 0.0)


class WorkCounter(LiveBytes):
    """Counts the work of operators too: `work`, by `part`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.work: defaultdict[str, float] = defaultdict(float)

    def part(self) -> str:
        """Return the phase of PHASES that the next operator belongs to; "" for none."""
        return BACKWARD if is_in_backward() else FORWARD

    def kind(self, kind: str) -> str:
        """Return the kind of OPERATIONS or BYTES that the next operator's work is counted as."""
        return kind

    def passes(self, size: float) -> None:
        """Count bytes of elementwise operators that are read or written."""
        if part := self.part():
            self.work[f"{part} {PASSES}"] += size

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if part := self.part():
            kind, size = amount_of(func, args, kwargs, out)
            self.work[f"{part} {self.kind(kind)}"] += size


def amount_of(func: Any, args: Any, kwargs: Any, out: Any) -> Amount:
    schema = getattr(func, "_schema", None)
    if schema is None:  # of higher order: what it calls is counted
        return NOTHING
    space, name = schema.name.split("::")
    if space not in LOCAL or func.is_view or name in FREE or "empty" in name:
        return NOTHING
    if "attention" in name or "varlen_attn" in name:
        return Amount(ATTENTION, attention_operations(func, named(func, args, kwargs)))
    if name in GROUPED:
        return Amount(EXPERTS, 2.0 * args[0].numel() * out.shape[-1])
    # imports the compiler's tables
    from torch.utils.flop_counter import flop_registry

    if count := flop_registry.get(func.overloadpacket):
        kind = SCALED if "scaled" in name else PRODUCTS
        return Amount(kind, float(count(*args, **kwargs, out_val=out)))
    return Amount(PASSES, moved_bytes(func, named(func, args, kwargs), out))


def named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def attention_operations(func: Any, given: Mapping[str, Any]) -> float:
    query, key = given["query"], given["key"]
    if query.dim() == 3:  # documents of one length after each other
        tokens, heads, width = query.shape
        length = keys = int(given["max_q"])
        rows = tokens / length
    elif "max_q" in given:
        rows, length, heads, width = query.shape
        keys = key.shape[1]
    else:
        batch, heads, length, width = query.shape
        rows, keys = batch, key.shape[2]
    window = given.get("window_size") or (-1, -1)
    sees_before = given.get("is_causal") or window[1] == 0
    pairs = float(length * keys)
    if sees_before:
        pairs = visible_pairs(length, window[0] + 1 if window[0] >= 0 else None)
    again = FLASH_BACKWARD if "backward" in func._schema.name else 1.0
    return again * 4.0 * rows * heads * width * pairs


def visible_pairs(length: float, window: int | None) -> float:
    """Return how many pairs of tokens of a document see each other. window: None for no limit."""
    if window is None or window >= length:
        return length * length / 2
    return window * (length - window / 2)


@lru_cache
def written_arguments(func: Any) -> frozenset[str]:
    each = func._schema.arguments
    return frozenset(a.name for a in each if a.alias_info is not None and a.alias_info.is_write)


def moved_bytes(func: Any, given: Mapping[str, Any], out: Any) -> float:
    """Return the bytes that an operator reads and writes. given: its arguments by name."""
    name = func._schema.name.split("::")[1]
    if name == "decode":
        return DECODING * out.numel()
    if name == "all_gather_copy_in":  # its result is as large as those of all ranks together
        return 2.0 * sum(map(bytes_of, given["all_gather_inputs"]))
    results = sum(map(bytes_of, tensors_in(out)))
    read, written = 0.0, results
    for argument, value in given.items():
        size = sum(map(bytes_of, tensors_in(value)))
        if argument not in written_arguments(func):
            read += min(size, results) if name in CHOOSING else size
        elif argument == "out" or name in UNREAD:
            written = max(written, size)
        else:  # in place
            read, written = read + size, max(written, size)
    return read + written


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_iter(value) if isinstance(each, Tensor)]


def bytes_of(tensor: Tensor) -> float:
    """Return the bytes of a tensor's numbers, each once: a tensor that is expanded repeats them.

    Numbers that lie over each other otherwise stand for many that pass through the device's cache.
    """
    repeated = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0
    )
    size = tensor.nbytes / max(1, repeated)
    return size * CACHED if size > tensor.untyped_storage().nbytes() else size


def added(work: Mapping[str, float], more: Mapping[str, float], times: float = 1.0) -> Work:
    names = dict.fromkeys([*work, *more])
    return {name: work.get(name, 0.0) + times * more.get(name, 0.0) for name in names}


def grown_work(few: Mapping[str, float], more: Mapping[str, float], times: float) -> Work:
    return added(added(few, few, -times), more, times)
