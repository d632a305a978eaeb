"""Commands in processes that are forked from a warm one, as a new Python would import torch first.

    process = Forked([sys.executable, "-m", "fsdp_trainer", "train", ...], tmp_path / "log")

The trainer's own processes that the command starts are forked from it in turn: ranks, groups, jobs.
For tests of many processes; that they can be started in earnest, `tests/launch/test_launch.py` and
`tests/project/test_install.py` show.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

from world import PRELOAD, SERVER, await_stores, use_server

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Forked:
    """A process that a test starts, with the methods of subprocess.Popen."""

    def __init__(
        self,
        command,
        log,
        env=None,
        cwd=None,
        own=None,
        seam=None,
    ):
        """Start it. log: file of its output.

        own, seam: what is entered in the process, and in each one that it starts.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        if SERVER in os.environ:
            use_server(os.environ[SERVER])
        self.log = log
        place = {**os.environ, **(env or {})}, str(cwd or os.getcwd())
        args = command, str(log), *place, own, seam
        # a daemon: it ends with the tests, whatever becomes of them
        self.process = context.Process(target=run_into, args=args, daemon=True)
        self.process.start()
        self.pid = self.process.pid

    @property
    def said(self):
        """Return its output so far, and that of the processes it has started."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def children(self):
        """Return the ids of the processes that it has started and that still run."""
        return [*map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=300):
        self.process.join(timeout)
        return self.poll()

    def communicate(self):
        self.wait()
        return self.said, ""

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run_into(
    command,
    log,
    env,
    cwd,
    own,
    seam,
):
    """Run a command in this process, which appends its output to a file."""
    await_stores()
    os.fsync = lambda file: None
    subprocess.Popen.__new__ = partial(start, seam)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    run(command, env, cwd, output, output, own)


class Child:
    """A process that is forked from this one, as subprocess.Popen would show it."""

    def __init__(self, command, seam, options):
        self.returncode = None
        self.stdout, output = None, options.get("stdout")
        if output == subprocess.PIPE:
            reads, output = os.pipe()
            self.stdout = os.fdopen(reads)
        self.pid = os.fork()
        if self.pid:
            return
        if options.get("start_new_session"):
            os.setsid()
        for number in SIGNALS:
            default = signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler
            signal.signal(number, default)
        run(command, options["env"], os.getcwd(), output, options.get("stderr"), seam)

    def poll(self):
        return self.wait(hangs=os.WNOHANG)

    def wait(self, timeout=None, hangs=0):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, hangs)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def start(seam, popen, args, *_, **options):
    """Take the place of Popen.__new__: fork a process of the trainer, and start all others."""
    if args[0] == sys.executable and "fsdp_trainer" in args[1:4]:
        return Child(list(args), seam, options)
    return object.__new__(popen)


def run(
    command,
    env,
    cwd,
    stdout,
    stderr,
    seam=None,
):
    """Run `python -m MODULE WORDS` in this process until its end.

    stdout, stderr: a file, its descriptor, or None for those of this process.
    """
    for number, stream in ((1, stdout), (2, stderr)):
        if stream is not None:
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(cwd)
    module, *words = command[command.index("-m") + 1 :]
    sys.argv = [module, *words]
    code = 0
    try:
        with seam() if seam else contextlib.nullcontext():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
