"""Layers other than attention that mix the tokens of a row, computed for each document by itself.

State-space layers, linear attention and convolutions over time of transformers' classes know no
documents. `keep_apart` lets them have one row for each document, or all documents in one row and
the boundaries between them, for kernels that take these (see boundary_kernels).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.document_calls import CallPlan, plan_calls


class DocumentCalls:
    """Packed rows, whose documents are put in rows of their own.

    Documents of similar length share a call; the shorter ones are padded at their ends, where no
    layer that only looks back is changed by it.

    arguments: names by which a layer takes the boundaries between documents in place of rows; empty
    if it takes none.
    """

    def __init__(self, layout: PackedAttention, arguments: Sequence[str] = ()):
        self.layout, self.arguments = layout, arguments

    @cached_property
    def plan(self) -> CallPlan:
        layout = self.layout
        return plan_calls(layout.lengths, layout.row, None, layout.device)

    @cached_property
    def boundaries(self) -> dict[str, Tensor]:
        """Boundaries of the documents in one row of all tokens, and each token's number, by name.

        [documents + 1] int64, as flash-linear-attention takes it, and [1, tokens] int32, as
        causal-conv1d does. Padding at the end of a row is a document.
        """
        sizes = np.concatenate(self.layout.sizes(self.layout.row))
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[None]
        values = (to_device(each, self.layout.device) for each in (ends, numbers))
        return dict(zip(self.arguments, values, strict=True))

    def joined(self, given: Any) -> Any:
        """Return the arguments for one row with all tokens, in place of those for packed rows."""
        if isinstance(given, Tensor) and given.shape[:2] == self.shape:
            return given.flatten(0, 1)[None]
        if isinstance(given, dict):
            return {name: self.joined(value) for name, value in given.items()}
        return tuple(map(self.joined, given)) if isinstance(given, tuple) else given

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.layout.lengths), self.layout.row

    def divided(self, given: Any) -> list[Any]:
        """Return the arguments for each call, in the place of those for packed rows.

        Each tensor with a value for each token of the rows is divided.
        """
        calls = self.plan.calls
        if isinstance(given, Tensor) and given.shape[:2] == self.shape:
            flat = given.flatten(0, 1).index_select(0, self.plan.queries)
            parts = flat.split([call.queries.size for call in calls])
            pairs = zip(parts, calls, strict=True)
            return [part.unflatten(0, call.queries.shape) for part, call in pairs]
        if isinstance(given, dict):
            named = {name: self.divided(value) for name, value in given.items()}
            return [{n: parts[i] for n, parts in named.items()} for i in range(len(calls))]
        if isinstance(given, tuple):
            each = [self.divided(value) for value in given]
            return [tuple(parts[i] for parts in each) for i in range(len(calls))]
        return [given] * len(calls)

    def packed(self, results: Sequence[Tensor]) -> Tensor:
        """Return the results of all calls, as of packed rows; any finite numbers for padding."""
        flat = torch.cat([result.flatten(0, 1) for result in results])
        return flat.index_select(0, self.plan.order).unflatten(0, self.shape)


class DocumentLayer(nn.Module):
    """Base class put before the class of a layer that mixes the tokens of a row.

    rows: of the micro-batch, set by its block; None: each row is one document.
    """

    rows: DocumentCalls | None

    def expect(self, rows: DocumentCalls | None) -> None:
        self.rows = rows

    @torch.compiler.disable  # each micro-batch has other shapes
    def forward(self, *args: Any, **named: Any) -> Any:
        rows, inner = self.rows, super().forward
        if rows is None:
            return inner(*args, **named)
        if rows.arguments:
            args, named = rows.joined((args, named))
            result = inner(*args, **named, **rows.boundaries)
            first = first_of(result).view(*rows.shape, -1)
            return first if isinstance(result, Tensor) else (first, *result[1:])
        results = [inner(*own, **own_named) for own, own_named in rows.divided((args, named))]
        if isinstance(results[0], Tensor):
            return rows.packed(results)
        return (rows.packed([result[0] for result in results]), *results[0][1:])


class DocumentBlock(nn.Module):
    """Base class put before the class of a block with such layers.

    The rows are an argument, as a block that is computed again in backward gets its arguments
    again, and a later micro-batch may have been computed since then.
    """

    document_layers: list[DocumentLayer]

    def forward(self, *args: Any, rows: DocumentCalls | None = None, **named: Any) -> Any:
        for layer in self.document_layers:
            layer.expect(rows)
        return super().forward(*args, **named)


class DocumentRows:
    """Hands the rows of a micro-batch to the blocks of a model.

    now: those being computed. arguments: see DocumentCalls.
    """

    def __init__(self) -> None:
        self.now: DocumentCalls | None = None
        self.arguments: Sequence[str] = ()

    def use(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments

    @contextmanager
    def handed_on(self, layout: PackedAttention | None) -> Iterator[None]:
        """Let blocks compute the documents of a layout within the context."""
        self.now = None if layout is None else DocumentCalls(layout, self.arguments)
        try:
            yield
        finally:
            self.now = None

    def hand_on(self, _block: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        """Add the rows to the arguments of a block. transformers' models do not pass them on."""
        return args, named | {"rows": self.now}


