"""Offloading of activations: tensors that blocks save for backward are kept in host memory.

Copies run on separate streams, as in torchtune's `OffloadActivations`: to the host while the next
block computes, and back while backward is in the following block. The device holds the saved
tensors of two blocks at a time.
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

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.base.torch_private import replace_saved_results
from fsdp_trainer.models.decoder import Decoder

SMALLEST = 2**18
"""Smallest tensor to move, in bytes. A copy over PCIe takes about 10 µs to start, the time in which
25 GB/s copy this much: for smaller tensors the time is worth more than the memory."""


class Copies(Protocol):
    """Copies between the device and the host, which may be asynchronous to the computation."""

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a copy of a storage's bytes in host memory."""

    def to_device(self, data: Tensor) -> Tensor:
        """Return a copy of the bytes on the device."""

    def mark(self) -> Any:
        """Record and return an event after all copies so far."""

    def wait(self, event: Any) -> None:
        """Make the computation wait for an event."""


class CopiesOnHost:
    """Copies for a device that is the host itself: into another buffer, without streams."""

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        return bytes_of(storage).clone()

    def to_device(self, data: Tensor) -> Tensor:
        return data

    def mark(self) -> None:
        """See Copies."""

    def wait(self, event: None) -> None:
        """See Copies."""


class CopiesOnStreams:
    """Copies to pinned memory and back, with one stream for each direction.

    Device buffers belong to the computation's stream, which waits for a copy before it frees or
    reads a buffer. torch's allocator frees host buffers after their copies are done.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)

    def to_host(self, storage: torch.UntypedStorage) -> Tensor:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            return host.copy_(bytes_of(storage), non_blocking=True)

    def to_device(self, data: Tensor) -> Tensor:
        device = torch.empty(data.shape, dtype=data.dtype, device=self.device)
        # the computation may still use what was in this memory before
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.back):
            return device.copy_(data, non_blocking=True)

    def mark(self) -> tuple[torch.cuda.Event, ...]:
        return self.out.record_event(), self.back.record_event()

    def wait(self, event: tuple[torch.cuda.Event, ...]) -> None:
        for each in event:
            torch.cuda.current_stream(self.device).wait_event(each)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Moved:
    """The bytes of one storage, in host memory as long as autograd saves a part of them."""

    def __init__(self, storage: torch.UntypedStorage, copies: Copies):
        self.copies = copies
        self.host = copies.to_host(storage)
        self.device: Tensor | None = None

    def fetch(self) -> None:
        if self.device is None:
            self.device = self.copies.to_device(self.host)


class OffloadedPart(NamedTuple):
    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedByBlock:
    """The tensors that one block saved in one forward, and their location.

    stays: storages that are not moved: the block's parameters and inputs common to all blocks.
    before: the tensors saved by the preceding block, which backward needs next.
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
        """Start to move a tensor that autograd saves, or return it if it stays.

        A tensor that stays is detached, since an operator's saved output would keep the operator
        alive.
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
        if isinstance(saved, Tensor):
            return saved
        self.fetch()
        self.copies.wait(self.fetched)
        if self.before is not None:
            self.before.fetch()
        assert saved.moved.device is not None
        data = saved.moved.device
        whole = len(data) - len(data) % saved.dtype.itemsize
        return data[:whole].view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def fetch(self) -> None:
        if self.is_fetched:
            return
        self.is_fetched = True
        self.free()
        for moved in self.moved:
            moved.fetch()
        self.fetched = self.copies.mark()

    def end(self) -> None:
        """Record that the block's forward is done and all copies to the host have been started."""
        self.copied = self.copies.mark()

    def free(self) -> None:
        if self.on_device:
            self.copies.wait(self.copied)
            self.on_device.clear()


def is_moved(tensor: Tensor, stays: set[int]) -> bool:
    """Return True if a saved tensor is moved to the host. stays: storages that are not moved.

    Tensors of integers or booleans stay: masks and positions, which all blocks use. So do tensor
    subclasses that wrap several tensors.
    """
    return (
        tensor.is_floating_point()
        and not hasattr(tensor, "__tensor_flatten__")
        and tensor.untyped_storage().nbytes() >= SMALLEST
        and tensor.untyped_storage()._cdata not in stays
    )


def storages_that_stay(block: nn.Module, common: Any) -> set[int]:
    own = map(local_part, block.parameters())
    tensors = [*own, *(t for t in tree_iter(common) if isinstance(t, Tensor))]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Offloader:
    """Mover of the tensors that the blocks of one model save, called in the blocks' order."""

    def __init__(self, copies: Copies | None = None) -> None:
        self.copies = copies
        self.last: SavedByBlock | None = None

    def run(self, forward: Callable[..., Any], block: nn.Module, *args: Any, **named: Any) -> Any:
        """Run a block's forward and move the tensors that it saves.

        args, named: the block's inputs, of which the first is its own and others are common to all
        blocks. Blocks of transformers get them by name.
        """
        if not torch.is_grad_enabled():
            return forward(block, *args, **named)
        if self.copies is None:
            device = args[0].device
            self.copies = CopiesOnStreams(device) if device.type == "cuda" else CopiesOnHost()
        before = self.last
        common = [*args[1:], named]
        saved = SavedByBlock(storages_that_stay(block, common), before, self.copies)
        self.last = saved
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out = forward(block, *args, **named)
        saved.end()
        if before is not None:
            before.free()
        return out

    def run_last(
        self, forward: Callable[..., Any], block: nn.Module, *args: Any, **named: Any
    ) -> Any:
        """Run the last block's forward; its saved tensors stay, since backward starts with it."""
        before, self.last = self.last, None
        if before is None or not torch.is_grad_enabled():
            return forward(block, *args, **named)

        def unpack(saved: Tensor) -> Tensor:
            before.fetch()
            return saved

        with saved_tensors_hooks(Tensor.detach, unpack):
            out = forward(block, *args, **named)
        before.free()
        return out

    @contextmanager
    def moving_results(self, forward_context: Any) -> Any:
        with forward_context:
            yield
        if self.last is not None:
            replace_saved_results(forward_context, self.last.pack, self.last.unpack)


def offload_activations(model: Decoder, offloader: Offloader) -> None:
    """Wrap the forward of every block, after checkpointing and compilation."""
    *blocks, last = model.blocks().values()

    def wrap(block: nn.Module, run: Callable[..., Any]) -> None:
        method: Any = block.forward
        forward = method.__func__

        def moved(block: nn.Module, *args: Any, **named: Any) -> Any:
            return run(forward, block, *args, **named)

        block.forward = MethodType(moved, block)

    for block in blocks:
        wrap(block, offloader.run)
    wrap(last, offloader.run_last)
