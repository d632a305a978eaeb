"""The media of micro-batches, decoded and resized ahead of the step by worker processes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.data.files.remote_files import nothing
from fsdp_trainer.data.media.media import MediaProcessor, SampleMedium, joined
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.store.tokenize_workers import Report, WorkerPool
from fsdp_trainer.models.decoder import AXES, MediaInputs

Arrays = dict[str, np.ndarray]
AHEAD = 4
"""Rows, and plans of steps, whose media are loaded before they are needed."""
PositionsOf = Callable[[Tensor, Arrays], Tensor]
"""Positions of a document: of its tokens [length] and its media' arrays, [axes, length]."""


class MediaLoader:
    """Loads the media of rows.

    positions: see PositionsOf; None for a model whose media have the positions of their tokens.
    workers: number of processes; 0: this process does it.
    """

    def __init__(self, processor: MediaProcessor, positions: PositionsOf | None, workers: int):
        self.processor, self.positions, self.workers = processor, positions, workers
        self._black: Arrays | None = None

    def ahead(self, items: Iterator[Any]) -> Iterator[tuple[Any, list[Arrays]]]:
        """Yield each item, rows with the arrays of their media.

        The media of the next AHEAD rows are loaded meanwhile.
        """
        if not self.workers:
            yield from ((item, self.load(item)) for item in items)
            return
        handler = partial(load_as_worker, self.processor)
        with closing(WorkerPool(handler, self.workers, nothing)) as pool:
            workers = cycle(pool.workers)
            waiting: deque[tuple[Any, list[Connection]]] = deque()
            for item in items:
                futures = [next(workers) for _ in media_of(item)]
                for worker, one in zip(futures, media_of(item), strict=True):
                    pool.send(worker, one)
                waiting.append((item, futures))
                while len(waiting) > AHEAD:
                    yield received(pool, *waiting.popleft())
            while waiting:
                yield received(pool, *waiting.popleft())

    def load(self, item: Any) -> list[Arrays]:
        return [self.processor.load(one.file) for one in media_of(item)]

    def inputs(
        self, rows: Rows, arrays: Sequence[Arrays] | None, length: int, device: torch.device
    ) -> MediaInputs:
        """Return the media of a micro-batch on a device.

        arrays: of its media, in order; None: not loaded. length: of the micro-batch's rows.
        """
        arrays = self.load(rows) if arrays is None else arrays
        self._black = self._black or self.processor.smallest()
        positions, whole = self._positions(rows, arrays), joined(arrays or [self._black])
        return MediaInputs(
            {name: to_device(value, device) for name, value in whole.items()},
            sum(one.tokens for one in media_of(rows)),
            None if positions is None else to_device(positions[..., :length], device),
        )

    def _positions(self, rows: Rows, arrays: Sequence[Arrays]) -> np.ndarray | None:
        """Return the positions of all tokens, [axes, rows, length]; None if they are as of text."""
        if self.positions is None or not arrays:
            return None
        result = np.repeat(rows.positions[None], AXES, 0)
        loaded = iter(zip(media_of(rows), arrays, strict=True))
        for row, documents in enumerate(rows.documents):
            for end, length in zip(np.cumsum(documents, dtype=int), documents, strict=True):
                tokens = rows.tokens[row, end - length : end]
                missing, own = int(np.count_nonzero(tokens == self.processor.token)), []
                while missing > 0:
                    medium, array = next(loaded)
                    missing -= medium.tokens
                    own.append(array)
                if own:
                    places = self.positions(torch.from_numpy(tokens), joined(own))
                    result[:, row, end - length : end] = places.numpy()
        return result


def load_as_worker(processor: MediaProcessor, medium: SampleMedium, report: Report) -> Arrays:
    """Return the arrays of an image in a worker process, which reports nothing else."""
    return processor.load(medium.file)


def received(pool: WorkerPool, item: Any, asked: list[Connection]) -> tuple[Any, list[Arrays]]:
    return item, [pool.receive(worker) for worker in asked]


def media_of(item: Any) -> list[SampleMedium]:
    media = item.media or [] if isinstance(item, Rows) else []
    return [one for row in media for one in row]
