"""Record of a step: its live bytes, and its collectives with the modules that asked for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fsdp_trainer.base import phases
from fsdp_trainer.base.live_bytes import name_of
from fsdp_trainer.base.torch_private import (
    around_units,
    is_in_backward,
    reduced_gradients,
    unsharded_gradients,
)
from fsdp_trainer.planning.plan.work import HEAD, MOVED, PASSES, READING, WEIGHTS, WorkCounter
from fsdp_trainer.planning.rehearse.collectives import NAMES, Collective, collective_of

HEAD_MODULE = "lm_head"
UPDATES = ("clip", "update")
"""Phases that are computed where the states are. Their work follows from the states' sizes."""
ROOT = "root"


_watching: list["StepRecorder"] = []
"""The recorders that watch, the present one last."""
_hooks: list[RemovableHandle] = []


@contextmanager
def module_hooks() -> Iterator[None]:
    """Within, recorders are told of each call of a module.

    A graph of torch.compile is used again as long as the hooks are the same.
    """
    if _hooks:
        yield
        return
    _hooks.append(register_module_forward_pre_hook(_enter_module))
    _hooks.append(register_module_forward_hook(_leave_module, always_call=True))
    try:
        yield
    finally:
        while _hooks:
            _hooks.pop().remove()


def _enter_module(module: nn.Module, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():  # the graph has no modules, only their operators
        for recorder in _watching[-1:]:
            recorder.enter_module(module)


def _leave_module(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling():
        for recorder in _watching[-1:]:
            recorder.leave_module()


class StepRecorder(WorkCounter):
    """Records live bytes, work and collectives.

    gloo: True to count the copies that gloo makes; host_states: True if weights, gradients and the
    update are in host memory.
    """

    def __init__(self, gloo: bool = False, host_states: bool = False):
        super().__init__(self._where, lambda: phases.training.phase, self._category)
        self.host_states = host_states
        self.collectives: list[Collective] = []
        self.gloo = gloo
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._unit = ""
        """The unit of fully_shard that communicates."""
        self._gathers = False
        """True while a unit's parameters are copied out of a message."""
        self._gathered_last = ""
        self._reads = False
        """True in a forward without gradients."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator["StepRecorder"]:
        """Record everything inside, with the names of a model's modules."""
        self._names |= {id(module): name for name, module in model.named_modules() if name}
        _watching.append(self)
        try:
            with (
                module_hooks(),
                around_units("unshard", self._unshard),
                around_units("wait_for_unshard", self._wait_for_unshard),
                around_units("post_backward", self._post_backward),
                self,
            ):
                yield self
        finally:
            _watching.pop()

    @property
    def counts(self) -> bool:
        """False where operators run on the host, whose memory is not the device's."""
        return super().counts and not (self.host_states and phases.training.phase in UPDATES)

    def before(self, func: Any, args: Any) -> None:
        name = name_of(func)
        if name not in NAMES:
            return
        called = collective_of(name, args, self._unit or self._where())
        called = called._replace(backward=is_in_backward())
        self.collectives.append(called)
        if self._unit and called.op == "all_gather":
            self.move(args[0], "communication")
        elif self._unit and called.op == "reduce_scatter":
            self.move(args[1], "communication")
            self.move(args[0], "gradients")
        if self.gloo and self._is_copied(called, args) and len(called.ranks) > 1:
            self.passing(called.bytes)

    def _is_copied(self, called: Collective, args: Any) -> bool:
        """Return True if a message is copied for gloo. See parallel/gloo_messages.py."""
        if called.op == "all_gather":
            is_encoded = args[0].ndim == 2  # see parallel/quantized_messages.py
            return is_encoded or not self._unit
        return called.op == "reduce_scatter"

    def moved(self, size: int) -> None:
        """Count bytes of activations that move to the host."""
        self.work[f"{self.part()} {MOVED}"] += size

    def _where(self) -> str:
        """Return the innermost module that runs forward, else the FSDP unit, else the phase."""
        if self._stack:
            return self._stack[-1]
        in_backward = self._gathered_last if is_in_backward() else ""
        return self._unit or in_backward or phases.training.phase

    def _category(self) -> str:
        if self._gathers:
            return "gathered"
        if HEAD_MODULE in self._stack:
            return "logits"
        return "activations"

    def enter_module(self, module: nn.Module) -> None:
        if not self._stack:
            self._reads = not torch.is_grad_enabled()
        inherited = self._stack[-1] if self._stack else phases.training.phase
        self._stack.append(self._names.get(id(module), inherited))

    def leave_module(self) -> None:
        self._stack.pop()
        self._reads &= bool(self._stack)

    def part(self) -> str:
        """Return the phase of the work of an operator. The update's is not counted."""
        if phases.training.phase in UPDATES:
            return ""
        if self._reads:
            return READING
        return HEAD if HEAD_MODULE in self._stack else super().part()

    def kind(self, kind: str) -> str:
        """Return a kind of work, of which passes for a unit are those over parameters."""
        return WEIGHTS if self._unit and kind == PASSES else kind

    def _unshard(self, _unit: Any, name: str, real: Callable[[], Any]) -> Any:
        with self._within(name):
            return real()

    def _wait_for_unshard(self, _unit: Any, name: str, real: Callable[[], Any]) -> Any:
        self._gathered_last = name or ROOT
        with self._within(name, gathers=True):
            return real()

    def _post_backward(self, unit: Any, name: str, real: Callable[[], Any]) -> Any:
        with self._within(name):
            for gradient in unsharded_gradients(unit):
                self.move(gradient, "gathered")
            result = real()
            for gradient in reduced_gradients(unit):
                self.move(gradient, "gradients")
                if self.host_states:
                    self.put_on_host(gradient)
            return result

    @contextmanager
    def _within(self, name: str, gathers: bool = False) -> Iterator[None]:
        before = self._unit, self._gathers
        self._unit, self._gathers = name or ROOT, gathers
        try:
            yield
        finally:
            self._unit, self._gathers = before
