"""Prefetching of micro-batches by a thread, which also copies them to the device."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch

CLOSE_SECONDS = 2.0


class Prefetcher:
    """The items of an iterator, in order, prefetched by a thread.

    On a GPU they are made on a separate stream, and the computing stream waits for them, not the
    host. A returned item is referenced until the device has finished with it: otherwise its memory,
    which belongs to the separate stream, could be reused too early. An error of the iterator is
    raised by the `get` that would return the item.
    """

    def __init__(
        self,
        items: Iterator[Any],
        depth: int,
        device: torch.device,
        counted: type = object,
    ):
        """Start the thread.

        depth: number of items to prefetch; 0: none, without a thread. counted: type of the items
        that count towards `depth`.
        """
        self._items, self._device, self._counted = items, device, counted
        self._closed = False
        self._room = threading.Semaphore(depth)
        self._made = SimpleQueue[Any]()
        self._used: deque[tuple[torch.cuda.Event, Any]] = deque()
        self._current: Any = None
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._work, name="micro-batches", daemon=True)
            self._thread.start()

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item. Raises StopIteration after the last one.

        timeout: seconds after which queue.Empty is raised; None, or without a thread: no limit.
        """
        if self._thread is None:
            return next(self._items)
        self._release_consumed()
        item, event, error = self._made.get(timeout=timeout)
        if error:
            self._made.put((None, None, error))  # for the next call to raise it too
            raise error
        if isinstance(item, self._counted):
            self._room.release()
        if event:
            torch.cuda.current_stream(self._device).wait_event(event)
            self._current = item
        return item

    def stop(self) -> None:
        """Make the thread end after its current item."""
        self._closed = True
        self._room.release()

    def close(self) -> None:
        """End the thread, waiting at most CLOSE_SECONDS; its finished items are dropped."""
        self.stop()
        if self._thread:
            self._thread.join(CLOSE_SECONDS)  # a limit, since a read may hang

    def _release_consumed(self) -> None:
        """Free the items that the device has finished with.

        The item returned last is kept until the work launched so far is done.
        """
        if self._current is not None:
            event = torch.cuda.current_stream(self._device).record_event()
            self._used.append((event, self._current))
        self._current = None
        while self._used and self._used[0][0].query():
            self._used.popleft()

    def _work(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own current device
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream) if stream else nullcontext():
            while self._make_next(stream):
                pass

    def _make_next(self, stream: torch.cuda.Stream | None) -> bool:
        """Make an item as soon as there is room. Returns False after the last one."""
        self._room.acquire()
        if self._closed:
            return False
        try:
            item = next(self._items)
        except BaseException as error:  # includes StopIteration
            self._made.put((None, None, error))
            return False
        self._made.put((item, stream.record_event() if stream else None, None))
        if not isinstance(item, self._counted):
            self._room.release()
        return True
