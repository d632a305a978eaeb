"""Bytes of all live tensors of a step, by category and from moment to moment."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

CATEGORIES = (
    "parameters", "gradients", "optimizer", "gathered", "communication", "activations", "logits",
)  # fmt: skip
"""As in a plan, which has an allowance besides."""
MOST_POINTS = 4096
"""Points of the curve that are kept, before every second one is dropped."""


class Peak(NamedTuple):
    """The moment with most bytes.

    bytes: by category; where: the module or unit that computed; operator: that made the last
    tensor; phase: of the step.
    """

    bytes: dict[str, int]
    where: str
    operator: str
    phase: str

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


Moments = dict[tuple[str, str], dict[str, int]]
"""Most bytes by category at each (phase, place)."""
DEVICE = torch.ops.prim.device.default
"""Two thirds of what is called on fake tensors: autograd asks each of its nodes for a device."""
NO_PEAK = Peak(dict.fromkeys(CATEGORIES, 0), "", "", "")


def name_of(operator: Any) -> str:
    """Return the name of an operator. One of higher order, as flex attention, has no schema."""
    return operator._schema.name if hasattr(operator, "_schema") else operator.name()


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's numbers on this rank, such as a float8 weight's."""
    own: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(own):
        yield own
        return
    for name in own.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(own, name))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that operators create, in any mode below it.

    Resizing a storage is counted, because FSDP2 frees and fills storages by it. now: bytes by
    category; peak: the moment with most bytes since the last `begin`; moments: the same for each
    place; curve: bytes by category at moments of equal distance, in operators.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        where: Callable[[], str] = str,
        phase: Callable[[], str] = str,
        category: Callable[[], str] = lambda: "activations",
    ):
        """Count nothing yet. where, phase, category: return the present ones, for new tensors."""
        super().__init__()
        self.where, self.phase, self.category = where, phase, category
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.operators = 0
        self.peak = NO_PEAK
        self.most = 0
        self.moments: Moments = {}
        self._most_at: dict[tuple[str, str], int] = {}
        self.curve: list[tuple[int, tuple[int, ...]]] = []
        self._counts = True
        self._on_host: set[int] = set()
        self._every = 1
        self._live: dict[int, tuple[int, str]] = {}
        self._operator = ""
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        def resize(storage: Any, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._live:
                self._change(storage._cdata, size, self._live[storage._cdata][1])

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: blocks are compiled in this mode, and what they call is counted."""
        return True

    @property
    def counts(self) -> bool:
        return self._counts

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def begin(self) -> None:
        """Forget the peak and the curve; live tensors stay counted."""
        self.most, self.peak = self.total, NO_PEAK
        self.moments, self._most_at = {}, {}
        self.curve, self._every, self.operators = [], 1, 0

    def add(self, tensor: Tensor, category: str | None = None) -> None:
        """Count a tensor's storage, if it is not counted yet. category: None: the current one."""
        if tensor.is_meta:
            return
        for part in plain_parts(tensor):
            self._add(part, category)

    def _add(self, tensor: Tensor, category: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and key not in self._on_host:
            self._live[key] = 0, category or self.category()
            self._change(key, storage.nbytes(), self._live[key][1])
            weakref.finalize(storage, self._gone, key)

    def put_on_host(self, tensor: Tensor) -> None:
        for part in plain_parts(tensor):
            self.add(part)
            key = part.untyped_storage()._cdata
            if key in self._live:
                self._change(key, 0, self._live[key][1])
                self._on_host.add(key)

    def move(self, tensor: Tensor, category: str) -> None:
        self.add(tensor, category)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = local.untyped_storage()._cdata
        if key in self._live:
            size, before = self._live[key]
            self.now[before] -= size
            self.now[category] += size
            self._live[key] = size, category

    def passing(self, size: int) -> None:
        """Count bytes of communication that live only until the operator ends."""
        self._judge(size)

    def _change(self, key: int, size: int, category: str) -> None:
        before, _ = self._live[key]
        self._live[key] = size, category
        self.now[category] += size - before
        self.total += size - before
        if size > before:
            self._judge(0)

    def _judge(self, passing: int) -> None:
        """Keep the present moment if it has most bytes, of all or at its place."""
        total, place = self.total + passing, (self.phase(), self.where())
        if total <= self._most_at.get(place, 0):
            return
        self._most_at[place] = total
        self.moments[place] = dict(self.now)
        self.moments[place]["communication"] += passing
        if total > self.most:
            self.most = total
            self.peak = Peak(self.moments[place], place[1], self._operator, place[0])

    def _gone(self, key: int) -> None:
        self._on_host.discard(key)
        size, category = self._live.pop(key)
        self.now[category] -= size
        self.total -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].device
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor calls operators on its part
        if not self.counts:
            return func(*args, **(kwargs or {}))
        self._operator = name_of(func)
        self.before(func, args)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.after(func, args, kwargs or {}, out)
        self.operators += 1
        if self.operators % self._every == 0:
            self._draw()
        return out

    def before(self, func: Any, args: Any) -> None:
        """Note what an operator is about to do; nothing by default."""

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an operator has done; nothing by default."""

    def _draw(self) -> None:
        self.curve.append((self.operators, tuple(self.now.values())))
        if len(self.curve) > MOST_POINTS:
            # of each two neighbours the one with more bytes stays: peaks are not lost
            pairs = zip(self.curve[::2], self.curve[1::2], strict=False)
            self.curve = [max(pair, key=lambda point: sum(point[1])) for pair in pairs]
            self._every *= 2
