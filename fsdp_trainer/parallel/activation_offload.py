"""Activations in host memory: what blocks save for backward leaves the device until it is needed.

Copies run on streams of their own, as in torchtune's `OffloadActivations`: out while the next block
computes, and back while backward is at the block behind. The device holds what two blocks save.
"""

from collections.abc import Callable
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from fsdp_trainer.distributed import local_part
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.torch_private import replace_saved_results

SMALLEST = 2**18
"""Bytes of a tensor that is moved. A copy over PCIe takes about 10 µs to begin, in which 25 GB/s
move this much: smaller ones cost more time than their memory is worth."""


class Copies(Protocol):
    """Copies between the device and the host, which may go on behind the computation."""

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a copy of a storage's bytes in host memory."""

    def to_device(self, data: Tensor) -> Tensor:
        """Return the bytes on the device again."""

    def mark(self) -> Any:
        """Return an event after all copies so far."""

    def wait(self, event: Any) -> None:
        """Let the computation wait for an event."""


class CopiesOnHost:
    """Copies on a device that is the host itself: another buffer, and no streams."""

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        """See Copies."""
        return bytes_of(storage).clone()

    def to_device(self, data: Tensor) -> Tensor:
        """See Copies."""
        return data

    def mark(self) -> None:
        """See Copies."""

    def wait(self, event: None) -> None:
        """See Copies."""


