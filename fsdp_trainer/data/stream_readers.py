"""Readers that make the rows of streams: this process, or workers, each for some streams.

Imports no torch.
"""

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from queue import Queue
from typing import Any

from fsdp_trainer.data.stream import StreamedData, StreamedRow
from fsdp_trainer.data.workers import start
from fsdp_trainer.errors import RunFailed, UserError

AHEAD = 2  # rows that a process makes of each of its streams before they are asked for


class Readers:
    """Gives the next row of any of these streams, in this process. cursors: where each begins."""

    def __init__(
        self,
        data: StreamedData,
        cursors: Mapping[int, Sequence[int]],
        opens: Callable[[str], Any] | None = None,
    ):
        """opens: hears of each file before it is read."""
        self.waits_for = ""
        """The file that is read, or waited for."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:  # a stream holds a file open
            wanted = soft + 2 * len(cursors)
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard),
            )
        self._streams = {
            stream: data.stream(stream, cursor, opens or self._opens)
            for stream, cursor in cursors.items()
        }

    def _opens(self, file: str) -> None:
        self.waits_for = file

    def next(self, stream: int) -> StreamedRow:
        """UserError for data that cannot be used, OSError for files that cannot be read, RunFailed if the process that read it is gone."""
        return next(self._streams[stream])

    def close(self) -> None:
        """Nothing is read any more: whoever still asks for a row, in another thread, gets none."""
        self._streams.clear()


class ReadersElsewhere(Readers):
    """The same by `processes`, each of which makes the rows of its streams in turn: ask for them in their order."""

    def __init__(self, data: StreamedData, cursors: Mapping[int, Sequence[int]], processes: int):
        super().__init__(data, {})
        self._connections: dict[int, Connection] = {}
        self._processes: list[subprocess.Popen] = []
        for i in range(processes):
            own = {stream: cursors[stream] for stream in sorted(cursors)[i::processes]}
            ours, theirs = Pipe()
            self._processes.append(start(theirs, __spec__.name))
            theirs.close()
            ours.send_bytes(pickle.dumps((data, own)))
            self._connections |= dict.fromkeys(own, ours)

    def next(self, stream: int) -> StreamedRow:
        """As of Readers."""
        try:
            while isinstance(message := self._connections[stream].recv(), str):
                self.waits_for = message
        except (EOFError, OSError):
            reason = (
                "a process that tokenises was killed, as the system does when memory runs out:"
                "  data.workers=1  needs the least"
            )
            raise RunFailed(reason) from None
        if isinstance(message, BaseException):
            raise message
        return message

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in set(self._connections.values()):
            connection.close()


def work(descriptor: int) -> None:
    """A worker's life: rows of its streams in turn, as far ahead as there is room, until the one who asked for them has gone."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # who started this hears them too, and ends it
    connection = Connection(descriptor)
    data, cursors = pickle.loads(connection.recv_bytes())
    made: Queue[object] = Queue(AHEAD * len(cursors))

    def send() -> None:
        try:
            while True:
                connection.send(made.get())
        except OSError:
            os._exit(0)

    def listen() -> None:
        try:
            connection.recv()
        except (EOFError, OSError):
            os._exit(0)

    for thread in (send, listen):
        threading.Thread(target=thread, daemon=True).start()
    try:
        readers = Readers(data, cursors, made.put)
        while True:
            for stream in cursors:
                made.put(readers.next(stream))
    except (UserError, OSError) as error:
        made.put(error)
    except Exception:
        made.put(RuntimeError(traceback.format_exc()))
    threading.Event().wait()


if __name__ == "__main__":
    work(int(sys.argv[1]))
