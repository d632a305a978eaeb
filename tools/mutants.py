"""Measure how many faults the tests notice: each of tools/mutants.toml is put into a copy.

For each fault the test files that reach the faulty file are run (tools/reach.py), those of its
room first, until a test fails or the time is over. Before them comes the test that noticed it in
tools/mutants.json, the result that is committed. Tests with the marks faults and gpu are left out.
A test that fails without the fault, too, notices nothing: it is left out, and the fault is tried
again.
The time is that of the processors, so that a busy machine gives the same result; a run of pytest
that waits is ended after five times as long.

    python tools/mutants.py                    # all faults: about an hour
    python tools/mutants.py --only WORD        # those whose name or file has the word
    python tools/mutants.py --tree DIR         # in another checkout, as of an older commit
    python tools/mutants.py --jobs 2 --seconds 180 --out FILE.json
    python tools/mutants.py --check            # runs no tests: every fault changes what compiles

A fault is a [[fault]] with name, file, old, new and promise: old occurs exactly once in the file
and becomes new; promise is what a user loses, in a line. first, if given, is the test, or the file
of tests, that holds the promise, which is run before the others. A fault must change what the
documentation says, and must neither keep everything from starting nor wait for ever.

The interpreter that runs this tool runs the tests; the package that it imports is the copy.
"""

import argparse
import ast
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

from reach import Graph, read_graph

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
LAST_RESULT = Path(__file__).with_suffix(".json")
MARKER = "FSDP_TRAINER_MUTANT"
"""A variable in the environment of all processes of a run of pytest, by which they are ended."""
SESSION = uuid.uuid4().hex
"""Beginning of its values."""
WORDS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not faults and not gpu")
FIRST_FILES = 4
"""Test files of the first run of pytest; each further run has twice as many as the one before.
Collecting all of them first would take a third of the time."""
PATIENCE = 5.0
"""Seconds of a clock for each of the processors' seconds, at most."""
MOST_BROKEN = 3
"""Tests of a file that fail without a fault, after which the file is left out."""
NOTHING_SELECTED = 5
"""Exit code of pytest."""
NO_SUCH_TEST = 4
"""Its exit code if the test that noticed a fault last has another name now."""
NOTICED, IN_TIME, PASSED = "noticed", "time out", "all passed"
NOT_APPLIED = "not applied"
PYTEST_ENDS = "pytest ends with"
"""Beginning of what stands for the test, if the fault keeps pytest from running."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary."""


@dataclass(frozen=True)
class Fault:
    """A change that makes the package wrong. See the module's docstring."""

    name: str
    file: str
    old: str
    new: str
    promise: str
    first: str = ""

    def applied(self, text: str) -> str:
        """Return the faulty text. Raises ValueError if `old` does not occur exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass
class Result:
    """What became of a fault. test: the one that noticed it. seconds: until then, or in all."""

    fault: Fault
    outcome: str
    test: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class PytestEnd:
    """The end of a run of pytest. code: None if its time was over. test: that failed, or "".

    seconds: of the processors.
    """

    code: int | None
    test: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no test failed."""
        return self.code in (0, NOTHING_SELECTED)


@dataclass
class KnownTests:
    """What is known of tests that have failed. sound: pass without a fault. broken: do not."""

    sound: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def leave_out(self, test: str) -> None:
        """Leave a test out from now on, or its whole file after MOST_BROKEN of them."""
        file = test.partition("::")[0]
        self.broken.add(test)
        if sum(each.startswith(f"{file}::") for each in self.broken) >= MOST_BROKEN:
            test = file
            self.broken.add(file)
        print(f"{test} fails without a fault, and is left out", flush=True)


class TreeCopy:
    """A copy of a tree, in which one fault at a time is applied."""

    def __init__(self, tree: Path):
        self.home = Path(tempfile.mkdtemp(prefix="m"))  # short: tests have sockets below it
        self.root = self.home / "tree"
        for file in files_of(tree):
            target = self.root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / file, target, follow_symlinks=False)
        self._require_own_package()

    def _require_own_package(self) -> None:
        """Raise SystemExit if the interpreter would import another package than the copy's."""
        code = "import fsdp_trainer; print(fsdp_trainer.__file__)"
        words = [sys.executable, "-c", code]
        done = subprocess.run(
            words, cwd=self.home, env=self.environment(""), capture_output=True, text=True
        )
        if not done.stdout.startswith(str(self.root)):
            raise SystemExit(f"imported is {done.stdout.strip()}, not the copy\n{done.stderr}")

    def environment(self, marker: str) -> dict[str, str]:
        """Return the variables of a process that imports the copy."""
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, MARKER: marker, "TMPDIR": str(self.temporary)}

    @property
    def temporary(self) -> Path:
        """The folder for all that tests write."""
        folder = self.home / "t"
        folder.mkdir(exist_ok=True)
        return folder

    def write(self, file: str, text: str) -> None:
        """Write a source file, and forget how it was compiled.

        Python would not notice a change of equal length within a second.
        """
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Sequence[str], seconds: float, without: Sequence[str] = ()) -> PytestEnd:
        """Run pytest on these files, or tests, in this order. without: tests that are left out."""
        marker = f"{SESSION}/{uuid.uuid4().hex}"
        words = [sys.executable, "-m", "pytest", *WORDS, f"--basetemp={self.temporary}/b"]
        words += [f"--deselect={test}" for test in without]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*words, *tests], cwd=self.root, env=self.environment(marker),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            code, spent = wait_for(process, marker, seconds)
            end_processes(process, marker)
            output.seek(0)
            failed = FAILED.search(output.read())
        shutil.rmtree(self.temporary, ignore_errors=True)
        return PytestEnd(code, failed[1] if failed and code else "", spent)

    def remove(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.home, ignore_errors=True)


