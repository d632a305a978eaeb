"""Micro-batches made and copied ahead by a thread, so that the device never waits for them."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

import torch

CLOSE_SECONDS = 2.0
T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, in its order, up to `depth` of them made before they are asked for; 0: none, and no thread.

    On a GPU they are made on a stream of their own, and the stream that computes waits for them, not the host. What was handed out is held
    until the device is through with it: its memory belongs to the other stream, which would use it again. What the iterator raises is raised
    where its item is asked for. Close it, or leave its `with`: the thread ends.
    """

    def __init__(self, items: Iterator[T], depth: int, device: torch.device):
        self._items, self._device, self._closed = items, device, False
        self._room, self._made = threading.Semaphore(depth), SimpleQueue[Any]()
        self._used: deque[tuple[torch.cuda.Event, T]] = deque()
        self._current: T | None = None
        self._thread = (
            threading.Thread(target=self._work, name="micro-batches", daemon=True)
            if depth
            else None
        )
        if self._thread:
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            return next(self._items)
        self._let_go()
        item, event, error = self._made.get()
        self._room.release()
        if error is not None:
            self._made.put((None, None, error))  # whoever asks again hears the same
            raise error
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._current = item
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what it made and nobody asked for is dropped."""
        self._closed = True
        self._room.release()
        if self._thread:
            self._thread.join(CLOSE_SECONDS)  # a read may hang for ever, and is no reason to

    def _let_go(self) -> None:
        """The item before is used up as soon as the device has done what was asked of it until now."""
        if self._current is not None and self._device.type == "cuda":
            self._used.append(
                (torch.cuda.current_stream(self._device).record_event(), self._current)
            )
        self._current = None
        while self._used and self._used[0][0].query():
            self._used.popleft()

    def _work(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(
                self._device
            )  # which device is the current one, each thread decides for itself
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream) if stream else nullcontext():
            while True:
                self._room.acquire()
                if self._closed:
                    return
                try:
                    item = next(self._items)
                    self._made.put((item, stream.record_event() if stream else None, None))
                except BaseException as error:  # the end of the items, too
                    self._made.put((None, None, error))
                    return
