"""Readers of streams: in this process, or in workers that each read some of them.

Imports no torch.
"""

import resource
from collections.abc import Mapping, Sequence

from fsdp_trainer.data.stream import StreamedData, StreamedRow, StreamIterator
from fsdp_trainer.data.workers import Report, WorkerPool

ROWS_AHEAD = 2  # rows that a worker makes of each of its streams before they are needed


class RowMaker:
    """Returns the next row of a stream each time it is called with its number.

    cursors: where each stream begins. UserError for data that cannot be used, OSError for files
    that cannot be read.
    """

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]]):
        self._data, self._cursors = data, cursors
        self._streams: dict[int, StreamIterator] = {}

    def __call__(self, stream: int, report: Report) -> StreamedRow:
        """report: gets the name of each file before it is read; that of the first call stays."""
        if not self._streams:
            allow_open_files(2 * len(self._cursors))
        if stream not in self._streams:
            self._streams[stream] = self._data.stream(stream, self._cursors[stream], report)
        return next(self._streams[stream])


class Readers:
    """Gives the next row of any of these streams, in this process. cursors: where each begins."""

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]]):
        self.waits_for = ""
        """The file that is read, or waited for."""
        self._make_row = RowMaker(data, cursors)
        self._closed = False

    def _reads(self, file: str) -> None:
        self.waits_for = file

    def next(self, stream: int) -> StreamedRow:
        """Return the next row of a stream. Raises as RowMaker does."""
        if self._closed:
            raise OSError("the files are closed")
        return self._make_row(stream, self._reads)

    def close(self) -> None:
        """Read no further row, also in another thread."""
        self._closed = True


class WorkerReaders(Readers):
    """Gives the same rows, made by workers: ask for them in the streams' order.

    `next` also raises RunFailed if a worker is gone.
    """

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]], workers: int):
        super().__init__(data, cursors)
        self.pool = WorkerPool(self._make_row, workers, self._reads)
        streams = sorted(cursors)
        self._worker_of = {
            stream: worker
            for i, worker in enumerate(self.pool.workers)
            for stream in streams[i::workers]
        }
        for stream in streams * ROWS_AHEAD:
            self.pool.send(self._worker_of[stream], stream)

    def next(self, stream: int) -> StreamedRow:
        """Return the next row of a stream, and have the worker make one more."""
        worker = self._worker_of[stream]
        while (row := self.pool.receive(worker)) is None:
            pass  # a report
        self.pool.send(worker, stream)
        return row

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files by `count`, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
