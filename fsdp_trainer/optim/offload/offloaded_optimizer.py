"""Optimizers whose states are in host memory, or in files on a disk."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_part, run_on_all_ranks
from fsdp_trainer.base.torch_private import dtensor_like, set_local_tensor
from fsdp_trainer.checkpoint.atomic_files import make_empty
from fsdp_trainer.checkpoint.formats.tensor_files import as_tensor
from fsdp_trainer.checkpoint.linked_files import LinkedPlace
from fsdp_trainer.checkpoint.shards import host_memory
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.optim.offload.parts import (
    FiledStates,
    Slice,
    UpdatePart,
    files_of,
    parts_of_file,
)
from fsdp_trainer.optim.offload.state_files import (
    NEAR,
    FiledTensor,
    Span,
    StateFile,
    Transfers,
    open_for_update,
)
from fsdp_trainer.optim.offload.weight_copies import WeightCopies
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer

UPDATING = "updating"
"""File that exists while an update is in progress."""
BUFFERS = 3
"""One part is read, one updated, one written."""


class OffloadedOptimizer(TrainerOptimizer):
    """An optimizer that updates the states of parameters on the host, part by part.

    The gradients are in host memory too. While a part is updated, the new weights of the one before
    are on their way to the device. In its other properties it is the optimizer that it is made of.
    """

    def __init__(self, optimizer: TrainerOptimizer, copies: WeightCopies, parts: list[UpdatePart]):
        """optimizer: updates parameters in host memory. parts: of all parameters, in order."""
        self._optimizer, self._copies, self._parts = optimizer, copies, parts
        self.skips_on_device = False
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self.defaults = optimizer.defaults
        for parameter in {piece.parameter for part in parts for piece in part.slices}:
            if not self.state[parameter]:
                self.state[parameter].update(optimizer.empty_state(parameter))

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._optimizer.empty_state(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Update the weights, or with `skip` keep all as it is. Waits for the gradients."""
        if skip.item():
            return
        counts = self._step_counts()
        with self._only_one_part() as gradients:
            for part in self._parts:
                self._update(part, gradients, counts, skip)
        if self._copies.on_gpu:
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def _only_one_part(self) -> Iterator[dict[nn.Parameter, Any]]:
        """Within, no parameter has a gradient. Yields the gradients."""
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        self.zero_grad()
        yield gradients

    def _step_counts(self) -> dict[Any, Tensor]:
        return {p: state["step"].clone() for p, state in self.state.items() if "step" in state}

    def _update(
        self,
        part: UpdatePart,
        gradients: dict[nn.Parameter, Any],
        counts: dict[Any, Tensor],
        skip: Tensor,
    ) -> None:
        for parameter, *_ in part.slices:
            if parameter in counts:
                self.state[parameter]["step"].copy_(counts[parameter])
            set_gradient(parameter, gradients.pop(parameter))
        self._optimizer.step_unless(skip)
        for parameter, *_ in part.slices:
            set_gradient(parameter, None)
            self._copies.write(parameter, 0, local_part(parameter))


