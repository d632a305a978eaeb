"""The reward `code`: run the row's tests on the answer's Python code, in a separate process."""

import ast
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.process import cores
from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.rewards.reward import Attempt, Reward
from fsdp_trainer.rl.rewards.sandbox import UNPROTECTED

SANDBOX = Path(__file__).with_name("sandbox.py")
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
LANGUAGES = ("", "python", "py", "python3")
TESTS = ("tests", "test_list", "test", "assertions")
"""Columns to search for tests if the setting `field` is null."""
SETUP = ("test_setup_code", "test_imports")
"""Columns with code that runs before the answer's, as in MBPP."""
MOST_OUTPUT = 4096
"""Maximum size of a verdict in bytes; a process that writes more is killed."""
MOST_THREADS = 64
"""Number of threads of a process above which it is killed.

The answers of a node could otherwise use up all process ids of the machine.
"""
POLL_SECONDS = 0.05
# does not pass on settings, keys and tokens of this process; keeps libraries from starting a thread
# for each core
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT["MALLOC_ARENA_MAX"] = "1"  # a thread's own arena would take from memory_mib
NOT_CONFINED = (
    "this system cannot confine the code of answers: it takes Linux on x86_64 or aarch64 with"
    " seccomp.\nScore them elsewhere, with  {name: http, url: …}"
)


@dataclass(frozen=True)
class Code(Reward):
    """1 for an answer whose Python code passes all tests of the row, else 0.

    The code is the last Python block between ``` in the answer, or the complete answer.
    """

    name: ClassVar[str] = "code"
    field: str | None = key(
        None, "the column of the tests: Python, or a list of it; null: tests, test_list or test"
    )
    partial: bool = key(False, "the share of the tests that pass, not all or nothing")
    cpu_seconds: int = key(4, "processor time that an answer may take", minimum=1)
    seconds: float = key(20.0, "time until it is ended, whatever it does", above=0)
    memory_mib: int = key(512, "MiB of addresses that it may use", minimum=64)
    workers: int | None = key(
        None, "answers that run at the same time; null: a rank's share of the cores", minimum=1
    )

    def record_problem(self, row: Json, reference: str | None) -> str | None:
        tests = self._tests(row)
        table = next((test for test in tests if is_table(test)), None)
        if table:
            return (
                f"has a value as a test, which the reward {self.title} does not run:"
                f" {table[:60]!r}. A test is Python, such as  assert f(1) == 2"
            )
        if tests:
            return None
        wanted = repr(self.field) if self.field else " or ".join(map(repr, TESTS[:3]))
        columns = " ".join(row) or "none"
        return f"has no {wanted}, which the reward {self.title} needs; its columns: {columns}"

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = self.workers or max(1, cores() // ranks)
        with (
            tempfile.TemporaryDirectory(prefix="fsdp_trainer_code_") as folder,
            ThreadPoolExecutor(workers) as pool,
        ):
            return list(pool.map(lambda attempt: self._score(attempt, folder), attempts))

    def _score(self, attempt: Attempt, folder: str) -> float:
        tests = self._tests(attempt.row)
        if not tests:
            return 0.0
        token = secrets.token_hex(16)
        before = [line for name in SETUP for line in lines_of(attempt.row.get(name))]
        job = {
            "code": "\n".join([*before, code_of(attempt.answer)]),
            "tests": len(tests),
            "partial": self.partial,
            "cpu_seconds": self.cpu_seconds,
            "memory_mib": self.memory_mib,
        }
        verdict = run_confined(job, [*tests, token], folder, self.seconds)
        if verdict == UNPROTECTED:
            raise UserError("code cannot be scored", "code", NOT_CONFINED)
        given, _, passed = verdict.partition(" ")
        if given != token or not passed.isdecimal():
            return 0.0
        share = min(int(passed), len(tests)) / len(tests)
        return share if self.partial else float(share == 1)

    def _tests(self, row: Json) -> list[str]:
        columns = (self.field,) if self.field else TESTS
        value = next((row[name] for name in columns if row.get(name)), None)
        tests = lines_of(value)
        if tests and isinstance(row.get("entry_point"), str):  # HumanEval's format
            tests = ["\n".join([*tests, f"check({row['entry_point']})"])]
        return tests


def code_of(answer: str) -> str:
    """Return the last Python block of an answer, or the complete answer if it has none."""
    blocks = [text for language, text in BLOCK.findall(answer) if language.lower() in LANGUAGES]
    return blocks[-1] if blocks else answer


def lines_of(value: Any) -> list[str]:
    """Return the texts of a column: its elements if it is a list or a JSON list, else its value."""
    if isinstance(value, str) and value[:1] == "[":
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list):
        return [str(text) for text in value]
    return [str(value)] if value else []


def is_table(test: str) -> bool:
    """Return True for a test that is only a value, such as a table of inputs: it never fails."""
    try:
        ast.literal_eval(test.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def run_confined(job: Json, later: Sequence[str], folder: str, seconds: float) -> str:
    """Return the verdict of the process that runs a job, "" if there was none in time.

    later: what the process reads one after the other as it goes on, the verdict's token last.
    """
    with tempfile.TemporaryFile() as given:
        for text in (json.dumps(job), *later):
            part = text.encode(errors="replace")
            given.write(b"%08x%b" % (len(part), part))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(SANDBOX)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    with process:
        assert process.stdout
        try:
            return read_verdict(process.stdout.fileno(), process.pid, seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_verdict(descriptor: int, pid: int, seconds: float) -> str:
    """Return the output of a process until it ends.

    "" if it writes too much, takes too long or starts too many threads.
    """
    deadline = time.monotonic() + seconds
    content = b""
    while len(content) <= MOST_OUTPUT:
        remaining = deadline - time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], min(POLL_SECONDS, max(0.0, remaining)))
        if not ready:
            if remaining <= 0 or threads_of(pid) > MOST_THREADS:
                return ""
            continue
        piece = os.read(descriptor, MOST_OUTPUT)
        if not piece:
            return content.decode(errors="replace")
        content += piece
    return ""


def threads_of(pid: int) -> int:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    return 0