def wait_for(process: subprocess.Popen, marker: str, seconds: float) -> tuple[int | None, float]:
    """Return the exit code of a run of pytest, None if its time is over, and the time it took."""
    patience, spent = time.monotonic() + PATIENCE * seconds, 0.0
    while spent < seconds and time.monotonic() < patience:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1), spent
        spent = max(spent, processor_seconds(marker))
    return None, spent


def processor_seconds(marker: str) -> float:
    """Return the processors' time of all processes of a run, and of those they have waited for."""
    ticks = 0
    for pid in marked(marker):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def end_processes(process: subprocess.Popen, marker: str) -> None:
    """Kill a run of pytest with all processes below it, also those in sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_marked(marker)


def end_marked(beginning: str) -> None:
    """Kill all processes whose MARKER begins so."""
    while pids := marked(beginning):
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(beginning: str) -> list[int]:
    """Return the ids of all processes whose MARKER begins so."""
    entry = f"{MARKER}={beginning}".encode()
    return [pid for pid in running() if any(v.startswith(entry) for v in variables_of(pid))]


def running() -> list[int]:
    """Return the ids of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def variables_of(pid: int) -> list[bytes]:
    """Return the variables of a process's start; [] if it has ended or is another user's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def files_of(tree: Path) -> list[str]:
    """Return the files of a checkout that git knows or does not ignore."""
    words = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    return [file for file in listed if file and os.path.lexists(tree / file)]


def batches(files: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the files in their order, a few first and then more at a time; a test alone."""
    size = FIRST_FILES
    first = sum("::" in file for file in files)
    yield from ([test] for test in files[:first])
    while first < len(files):
        yield files[first : first + size]
        first, size = first + size, 2 * size


def try_fault(
    copy: TreeCopy, fault: Fault, tests: Sequence[str], seconds: float, known: KnownTests
) -> Result:
    """Return what the tests make of a fault; the copy is as before afterwards."""
    right = (copy.root / fault.file).read_text(encoding="utf-8")
    wrong = fault.applied(right)
    while True:
        copy.write(fault.file, wrong)
        try:
            result = first_failure(copy, fault, tests, seconds, known)
        finally:
            copy.write(fault.file, right)
        test = result.test
        if result.outcome != NOTICED or test in known.sound or test.startswith(PYTEST_ENDS):
            return result
        if passes(copy, test, seconds):
            known.sound.add(test)
            return result
        known.leave_out(test)


def passes(copy: TreeCopy, test: str, seconds: float) -> bool:
    """Return True if a test passes; of a file, if it can be collected."""
    return copy.run([test] if "::" in test else [test, "--collect-only"], seconds).passed


def first_failure(
    copy: TreeCopy, fault: Fault, tests: Sequence[str], seconds: float, known: KnownTests
) -> Result:
    """Return the result of the first test that fails, in the faulty copy."""
    spent = 0.0
    without = sorted(known.broken)
    for some in batches([test for test in tests if test not in without]):
        end = copy.run(some, seconds - spent, without) if spent < seconds else PytestEnd(None)
        spent += end.seconds
        if end.code is None:
            return Result(fault, IN_TIME, seconds=round(spent, 1))
        if not (end.passed or end.code == NO_SUCH_TEST):
            test = end.test or f"{PYTEST_ENDS} {end.code}"
            return Result(fault, NOTICED, test, round(spent, 1))
    return Result(fault, PASSED, seconds=round(spent, 1))