class DiskOptimizer(OffloadedOptimizer):
    """An optimizer whose states are in files, of which one part at a time is in memory.

    The next part is read and the last one written while one is updated. Between updates the
    tensors' numbers are mapped files, so that checkpoints and checks can read them, and loading can
    write them.
    """

    def __init__(
        self,
        optimizer: TrainerOptimizer,
        copies: WeightCopies,
        named: dict[str, nn.Parameter],
        folder: Path,
        pinned: bool,
    ):
        """Create the files in `folder`, which must be this rank's own. Raises OSError.

        named: the trained parameters by name; pinned: True to use pinned memory for parts.
        """
        for parameter in named.values():
            optimizer.state[parameter].update(optimizer.empty_state(parameter))
        self._folder = folder
        self._states = {p: FiledStates.of(name, p, optimizer.state[p]) for name, p in named.items()}
        divided = files_of(list(self._states.values()))
        self._files = [self._new_file(number, states) for number, states in enumerate(divided)]
        sliced = optimizer.updates_slices
        parts = [
            part
            for number, states in enumerate(divided)
            for part in parts_of_file(number, states, sliced)
        ]
        super().__init__(optimizer, copies, parts)
        self._file_of = {
            one.parameter: file
            for file, states in zip(self._files, divided, strict=True)
            for one in states
        }
        self._transfers = Transfers()
        self._spans = [self._spans_of(part) for part in parts]
        room = max((sum(span.length for span in spans) for spans in self._spans), default=0)
        self._buffers = [host_memory(max(room, 1), pinned) for _ in range(BUFFERS)]
        self.seconds = 0.0
        """Seconds of all updates so far."""
        for parameter in named.values():
            self._show_file(parameter)

    def _new_file(self, number: int, states: list[FiledStates]) -> StateFile:
        file = StateFile(self._folder / f"{number}.states")
        for one in states:
            for name, tensor in one.tensors.items():
                file.add(name, local_part(tensor))
        file.create(file.path)
        file.map()
        return file

    @property
    def bytes_moved(self) -> int:
        return self._transfers.bytes_moved

    # --- between updates

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self.state[parameter]

    def begin_load(self) -> None:
        """Prepare for new numbers: no checkpoint must have a link to the files. Collective.

        Raises RunFailed.
        """

        def unlink() -> None:
            for file in self._files:
                if file.is_linked:
                    self._replace(file)

        use_disk(f"make files for the optimizer's states in {self._folder}", unlink)

    def places(self) -> dict[str, LinkedPlace]:
        return {
            name: tensor.place(number)
            for number, file in enumerate(self._files)
            for name, tensor in file.tensors.items()
        }

    def snapshot(self) -> list[Path]:
        """Return links to the files as they are now, which later updates leave alone."""
        links = self._folder / "snapshot"
        make_empty(links)
        for file in self._files:
            os.link(file.path, links / file.path.name)
        return [links / file.path.name for file in self._files]

    def _show_file(self, parameter: nn.Parameter) -> None:
        numbers = self._file_of[parameter].numbers
        for name, tensor in self._states[parameter].tensors.items():
            set_local_tensor(tensor, numbers[name])

    def _replace(self, file: StateFile) -> None:
        """Create a new file in place of one that is linked. Raises OSError."""
        file.path.unlink()
        file.create(file.path)
        file.map()
        for parameter, its_file in self._file_of.items():
            if its_file is file:
                self._show_file(parameter)

    # --- an update

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Update the weights, or with `skip` keep all as it is. Waits for the gradients.

        Collective. Raises RunFailed on all ranks if one cannot read or write.
        """
        if skip.item():
            return
        what = f"update the optimizer's states in {self._folder}"
        began = time.perf_counter()
        use_disk(what, lambda: self._update_all(skip))
        self.seconds += time.perf_counter() - began

    def _update_all(self, skip: Tensor) -> None:
        (self._folder / UPDATING).touch()
        reading = [open_for_update(file.path) for file in self._files]
        writing = [self._to_write(file, r) for file, r in zip(self._files, reading, strict=True)]
        try:
            with self._only_one_part() as gradients:
                self._update_parts(reading, writing, gradients, skip)
        finally:
            for descriptor in {*reading, *writing}:
                os.close(descriptor)
        for file in self._files:
            fresh = file.path.with_suffix(".new")
            if fresh.exists():
                fresh.replace(file.path)
                file.map()
        for parameter in self._states:
            self._show_file(parameter)
        (self._folder / UPDATING).unlink()

    def _update_parts(
        self,
        reading: list[int],
        writing: list[int],
        gradients: dict[nn.Parameter, Any],
        skip: Tensor,
    ) -> None:
        counts = self._step_counts()
        busy: list[list[Future[None]]] = [[] for _ in range(BUFFERS)]
        parts = list(enumerate(self._parts))

        def read(number: int) -> None:
            place = number % BUFFERS
            wait(busy[place])
            file, spans = reading[self._parts[number].file], self._spans[number]
            busy[place] = self._transfers.begin(os.preadv, file, spans, self._buffers[place])

        try:
            if parts:
                read(0)
            for number, part in parts:
                wait(busy[number % BUFFERS])
                if number + 1 < len(parts):
                    read(number + 1)
                buffer, spans = self._buffers[number % BUFFERS], self._spans[number]
                self._update_in_memory(part, spans, buffer, gradients, counts, skip)
                busy[number % BUFFERS] = self._transfers.begin(
                    os.pwritev, writing[part.file], spans, buffer
                )
        finally:
            for jobs in busy:
                wait(jobs)

    def _update_in_memory(
        self,
        part: UpdatePart,
        spans: list[Span],
        buffer: Tensor,
        gradients: dict[nn.Parameter, Any],
        counts: dict[Any, Tensor],
        skip: Tensor,
    ) -> None:
        for piece in part.slices:
            parameter = piece.parameter
            self._show_buffer(piece, spans, buffer)
            self.state[parameter]["step"].copy_(counts[parameter])
            gradient = gradients[parameter]
            if gradient is not None:
                own = local_part(gradient).reshape(-1)[piece.first : piece.last]
                set_gradient(parameter, dtensor_like(gradient, own, gradient.shape))
        self._optimizer.step_unless(skip)
        for piece in part.slices:
            set_gradient(piece.parameter, None)
            self._copies.write(piece.parameter, piece.first, local_part(piece.parameter))
            if piece.last == self._states[piece.parameter].numbers:
                del gradients[piece.parameter]
        if self._copies.on_gpu:
            torch.cuda.current_stream().synchronize()

    def _show_buffer(self, piece: Slice, spans: list[Span], buffer: Tensor) -> None:
        file = self._file_of[piece.parameter]
        for name, tensor in self._states[piece.parameter].tensors.items():
            filed = file.tensors[name]
            begin, end = self._range(piece, filed)
            span = next(s for s in spans if s.offset <= begin < s.offset + s.length or begin == end)
            at = span.at + begin - span.offset
            count = (end - begin) // filed.dtype.itemsize
            set_local_tensor(tensor, as_tensor(buffer[at:], filed.dtype, torch.Size([count])))

    def _range(self, piece: Slice, filed: FiledTensor) -> tuple[int, int]:
        """Return the range of bytes in the file that a slice has of a tensor."""
        whole = self._states[piece.parameter].numbers
        size = filed.end - filed.begin
        if not whole:
            return filed.begin, filed.begin
        return (
            filed.begin + size * piece.first // whole,
            filed.begin + size * piece.last // whole,
        )

    def _spans_of(self, part: UpdatePart) -> list[Span]:
        file = self._files[part.file]
        ranges = [
            self._range(piece, file.tensors[name])
            for piece in part.slices
            for name in self._states[piece.parameter].tensors
        ]
        # between the tensors of a slice there are numbers of other slices
        is_whole = all(
            piece.last - piece.first == self._states[piece.parameter].numbers
            for piece in part.slices
        )
        return file.spans(ranges, NEAR if is_whole else 0)

    def _to_write(self, file: StateFile, reading: int) -> int:
        if not file.is_linked:
            return reading
        fresh = file.path.with_suffix(".new")
        file.create(fresh)
        return open_for_update(fresh)

    def close(self) -> None:
        """End the threads, and delete the files."""
        self._transfers.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # another rank's folder is still there
            self._folder.parent.rmdir()


def use_disk(what: str, work: Callable[[], None]) -> None:
    """Run `work` on every rank. Collective. Raises RunFailed with what to do if a disk is full.

    what: completes "cannot …" in the message.
    """
    try:
        run_on_all_ranks(what, work)
    except RunFailed as error:
        advice = (
            "Make room there, or use another disk:  optim.offload_path=FOLDER  . The same command "
            "goes on from the newest checkpoint"
        )
        raise RunFailed(f"{error.args[0]}\n{advice}") from None


def set_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def wait(jobs: list[Future[None]]) -> None:
    for job in jobs:
        job.result()
    jobs.clear()
