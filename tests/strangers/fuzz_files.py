"""Mutated files of every format, each read in a process of its own: none may be misread.

A mutant must give the right value, or one message with exit code 2. A traceback, a hang, much
memory, another value, and a process that runs something are reported with what was changed.
`make fuzz-files` takes others.
"""

import gc
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from file_formats import FileFormat, NoOpinion, Refusal, Value
from mutations import Mutation

from fsdp_trainer.errors import RunFailed, UserError

CPU_SECONDS, SECONDS, BYTES = 20, 120, 3 * 2**30
"""Limits of one process that reads a file; bytes of memory beyond what it begins with."""
STARTS_SOMETHING = {
    "os.exec", "os.system", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn",
    "socket.connect", "ctypes.dlopen",
}  # fmt: skip
"""Audit events that no reading of a file may cause."""
NEAR = 12
"""Bytes before and behind a flipped bit by which it is known to be among the value's bytes."""
RIGHT, SAME, REFUSED = "right value", "same value", "refused"
GOOD = (RIGHT, SAME, REFUSED)


@dataclass(frozen=True)
class Outcome:
    """Result of a process that has read a folder. kind: value, refused, or what is wrong."""

    kind: str
    value: Value | None = None
    text: str = ""


@dataclass
class Tally:
    """The outcomes of a format's mutants."""

    counts: Counter = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


# --- one process


def limited(function):
    """Run a function in a forked process with bounds, and return its outcome."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        os.setsid()
        try:
            bound()
            answer = pickle.dumps(function())
        except BaseException:
            answer = pickle.dumps(Outcome("traceback", text=traceback.format_exc()))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = read_until(pipe, time.monotonic() + SECONDS)
    end_group(pid)
    _, status = os.waitpid(pid, 0)
    if answer:
        return pickle.loads(answer)
    number = os.waitstatus_to_exitcode(status)
    is_late = -number in (signal.SIGXCPU, signal.SIGKILL)
    return Outcome("hang" if is_late else f"ended by signal {-number}")


def bound():
    """Limit this process's time and memory; end it if it starts another or connects anywhere."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)

    def forbid(event, args):
        is_own_program = event == "ctypes.dlopen" and args == (None,)
        if event in STARTS_SOMETHING and not is_own_program:
            raise Started(f"{event} {args!r:.200}")

    sys.addaudithook(forbid)


class Started(BaseException):
    """Reading a file has started a program, loaded a library or opened a connection."""


def read_until(pipe, deadline):
    """Return all that a process writes; b"" if it is not at its end by the deadline."""
    parts = []
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(pipe.fileno(), 2**20)):
            return b"".join(parts)
        parts.append(part)
    return b""


def end_group(pid):
    """Kill a process that is still running, and all that it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def outcome_of(form, folder):
    """Return what a format's reader makes of a folder, as a user would see it."""
    try:
        return Outcome("value", form.read(folder))
    except Refusal as refusal:
        return refused(form, refusal.code, refusal.text)
    except (UserError, RunFailed) as error:
        return refused(form, error.exit_code, str(error))
    except Started as started:
        return Outcome("starts something", text=str(started))
    except MemoryError:
        return Outcome("memory", text=traceback.format_exc())


def written_by(form, folder):
    """Write a format's valid input."""
    form.write(folder)
    return Outcome("value")


def refused(form, code, text):
    """Return the outcome of an exit code and a message."""
    if code not in form.codes:
        return Outcome(f"exit code {code}", text=text)
    if "Traceback" in text or (code == 2 and text.count("fsdp-trainer: ") != 1):
        return Outcome("not one message", text=text)
    if any(ord(character) < 32 and character not in "\n\t" for character in text):
        return Outcome("control characters", text=repr(text))
    return Outcome("refused", text=text)


def right_of(form, folder):
    """Return the value that an independent reader makes of a folder."""
    try:
        return Outcome("value", form.right(folder) if form.right else None)
    except NoOpinion:
        return Outcome("no opinion")
    except Exception as error:
        return Outcome("unreadable", text=repr(error))


# --- one mutant


