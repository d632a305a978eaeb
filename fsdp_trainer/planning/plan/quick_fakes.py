"""Tensors without storage, as torch's, whose frequent operators take less time."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
VIEWS = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
PLAIN = {
    NoneType, bool, float, int, str,
    torch.device, torch.dtype, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of arguments that are compared as they are."""
LABEL = torch.ops.profiler._record_function_enter_new.default
"""Names what follows, for a profiler; it has no tensors."""
VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose results have sizes that depend on numbers."""


class NewTensor(NamedTuple):
    """The form of an operator's result with memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


KNOWN: dict[tuple[Any, ...] | None, NewTensor] = {}
"""Forms of results by the operator and the forms of its arguments."""


class QuickFakeMode(FakeTensorMode):
    """Answers as torch's FakeTensorMode; views, and results that it has seen, in less time.

    torch's own cache describes each argument and result by fifteen properties, also for a view;
    it took more than half of a rehearsal.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is LABEL:
            with no_dispatch():
                return func(*args)
        if (quick := self.quickly(func, args, kwargs)) is not None:
            return quick
        out = super().dispatch(func, types, args, kwargs)
        if only_computes(func) and self._is_own(out) and (key := self._key(func, args, kwargs)):
            read = {each.untyped_storage()._cdata for each in args if self._is_own(each)}
            if form := form_of(out, read):
                KNOWN[key] = form
        return out

    def quickly(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FakeTensor | None:
        """Return the result of an operator if it is a view, or one of a known form."""
        if func in VIEWS and self._is_own(args[0]):
            with torch._C._AutoDispatchBelowAutograd(), in_kernel_invocation_manager(self):
                view = func(*args, **kwargs)
            return FakeTensor(self, view, args[0].fake_device)
        known = KNOWN.get(self._key(func, args, kwargs)) if only_computes(func) else None
        if not known:
            return None
        with in_kernel_invocation_manager(self):
            new = torch.empty_strided(*known[:2], dtype=known.dtype, device="meta")
        return FakeTensor(self, new, known.device)

    def _is_own(self, value: Any) -> TypeGuard[FakeTensor]:
        """Return True for a tensor of this mode that is not known by its numbers."""
        return type(value) is FakeTensor and value.fake_mode is self and value.constant is None

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return all that a result's form depends on, None if it cannot be said."""
        parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
        for value in (*args, *kwargs.values()):
            several = isinstance(value, list | tuple)
            parts.append(len(value) if several else -1)
            for each in value if several else (value,):
                kind = type(each)
                if kind is FakeTensor and self._is_own(each):
                    parts += (each.shape, each.stride(), each.dtype, each.fake_device)
                elif kind in PLAIN:
                    parts += (kind, each)
                else:
                    return None
        return tuple(parts)


def form_of(out: FakeTensor, read: set[int]) -> NewTensor | None:
    """Return the form of a tensor that fills its storage, which is none of `read`."""
    storage = out.untyped_storage()
    if out.layout != torch.strided or storage.nbytes() != out.nbytes or storage._cdata in read:
        return None
    return NewTensor(out.shape, out.stride(), out.dtype, out.fake_device)


@cache
def only_computes(func: Any) -> bool:
    """Return True for an operator of torch's with one result, a new tensor of known sizes."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    values = (*func._schema.arguments, *func._schema.returns)
    returned = [str(value.type) for value in func._schema.returns]
    aliases = any(value.alias_info is not None for value in values)
    return returned == ["Tensor"] and not aliases and VARYING.isdisjoint(func.tags)
