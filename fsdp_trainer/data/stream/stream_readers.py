"""Readers of streams: in this process, or in worker processes that read some of the streams each.

Imports no torch.
"""

import resource
from collections.abc import Mapping, Sequence

from fsdp_trainer.data.store.tokenize_workers import Report, WorkerPool
from fsdp_trainer.data.stream.row_stream import StreamedData, StreamedRow, StreamIterator

ROWS_AHEAD = 2  # rows of each of its streams that a worker makes in advance


class RowMaker:
    """Returns the next row of the stream with the given number at each call.

    cursors: start position of each stream. Raises UserError for data that cannot be used, OSError
    for files that cannot be read.
    """

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]]):
        self._data, self._cursors = data, cursors
        self._streams: dict[int, StreamIterator] = {}

    def __call__(self, stream: int, report: Report) -> StreamedRow:
        """report: called with a file's name before it is read; a stream keeps its first one."""
        if not self._streams:
            allow_open_files(2 * len(self._cursors))
        if stream not in self._streams:
            self._streams[stream] = self._data.stream(stream, self._cursors[stream], report)
        return next(self._streams[stream])


class Readers:
    """Returns the next row of any of its streams, read in this process.

    cursors: start position of each stream.
    """

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]]):
        self.waits_for = ""
        """The file that is being read or waited for."""
        self._make_row = RowMaker(data, cursors)
        self._closed = False

    def _reads(self, file: str) -> None:
        self.waits_for = file

    def next(self, stream: int) -> StreamedRow:
        if self._closed:
            raise OSError("the files are closed")
        return self._make_row(stream, self._reads)

    def close(self) -> None:
        """Make every later call of `next` fail; may be called from another thread."""
        self._closed = True


class WorkerReaders(Readers):
    """Returns the same rows, made by worker processes; call `next` in the order of the streams.

    `next` also raises RunFailed if a worker has died.
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
        worker = self._worker_of[stream]
        while (row := self.pool.receive(worker)) is None:
            pass  # a report, not a row
        self.pool.send(worker, stream)
        return row

    def close(self) -> None:
        self.pool.close()


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files by `count`, or up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