@dataclass
class Mutant:
    """A folder with one changed file. path: of that file, in the valid input."""

    form: FileFormat
    valid: Path
    folder: Path
    path: Path
    change: Mutation

    def write(self):
        """Write the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.valid, self.folder)
        (self.folder / self.path).write_bytes(self.change.content)
        self.form.seal(self.folder)

    def verdict(self, value):
        """Return what is to be said of it. value: of the valid input."""
        self.write()
        outcome = limited(lambda: outcome_of(self.form, self.folder))
        if outcome.kind == "refused":
            return Outcome(REFUSED, text=outcome.text)
        if outcome.value is None:
            return outcome
        return self.judged(outcome.value, value)

    def judged(self, value, valid):
        """Return RIGHT or SAME for a right value, else what is wrong with it."""
        if self.form.numbers and self.changes_alike(value, valid):
            return Outcome(RIGHT)
        if agrees(value, valid, self.form.same_names):
            if self.form.numbers and self.change.flipped and self.is_among(valid):
                return Outcome("a flipped bit is lost")
            return Outcome(SAME)
        if self.form.checked:
            return Outcome("another value", text="although the file has a checksum")
        right = limited(lambda: right_of(self.form, self.folder))
        if right.kind == "no opinion" or (right.value is not None and self.is_right(value, right)):
            return Outcome(RIGHT)
        return Outcome("another value", text=difference(value, right.value or valid) + right.text)

    def is_right(self, value, right):
        """Return True if a value is that of an independent reader."""
        return self.form.in_order(value) == self.form.in_order(right.value or {})

    def changes_alike(self, value, valid):
        """Return True if no more bytes of the value have changed than of the file.

        For flipped bits: no more bits. A reader that is led elsewhere reads other numbers
        altogether.
        """
        content = (self.valid / self.path).read_bytes()
        if len(content) != len(self.change.content):
            return False
        bits, changed = difference_of(value, valid)
        if self.change.flipped:
            return 0 < bits <= len(self.change.flipped)
        return 0 < changed <= sum(a != b for a, b in zip(content, self.change.content, strict=True))

    def is_among(self, value):
        """Return True if all flipped bytes lie among the numbers of the value."""
        content = (self.valid / self.path).read_bytes()
        numbers = b"".join(value.values())
        return all(
            NEAR <= place < len(content) - NEAR and content[place - NEAR : place + NEAR] in numbers
            for place in self.change.flipped
        )


def difference_of(value, valid):
    """Return how many bits and bytes of a value have changed; 0 if it has other sizes."""
    if value.keys() != valid.keys() or any(len(value[n]) != len(valid[n]) for n in valid):
        return 0, 0
    numbers = [np.frombuffer(b"".join(v[n] for n in valid), np.uint8) for v in (value, valid)]
    changed = numbers[0] ^ numbers[1]
    return int(np.unpackbits(changed).sum()), int(np.count_nonzero(changed))


def agrees(value, valid, same_names):
    """Return True if two values are the same; of the names that both have, if others may lack."""
    if same_names:
        return value == valid
    return all(value[name] == valid[name] for name in value.keys() & valid.keys())


def difference(value, right):
    """Return how two values differ, in a line."""
    if value.keys() != right.keys():
        return f"names {sorted(value.keys() ^ right.keys())[:4]} "
    name = next(name for name in right if value[name] != right[name])
    return f"{name}: {len(value[name])} bytes, right are {len(right[name])} "


def mutants(home, seed, count, forms):
    """Yield `count` mutants of the formats in turn; one of a number is the same in every run."""
    for number in range(count):
        form = forms[number % len(forms)]
        valid = home / form.name.replace(" ", "_")
        chance = random.Random(f"{seed} {number // len(forms)} {form.name}")
        paths = sorted(p for p in valid.glob(form.files) if p.is_file() and p.stat().st_size)
        path = chance.choice(paths)
        change = chance.choice(form.changes)
        try:
            mutation = change(path.read_bytes(), chance)
        except ValueError:  # not a text of JSON
            mutation = form.changes[0](path.read_bytes(), chance)
        yield number, Mutant(form, valid, home / "mutant", path.relative_to(valid), mutation)


def run_all(home, seed, count, forms, say):
    """Read `count` mutants; return what became of them by format."""
    values = {}
    for form in forms[:count]:
        folder = home / "mutant"
        folder.mkdir()
        written = limited(partial(written_by, form, folder))
        assert written.kind == "value", f"{form.name}: {written.text}"
        valid = home / form.name.replace(" ", "_")
        if form.files.startswith("cache"):  # of files as old as these are
            outcome = limited(partial(outcome_of, form, folder))
            folder.rename(valid)
        else:  # in this process: what the readers import and keep, all forks have
            outcome = outcome_of(form, folder)
            right_of(form, folder)
            skip = shutil.ignore_patterns("cache")
            shutil.copytree(folder, valid, ignore=skip, copy_function=shutil.copy)
            shutil.rmtree(folder)
        assert outcome.value is not None, f"{form.name}, unchanged: {outcome.kind}\n{outcome.text}"
        values[form.name] = outcome.value
    gc.collect()
    gc.freeze()
    tallies = defaultdict(Tally)
    for number, mutant in mutants(home, seed, count, forms):
        outcome = mutant.verdict(values[mutant.form.name])
        tally = tallies[mutant.form.name]
        tally.counts[outcome.kind] += 1
        if outcome.kind not in GOOD:
            where = f"{mutant.form.name} {number}: {mutant.path}: {mutant.change.what}"
            tally.bad.append(f"{where}\n    {outcome.kind}: {outcome.text.strip()[-900:]}")
            say(tally.bad[-1])
    return tallies
