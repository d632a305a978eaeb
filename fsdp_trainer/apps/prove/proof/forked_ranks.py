"""Ranks that are forked from a process which has imported what they need.

A proof starts six to twenty ranks. To import all of it takes each longer than its ten steps.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from typing import IO, Any

import torch

from fsdp_trainer.base.process import PARENT
from fsdp_trainer.config.composing.handover import DESCRIPTOR
from fsdp_trainer.launch.start import Child, start_process

OF_ALL, OF_TRANSFORMERS = "fsdp_trainer.run.run", "fsdp_trainer.models.hf.hf_decoder"


def begin(by_transformers: bool) -> None:
    """Start the process to fork from, which imports while this one narrows the run.

    by_transformers: of models that are computed by transformers' modules.
    """
    multiprocessing.set_forkserver_preload([OF_ALL] + [OF_TRANSFORMERS] * by_transformers)
    server_runs()


def server_runs() -> bool:
    """Start the process to fork from if it does not run; return False where there is none."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return False  # other systems' libraries do not survive a fork; a daemon has no children
    try:
        forkserver.ensure_running()
    except OSError:  # such as a TMPDIR that is too long for a socket's name
        return False
    return True


def starter(configured: Mapping[str, str]) -> Callable[..., Child]:
    """Return what starts a rank. configured: launch.env, which imports may read."""
    return ForkedRank if not configured and server_runs() else start_process


class ForkedRank:
    """A rank, with the methods of launch.start.Child. Its arguments are those of start_process."""

    def __init__(
        self, words: list[str], env: dict[str, str], configuration: int, stdout: IO[str],
        stderr: IO[str],
    ):  # fmt: skip
        content = os.pread(configuration, os.fstat(configuration).st_size, 0)
        context: Any = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=run_rank, args=(words, env, content, stdout.name))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signum)

    def kill(self) -> None:
        self.process.kill()


def run_rank(words: list[str], env: dict[str, str], configuration: bytes, output: str) -> None:
    """Run a command line in this process, which then ends. output: the file for what it says."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env | {PARENT: str(os.getppid())})
    with open(output, "a") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    file = os.memfd_create("configuration")
    os.write(file, configuration)
    os.environ[DESCRIPTOR] = str(file)
    sys.argv[1:] = words
    runpy.run_module("fsdp_trainer", run_name="__main__")