def try_all(tree: Path, faults: Sequence[Fault], words: argparse.Namespace) -> list[Result]:
    """Return the results of all faults, and write them to `words.out` after each."""
    graph = read_graph(tree)
    copies: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
    known, writing = KnownTests(), Lock()
    results: dict[str, Result] = {}

    def work(fault: Fault) -> None:
        if not can_apply(tree, fault):
            result = Result(fault, NOT_APPLIED)
        else:
            copy = copies.get()
            try:
                result = try_fault(copy, fault, reaching(graph, fault), words.seconds, known)
            finally:
                copies.put(copy)
        with writing:
            results[fault.name] = result
            print(line_of(result), flush=True)
            write(tree, [results[f.name] for f in faults if f.name in results], words)

    made = [TreeCopy(tree) for _ in range(words.jobs)]
    for copy in made:
        copies.put(copy)
    pool = ThreadPoolExecutor(words.jobs)
    try:
        list(pool.map(work, faults))
    except KeyboardInterrupt:
        end_marked(SESSION)
        remove(made)
        end_marked(SESSION)
        os._exit(130)  # the threads would begin further tests
    finally:
        pool.shutdown(cancel_futures=True)
        remove(made)
    return [results[fault.name] for fault in faults]


def remove(copies: Sequence[TreeCopy]) -> None:
    """Delete the copies."""
    for copy in copies:
        copy.remove()


def reaching(graph: Graph, fault: Fault) -> list[str]:
    """Return the test that noticed a fault last, what holds its promise, and files that reach it.

    Those in the folder that is named as the fault's room come first, then the nearest.
    """
    begin = [test for test in (last_noticed().get(fault.name), fault.first) if test]
    room = f"tests/{Path(fault.file).parts[1]}/"
    files = [choice.test for choice in graph.choose([fault.file])]
    ordered = sorted(files, key=lambda file: not file.startswith(room))
    return [*dict.fromkeys([*begin, *ordered])]


@cache
def last_noticed() -> dict[str, str]:
    """Return the tests of the committed result by their faults' names."""
    if not LAST_RESULT.exists():
        return {}
    rows = json.loads(LAST_RESULT.read_text(encoding="utf-8"))["faults"]
    return {row["fault"]: row["test"] for row in rows if "::" in row["test"]}


def can_apply(tree: Path, fault: Fault) -> bool:
    """Return True if a tree has the text that the fault changes."""
    file = tree / fault.file
    return file.exists() and file.read_text(encoding="utf-8").count(fault.old) == 1


def line_of(result: Result) -> str:
    """Return a row of the table."""
    return f"{result.fault.name:<52}{result.outcome:<13}{result.seconds:>6.0f} s  {result.test}"


def summary(results: Sequence[Result]) -> str:
    """Return the number of each outcome."""
    counts = Counter(result.outcome for result in results)
    tried = len(results) - counts[NOT_APPLIED]
    others = [f"{outcome}: {counts[outcome]}" for outcome in (IN_TIME, PASSED, NOT_APPLIED)]
    return ", ".join([f"noticed: {counts[NOTICED]} of {tried}", *others])


def write(tree: Path, results: Sequence[Result], words: argparse.Namespace) -> None:
    """Write the results as JSON, if that was asked for."""
    if words.out is None:
        return
    name = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    commit = subprocess.run(name, capture_output=True, text=True).stdout.strip()
    rows = [
        asdict(result.fault) | asdict(result) | {"fault": result.fault.name} for result in results
    ]
    about = {"commit": commit, "seconds": words.seconds, "sum": summary(results), "faults": rows}
    words.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


# --- the list


def read_faults(file: Path = LIST, word: str = "") -> list[Fault]:
    """Return the faults of a list whose name or file has the word."""
    listed = tomllib.loads(file.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**entry) for entry in listed]
    return [fault for fault in faults if word in fault.name or word in fault.file]


def problems(tree: Path, faults: Sequence[Fault]) -> list[str]:
    """Return a sentence for each fault that is none in a tree."""
    names = Counter(fault.name for fault in faults)
    twice = [
        f"{name}: there are {count} of this name" for name, count in names.items() if count > 1
    ]
    return twice + [text for fault in faults if (text := problem(tree, fault))]


def problem(tree: Path, fault: Fault) -> str:
    """Return what is wrong with a fault, or ""."""
    try:
        text = (tree / fault.file).read_text(encoding="utf-8")
        wrong = fault.applied(text)
        same = fault.file.endswith(".py") and ast.dump(ast.parse(wrong)) == ast.dump(
            ast.parse(text)
        )
    except (OSError, ValueError) as error:
        return str(error)
    except SyntaxError as error:
        return f"{fault.name}: {fault.file} does not compile: {error}"
    return f"{fault.name}: changes nothing that is computed" if same else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/mutants.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    tree = words.tree.resolve()
    faults = read_faults(word=words.only)
    if words.check:
        wrong = problems(tree, faults)
        print(*wrong, f"{len(faults)} faults, {len(wrong)} of them wrong", sep="\n")
        return int(bool(wrong))
    results = try_all(tree, faults, words)
    print("", *map(line_of, results), summary(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
