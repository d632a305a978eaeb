"""Worker processes for tokenisation: stored data and streams use the same ones.

They share nothing but files with the process that starts them, import no torch, and do not outlive
it.
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
PERIOD = 100_000  # microseconds, of the older kind of quota
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
ANSWER, REPORT, ERROR = range(3)
"""Kinds of messages from a worker."""

Report = Callable[..., None]
"""Called with news while a task is done."""
Handler = Callable[[Any, Report], Any]
"""Does a task and returns its answer. Picklable, as are tasks, answers and reports."""


def cores() -> int:
    """The number of cores of this process: its affinity, and its container's share."""
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
    """Processes that call a handler, each with the tasks that are sent to it, in that order."""

    def __init__(self, handler: Handler, count: int, report: Report, note: str = ""):
        """report: gets the workers' reports; note: ends the message on a worker that is gone."""
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
        """The workers, by their connections."""
        return list(self.processes)

    def send(self, worker: Connection, task: Any) -> None:
        """Give a worker a task. RunFailed if it is gone."""
        self._send_bytes(worker, pickle.dumps(task))

    def _send_bytes(self, worker: Connection, pickled: bytes) -> None:
        try:
            worker.send_bytes(pickled)
        except OSError:
            raise self._failure(worker) from None

    def receive(self, worker: Connection) -> Any:
        """Return the answer to a worker's oldest task; None if it had a report first.

        Raises what the handler raised; RunFailed if the worker is gone.
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
        """Kill the workers."""
        for connection, process in self.processes.items():
            process.kill()
            process.wait()
            connection.close()

    def _failure(self, worker: Connection) -> RunFailed:
        """Return the error for a worker that is gone."""
        try:
            code: int | str = self.processes[worker].wait(5)
        except subprocess.TimeoutExpired:
            code = "unknown"
        if code == -signal.SIGKILL:
            fewer = max(1, len(self.processes) // 2)
            return RunFailed(
                "a process that tokenises was killed, as the system does when memory runs out:"
                f"  data.workers={fewer}  needs less{self.note}"
            )
        return RunFailed(
            f"a process that tokenises ended with code {code}; what it said stands above{self.note}"
        )


def do_jobs(
    jobs: Iterator[Any], handler: Handler, report: Report, workers: int, note: str
) -> Generator[Any, None, None]:
    """Yield the answer to each job as it comes, from this process or from several workers.

    Raises RunFailed if one is killed; none is left when this ends, however it ends.
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
    """Send a worker the next job; False if there is none."""
    job = next(jobs, None)
    if job is not None:
        pool.send(worker, job)
    return job is not None


def _start(connection: Connection) -> subprocess.Popen:
    """Start a worker, which is given its end of the pipe."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    # it is none of the ranks
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    env |= ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.Popen(
        # -P: files in the user's folder are not imported as modules
        [sys.executable, "-P", "-m", "fsdp_trainer.data.workers", str(connection.fileno())],
        env=env,
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
    )


def work(descriptor: int) -> None:
    """Do tasks as a worker, until the process that sends them has gone."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # the process that started this one gets them too, and ends it
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
    """Transfer messages until the other end has gone, and end this process with it."""
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
