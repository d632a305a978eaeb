"""The CUDA operators of a step, and the places where the host would wait for a GPU."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from fsdp_trainer.base.live_bytes import name_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fsdp_trainer"
aten = torch.ops.aten


class HostWaits(TorchDispatchMode):
    """Counts operators, and waits of the host.

    operators: number of calls of each operator on a GPU; waits: number by what waits and where. A
    number that the host reads is 1.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it calls operators on what it wraps
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and on_gpu(args[0]):
            self.note("a number is read")
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and "device" in kwargs:
            self._note_copy(args[0].device, kwargs["device"], kwargs.get("non_blocking"))
        elif func is aten.copy_.default:
            without_waiting = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            self._note_copy(args[1].device, args[0].device, without_waiting)
        out = func(*args, **kwargs)
        if any(map(on_gpu, tree_iter((args, out)))):
            self.operators[name_of(func)] += 1
        return out

    def _note_copy(self, before: torch.device, after: torch.device, without_waiting: Any) -> None:
        if before.type != torch.device(after).type and not without_waiting:
            self.note(f"a copy from {before.type} to {torch.device(after).type}")

    def note(self, what: str) -> None:
        """Count a wait at the innermost line of the package that is running."""
        self.waits[f"{what}: {place(traceback.extract_stack())}"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also count explicit waits, and pin no memory."""

        def waits(what: str) -> Any:
            return lambda *_args, **_options: self.note(what)

        with ExitStack() as stack:
            stack.enter_context(without_pinning())
            for owner, what in (
                (torch.cuda, "a device"),
                (torch.cuda.Stream, "a stream"),
                (torch.cuda.Event, "an event"),
            ):
                stack.enter_context(patch.object(owner, "synchronize", waits(what)))
            yield


def without_pinning() -> Any:
    """Return a context in which no memory is pinned: fake tensors cannot."""
    return patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor)


def on_gpu(value: Any) -> bool:
    """Return True for a tensor on a GPU."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


def place(stack: traceback.StackSummary) -> str:
    """Return FILE:LINE and the code of the package's innermost line, without the rehearsal's own.

    Where there is none, it is torch's innermost line.
    """
    own = [
        frame
        for frame in stack
        if PACKAGE in Path(frame.filename).parents and "rehearse" not in frame.filename
    ]
    others = [frame for frame in stack if ROOT not in Path(frame.filename).parents]
    frame = (own or others or [*stack])[-1]
    path = Path(frame.filename)
    name = path.relative_to(ROOT) if ROOT in path.parents else path
    return f"{name}:{frame.lineno}  {frame.line}"