class CopiesOnStreams:
    """Copies to pinned memory and back, each way on a stream of its own.

    Buffers of the device belong to the computation's stream: it waits for a copy before it frees or
    reads one. Those of the host are freed by torch's allocator once their copies are done.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        """See Copies."""
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            return host.copy_(bytes_of(storage), non_blocking=True)

    def to_device(self, data: Tensor) -> Tensor:
        """See Copies."""
        device = torch.empty(data.shape, dtype=data.dtype, device=self.device)
        # what was in this memory before may still be computed with
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.back):
            return device.copy_(data, non_blocking=True)

    def mark(self) -> tuple[torch.cuda.Event, ...]:
        """See Copies."""
        return self.out.record_event(), self.back.record_event()

    def wait(self, event: tuple[torch.cuda.Event, ...]) -> None:
        """See Copies."""
        for each in event:
            torch.cuda.current_stream(self.device).wait_event(each)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Moved:
    """The bytes of one storage, in host memory. They live as long as a part of them is saved."""

    def __init__(self, storage: torch.UntypedStorage, copies: Copies):
        self.copies = copies
        self.host = copies.to_host(storage)
        self.device: Tensor | None = None

    def fetch(self) -> None:
        """Begin to copy the bytes back."""
        if self.device is None:
            self.device = self.copies.to_device(self.host)


class OffloadedPart(NamedTuple):
    """A saved tensor: a view of moved bytes."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedByBlock:
    """The tensors that one block saved in one forward, and where they are.

    stays: storages that are not moved, the block's parameters and what all blocks share. before:
    the same of the block before, which backward needs next.
    """

    def __init__(self, stays: set[int], before: "SavedByBlock | None", copies: Copies):
        self.stays = stays
        self.before = before
        self.copies = copies
        self.on_device: dict[int, tuple[torch.UntypedStorage, Moved]] = {}
        self.moved: WeakSet[Moved] = WeakSet()
        self.copied: Any = None
        self.fetched: Any = None
        self.is_fetched = False

    def pack(self, tensor: Tensor) -> Tensor | OffloadedPart:
        """Begin to move a tensor that autograd saves; return it if it stays.

        Detached: an operator that saved its own output would be kept alive by it.
        """
        if not is_moved(tensor, self.stays):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata not in self.on_device:  # several operators may save one tensor
            moved = Moved(storage, self.copies)
            self.on_device[storage._cdata] = storage, moved
            self.moved.add(moved)
        _, moved = self.on_device[storage._cdata]
        offset = int(tensor.storage_offset())
        return OffloadedPart(moved, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def unpack(self, saved: Tensor | OffloadedPart) -> Tensor:
        """Return a saved tensor on the device, and begin to fetch what the block before saved."""
        if isinstance(saved, Tensor):
            return saved
        self.fetch()
        self.copies.wait(self.fetched)
        if self.before is not None:
            self.before.fetch()
        assert saved.moved.device is not None
        data = torch.empty(0, dtype=saved.dtype, device=saved.moved.device.device)
        storage = saved.moved.device.untyped_storage()
        return data.set_(storage, saved.offset, saved.size, saved.stride)

    def fetch(self) -> None:
        """Begin to copy everything back."""
        if self.is_fetched:
            return
        self.is_fetched = True
        self.free()
        for moved in self.moved:
            moved.fetch()
        self.fetched = self.copies.mark()

    def end(self) -> None:
        """Note that the block's forward is done."""
        self.copied = self.copies.mark()

    def free(self) -> None:
        """Let go of the device's memory, once it is copied."""
        if self.on_device:
            self.copies.wait(self.copied)
            self.on_device.clear()


def is_moved(tensor: Tensor, stays: set[int]) -> bool:
    """Return whether a saved tensor leaves the device. stays: storages that do not.

    Masks and positions, which are no floating-point numbers, are shared by all blocks. Tensors made
    of several are left alone.
    """
    return (
        tensor.is_floating_point()
        and not hasattr(tensor, "__tensor_flatten__")
        and tensor.untyped_storage().nbytes() >= SMALLEST
        and tensor.untyped_storage()._cdata not in stays
    )


def storages_that_stay(block: nn.Module, shared: Any) -> set[int]:
    """Return the storages of a block's parameters, and of tensors that all blocks are given."""
    own = map(local_part, block.parameters())
    tensors = [*own, *(t for t in tree_iter(shared) if isinstance(t, Tensor))]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Offloader:
    """Moves what the blocks of one model save, in their order."""

    def __init__(self, copies: Copies | None = None) -> None:
        self.copies = copies
        self.last: SavedByBlock | None = None

    def run(self, forward: Callable[..., Any], block: nn.Module, *args: Any) -> Any:
        """Return what a block computes; what it saves is moved."""
        if not torch.is_grad_enabled():
            return forward(block, *args)
        if self.copies is None:
            device = args[0].device
            self.copies = CopiesOnStreams(device) if device.type == "cuda" else CopiesOnHost()
        before = self.last
        saved = SavedByBlock(storages_that_stay(block, args[1:]), before, self.copies)
        self.last = saved
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out = forward(block, *args)
        saved.end()
        if before is not None:
            before.free()
        return out

    def run_last(self, forward: Callable[..., Any], block: nn.Module, *args: Any) -> Any:
        """Return what the last block computes. Backward begins with it: what it saves stays."""
        before, self.last = self.last, None
        if before is None or not torch.is_grad_enabled():
            return forward(block, *args)

        def unpack(saved: Tensor) -> Tensor:
            before.fetch()
            return saved

        with saved_tensors_hooks(Tensor.detach, unpack):
            out = forward(block, *args)
        before.free()
        return out

    @contextmanager
    def moving_results(self, forward_context: Any) -> Any:
        """Run a block's forward under selective checkpointing, and move the results it keeps."""
        with forward_context:
            yield
        if self.last is not None:
            replace_saved_results(forward_context, self.last.pack, self.last.unpack)


def offload_activations(model: Decoder, offloader: Offloader) -> None:
    """Wrap the forward of every block, as it is checkpointed and compiled already."""
    *blocks, last = model.model.layers.values()

    def wrap(block: nn.Module, run: Callable[..., Any]) -> None:
        method: Any = block.forward
        forward = method.__func__

        def moved(block: nn.Module, *args: Any) -> Any:
            return run(forward, block, *args)

        block.forward = MethodType(moved, block)

    for block in blocks:
        wrap(block, offloader.run)
    wrap(last, offloader.run_last)
