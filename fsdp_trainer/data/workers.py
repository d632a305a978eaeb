"""Processes that tokenise.

They share nothing but files with the one that started them, import no torch, and do not outlive it.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from fsdp_trainer.data.tokenise import Done, How, Task, Tick, tokenise
from fsdp_trainer.errors import RunFailed, UserError

QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
PERIOD = 100_000  # microseconds, of the older kind of quota

Job = tuple[int, Task, Path]
"""The place of a task, and the folder of its part."""


def cores() -> int:
    """The number of cores of this process: its affinity, and its container's share."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for file in QUOTAS:
        try:
            quota, period = [*Path(file).read_text().split(), str(PERIOD)][:2]
            if quota not in ("max", "-1"):
                allowed = min(allowed, max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            continue
    return allowed


def in_this_process(
    jobs: Iterator[Job], how: How, tick: Tick
) -> Generator[tuple[int, Done], None, None]:
    """Each task's place with what became of it, in order."""
    for i, task, part in jobs:
        yield i, tokenise(task, part, how, tick)


def in_processes(
    jobs: Iterator[Job], how: How, tick: Tick, count: int
) -> Generator[tuple[int, Done], None, None]:
    """The same by `count` processes, as they come.

    Raises RunFailed if one is killed; none is left when this ends, however it ends.
    """
    workers: dict[Connection, subprocess.Popen] = {}
    try:
        for _ in range(count):
            ours, theirs = Pipe()
            workers[ours] = start(theirs)
            theirs.close()
        told = pickle.dumps(how)
        for connection in workers:
            connection.send_bytes(told)
        busy = [connection for connection in workers if _next(connection, jobs)]
        while busy:
            for connection in [known for known in wait(busy) if isinstance(known, Connection)]:
                message = connection.recv()
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message[1], Done):
                    yield message
                    if not _next(connection, jobs):
                        busy.remove(connection)
                else:
                    tick(*message)
    except (EOFError, ConnectionError):
        raise RunFailed(_why_gone(workers)) from None
    finally:
        for connection, process in workers.items():
            process.kill()
            process.wait()
            connection.close()


def start(connection: Connection, module: str = "fsdp_trainer.data.workers") -> subprocess.Popen:
    """A process that runs a module, which is told its end of the pipe."""
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    one_thread = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")
    }  # it is none of the ranks
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            module,
            str(connection.fileno()),
        ],  # whose modules are not those that lie where the user stands
        env=env | one_thread | {"PYTHONPATH": path},
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
    )


def _next(connection: Connection, jobs: Iterator[Job]) -> bool:
    job = next(jobs, None)
    if job:
        connection.send(job)
    return job is not None


def _why_gone(workers: dict[Connection, subprocess.Popen]) -> str:
    codes = [code for process in workers.values() if (code := _code(process)) is not None]
    if -signal.SIGKILL in codes:
        use = f"  data.workers={max(1, len(workers) // 2)}  needs less"
        return (
            f"a process that tokenises was killed, as the system does when memory runs out:{use}."
            " What is finished is kept"
        )
    return (
        f"a process that tokenises ended with code {codes[0] if codes else 'unknown'}; what it"
        " said stands above. What is finished is kept"
    )


def _code(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(0.5)
    except subprocess.TimeoutExpired:
        return None


def work(descriptor: int) -> None:
    """A worker's life: tasks come, parts are written, until the one that gives them has gone."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # who started this hears them too, and ends it
    connection = Connection(descriptor)
    try:
        how: How = pickle.loads(connection.recv_bytes())
        while True:
            i, task, part = connection.recv()
            try:
                answer: object = (
                    i,
                    tokenise(task, part, how, lambda rows, tokens: connection.send((rows, tokens))),
                )
            except ConnectionError:
                return
            except (UserError, OSError) as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            connection.send(answer)
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    work(int(sys.argv[1]))
