"""Starting several groups of ranks on this machine, and a lighthouse for them, to try them out."""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import IO

from fsdp_trainer.base.process import PARENT, SIGNALS, STOPPED, cores
from fsdp_trainer.config.composing.handover import DESCRIPTOR, configuration_file
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.group_secret import TOKEN
from fsdp_trainer.launch.start import (
    Child,
    RankProcesses,
    passing_on_signals,
    ranks_to_start,
    start_process,
)

MOST_RESTARTS = 3
"""How often a group that failed is started again."""
FINAL = (0, STOPPED, UserError.exit_code)
"""Exit codes after which a group is not started again."""


def start_groups(cfg: TrainConfig, overrides: list[str]) -> int:
    """Start launch.groups groups of ranks and wait for them; return the exit code.

    A group that fails is started again while others train. overrides: the arguments that `cfg` was
    composed from.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with ExitStack() as open_files:
            address = open_files.enter_context(Lighthouse()).address
            groups = GroupProcesses(
                [
                    open_files.enter_context(configuration_file(cfg.of_group(number, address)))
                    for number in range(cfg.launch.groups)
                ],
                ["train", *overrides],
                max(1, cores() // (cfg.launch.groups * ranks_to_start(cfg.launch))),
            )
            with passing_on_signals(groups):
                return groups.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Lighthouse:
    """A lighthouse in a process of its own, which ends with the context."""

    def __enter__(self) -> "Lighthouse":
        command = [sys.executable, "-m", "fsdp_trainer", "lighthouse", "host=127.0.0.1", "port=0"]
        env = os.environ | {PARENT: str(os.getpid())}
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"the lighthouse ended with code {self._process.wait()}")
        self.address = "127.0.0.1:" + line.strip().rpartition(":")[2]
        """HOST:PORT."""
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


class GroupProcesses(RankProcesses):
    """The processes that start the groups' ranks."""

    def __init__(self, configurations: list[IO[bytes]], words: list[str], threads: int):
        """Start them. configurations: open files, one for each group; words: see start_process.

        threads: number of threads of a rank.
        """
        self._configurations, self._words, self._threads = configurations, words, threads
        self._restarts = [0] * len(configurations)
        self._secret = os.environ.get(TOKEN) or secrets.token_hex()
        super().__init__([self._start(number) for number in range(len(configurations))])

    def _start(self, number: int) -> subprocess.Popen:
        file = self._configurations[number]
        env = {**os.environ, PARENT: str(os.getpid()), DESCRIPTOR: str(file.fileno())}
        env.setdefault("OMP_NUM_THREADS", str(self._threads))
        env[TOKEN] = self._secret
        process = start_process(self._words, env, file.fileno())
        print(f"group  {number} is process {process.pid}", flush=True)
        return process

    def wait(self) -> int:
        """Wait until all groups have ended.

        Returns 0 if one has finished, else STOPPED if one has stopped, else the first failure.
        """
        while True:
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                best = [code for code in (0, STOPPED) if code in codes]
                failed = next(code for code in (*best, *codes) if code is not None)
                return 1 if failed < 0 else failed
            if time.monotonic() > self.deadline:
                for process in self.processes:
                    process.kill()
            elif self.deadline == float("inf"):
                self.processes = [self._goes_on(i, code) for i, code in enumerate(codes)]
            time.sleep(0.05)

    def _goes_on(self, number: int, code: int | None) -> Child:
        process = self.processes[number]
        if code in (None, *FINAL) or self._restarts[number] == MOST_RESTARTS:
            return process
        self._restarts[number] += 1
        print(
            f"fsdp-trainer: group {number} ended with code {code}: started again", file=sys.stderr
        )
        return self._start(number)
