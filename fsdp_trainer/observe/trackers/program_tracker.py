"""A program that reads a run's lines: logging.command."""

import json
import os
import shlex
import subprocess
from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker


class Program(Tracker):
    """A program that reads lines of JSON until its input is closed."""

    takes_back = True
    id_bytes = 0

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self.newest = run.step  # lines, not steps, are what it gets
        self._process = subprocess.Popen(
            shlex.split(run.mode),
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUN": str(run.folder)},
            start_new_session=True,  # Ctrl-C is for the run, which still has lines to send
        )

    def line(self, line: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def close(self, exit_code: int) -> None:
        """Wait until the program ends. Raises RuntimeError if it failed."""
        assert self._process.stdin
        self._process.stdin.close()
        if self._process.wait():
            raise RuntimeError(f"{self.run.mode} ended with code {self._process.returncode}")