def keep_apart(blocks: Sequence[nn.Module], kinds: Sequence[str], rows: DocumentRows) -> None:
    """Let the layers of some classes in blocks compute each document by itself.

    kinds: names of the classes. rows: tells the blocks which documents there are.
    """
    for block in blocks:
        layers = [each for each in block.modules() if type(each).__name__ in kinds]
        for layer in layers:
            put_before(DocumentLayer, layer)
            vars(layer)["rows"] = None
        if layers:
            put_before(DocumentBlock, block)
            vars(block)["document_layers"] = layers
            block.register_forward_pre_hook(rows.hand_on, with_kwargs=True)


def put_before(first: type, module: nn.Module) -> None:
    kind = type(module)
    own = type(kind.__name__, (first, kind), {"__module__": kind.__module__})
    object.__setattr__(module, "__class__", own)


class Call(NamedTuple):
    """A call of a layer while packed rows are computed."""

    layer: nn.Module
    given: Any
    result: Any


@contextmanager
def recorded_calls(blocks: Sequence[nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of all modules within blocks, outer ones before inner ones."""
    calls: list[Call] = []
    places = {module: n for n, module in enumerate(inner_modules(blocks))}

    def record(layer: nn.Module, args: Any, named: Any, result: Any) -> None:
        calls.append(Call(layer, (args, named), result))

    hooks = [
        module.register_forward_hook(record, with_kwargs=True, always_call=False)
        for module in places
    ]
    try:
        yield calls
    finally:
        calls.sort(key=lambda call: places[call.layer])
        for hook in hooks:
            hook.remove()


def inner_modules(blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules within blocks, outer ones before inner ones."""
    yield from chain.from_iterable([*block.modules()][1:] for block in blocks)


def mixing_kinds(
    calls: Sequence[Call], layout: PackedAttention, tolerance: float
) -> tuple[str, ...]:
    """Return the names of the classes of the outermost layers that mix documents.

    calls: of a model that computed a layout. A layer mixes them if its result for a document
    changes by more than a share `tolerance` of the largest when it gets that document alone.
    """
    rows, kinds = DocumentCalls(layout), dict[str, None]()
    within: set[nn.Module] = set()
    for call in calls:
        if call.layer in within:
            continue
        with suppress(Exception):  # whatever a layer raises for rows of another length
            if change_alone(call, rows) > tolerance:
                kinds[type(call.layer).__name__] = None
                within.update(call.layer.modules())
    return tuple(kinds)


def change_alone(call: Call, rows: DocumentCalls) -> float:
    packed = first_of(call.result)
    if packed.shape[:2] != rows.shape:
        return 0.0
    results = [call.layer(*args, **named) for args, named in rows.divided(call.given)]
    alone = rows.packed([first_of(result) for result in results])
    return float((packed - alone).abs().max() / packed.abs().max().clamp_min(1e-20))


def first_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
