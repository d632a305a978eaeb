"""Worker processes for tokenization, used by stored and streamed data.

They share only files with the process that starts them, import no torch, and end with it.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from fsdp_trainer.errors import RunFailed, UserError

QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
PERIOD = 100_000  # microseconds, for the older kind of quota
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
ANSWER, REPORT, ERROR = range(3)
"""Kinds of messages from a worker."""

Report = Callable[..., None]
"""Called with news during a task."""
Handler = Callable[[Any, Report], Any]
"""Executes a task and returns its answer. It, tasks, answers and reports must be picklable."""


def cores() -> int:
    """Return the number of cores for this process, by its affinity and its container's quota."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    for file in QUOTAS:
        try:
            quota, period = [*Path(file).read_text().split(), str(PERIOD)][:2]
            if quota not in ("max", "-1"):
                allowed = min(allowed, max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            continue
    return allowed


class WorkerPool:
    """Worker processes that call a handler with the tasks sent to each of them, in order."""

    def __init__(self, handler: Handler, count: int, report: Report, note: str = ""):
        """report: called with the workers' reports. note: end of the message if a worker dies."""
        self.report, self.note = report, note
        self.processes: dict[Connection, subprocess.Popen] = {}
        try:
            for _ in range(count):
                ours, theirs = Pipe()
                self.processes[ours] = _start(theirs)
                theirs.close()
            pickled = pickle.dumps(handler)
            for connection in self.processes:
                self._send_bytes(connection, pickled)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[Connection]:
        return list(self.processes)

    def send(self, worker: Connection, task: Any) -> None:
        self._send_bytes(worker, pickle.dumps(task))

    def _send_bytes(self, worker: Connection, pickled: bytes) -> None:
        try:
            worker.send_bytes(pickled)
        except OSError:
            raise self._failure(worker) from None

    def receive(self, worker: Connection) -> Any:
        """Return the answer to a worker's oldest task; None if a report came first.

        Raises the handler's exception, or RunFailed if the worker is dead.
        """
        try:
            kind, content = worker.recv()
        except (EOFError, OSError):
            raise self._failure(worker) from None
        if kind == ERROR:
            raise content
        if kind == REPORT:
            self.report(*content)
        return content if kind == ANSWER else None

    def close(self) -> None:
        for connection, process in self.processes.items():
            process.kill()
            process.wait()
            connection.close()

    def _failure(self, worker: Connection) -> RunFailed:
        try:
            code: int | str = self.processes[worker].wait(5)
        except subprocess.TimeoutExpired:
            code = "unknown"
        if code == -signal.SIGKILL:
            fewer = max(1, len(self.processes) // 2)
            return RunFailed(
                "a process that tokenizes was killed, as the system does when memory runs out:"
                f"  data.workers={fewer}  needs less{self.note}"
            )
        return RunFailed(
            f"a process that tokenizes ended with code {code}; its output is above{self.note}"
        )


def do_jobs(
    jobs: Iterator[Any], handler: Handler, report: Report, workers: int, note: str
) -> Generator[Any, None, None]:
    """Yield the answer to each job as it finishes, from this process or from several workers.

    Raises RunFailed if a worker dies. All workers have ended when this generator ends or is closed.
    """
    if workers < 2:
        for job in jobs:
            yield handler(job, report)
        return
    with closing(WorkerPool(handler, workers, report, note)) as pool:
        busy = [worker for worker in pool.workers if _send_next(pool, worker, jobs)]
        while busy:
            for worker in wait(busy):
                assert isinstance(worker, Connection)
                answer = pool.receive(worker)
                if answer is not None:
                    yield answer
                    if not _send_next(pool, worker, jobs):
                        busy.remove(worker)


def _send_next(pool: WorkerPool, worker: Connection, jobs: Iterator[Any]) -> bool:
    job = next(jobs, None)
    if job is not None:
        pool.send(worker, job)
    return job is not None


def _start(connection: Connection) -> subprocess.Popen:
    """Start a worker process with its end of the pipe."""
    path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
    # workers are not ranks
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    env |= ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.Popen(
        # -P: do not import files in the user's folder as modules
        [
            sys.executable,
            "-P",
            "-m",
            "fsdp_trainer.data.store.tokenize_workers",
            str(connection.fileno()),
        ],
        env=env,
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
    )


def work(descriptor: int) -> None:
    """Execute tasks as a worker until the parent process is gone."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # the parent process gets these signals too, and ends this process
        signal.signal(signum, signal.SIG_IGN)
    connection = Connection(descriptor)
    handler: Handler = connection.recv()
    tasks: SimpleQueue[Any] = SimpleQueue()
    messages: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for transfer in (
        lambda: tasks.put(connection.recv()),
        lambda: connection.send(messages.get()),
    ):
        Thread(target=_repeat, args=(transfer,), daemon=True).start()
    while True:
        task = tasks.get()
        try:
            answer = handler(task, lambda *news: messages.put((REPORT, news)))
            messages.put((ANSWER, answer))
        except (UserError, OSError) as error:
            messages.put((ERROR, error))
        except Exception:
            messages.put((ERROR, RuntimeError(traceback.format_exc())))


def _repeat(transfer: Callable[[], None]) -> None:
    """Transfer messages until the other end is gone, then end this process."""
    try:
        while True:
            transfer()
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    work(int(sys.argv[1]))
