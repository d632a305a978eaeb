"""Find the test files that changed files can break, nearest first.

A test file reaches what it imports, what that imports, and so on, at any place in a file. Its
distance is 0 for itself, 1 for what it imports, and so on. What is only named in a text, such as
"fsdp_trainer.run.verb:train", and what the command line imports for a test that starts a whole
program, is AFTER further away. Of equally near test files those of the module's room come first,
then those of rooms that import it, then those whose names or folders have words of its name.

    python tools/reach.py FILE ...             # the test files that reach these files
    python tools/reach.py --since COMMIT       # that reach what has changed since, or is untracked
    python tools/reach.py --since COMMIT --run [WORDS]    # run them with pytest and these words
    python tools/reach.py --record [TEST FILES]           # record what really runs; see below

Which modules a program runs cannot be seen in imports. tests/reach.json says it if it is there:
{test file: [modules whose functions ran, without "fsdp_trainer."]}. --record runs each test file
that starts programs, or those that are named, in a pytest of its own, notes every function of the
package that is called in it and in the processes that it starts, and writes the file. It takes
hours; call it by hand. A module that the file does not name anywhere is guessed as without it.
"""

import argparse
import ast
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from measure import imported

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = "fsdp_trainer", "tests"
FOLDERS = (PACKAGE, "hydra_plugins", "benchmarks", "tools", TESTS)
"""Folders whose Python files are read."""
RECORD = "tests/reach.json"
CLI = f"{PACKAGE}/cli.py"
PROGRAMS = {CLI, *(f"{PACKAGE}/{name}.py" for name in ("api", "__main__", "__init__"))}
"""Files from which everything is reached, and which a test imports to start a program."""
FIXTURES = {"train", "world"}
"""Fixtures of tests/conftest.py that start programs."""
POOL = "world"
"""The helper of these fixtures."""
STARTS = re.compile(rf"""["']-m["'],\s*["']{PACKAGE}["']|-m {PACKAGE}\b|["'/]fsdp-trainer["']""")
"""How a test starts a program as a process."""
NAMED = re.compile(rf"{PACKAGE}(?:\.\w+)+")
AFTER = 3
"""What a start of a program, or a name in a text, adds to a distance."""
FAR = 99
"""Distance of a test file from a change that can change everything."""
EVERYTHING = {"pyproject.toml", "constraints.txt", "tests/conftest.py"}
CONFIGURATION = ("conf", "recipes")
OTHER_ROOMS = {"base": "training", "evaluation": "generation", "interop": "checkpoint"}
"""Rooms without a folder of tests, and the folder with most of their tests."""
AT_ONCE = 2
"""Test files that are recorded at a time."""
NOTE = """
import os, sys, threading

folder, package = os.environ["FSDP_TRAINER_TESTS_REACH"].split(os.pathsep)
unnamed = {"<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}
known = set()

def note(frame, event, argument):
    code = frame.f_code
    file = code.co_filename
    if event != "call" or file in known:
        return
    if file.startswith(package):
        # bodies of classes are not optimised; what runs while a file is imported does not count
        if not code.co_flags & 1 or code.co_name in unnamed:
            return
        try:
            with open(os.path.join(folder, str(os.getpid())), "a") as notes:
                notes.write(file + "\\n")
        except OSError:
            return
    known.add(file)

sys.setprofile(note)
threading.setprofile(note)
"""
"""A sitecustomize.py, which Python imports at the start of pytest and of every process below it.
Forked processes inherit it."""


class Choice(NamedTuple):
    """A test file, and the nearest change that it reaches."""

    test: str
    distance: int
    changed: str

    def __str__(self) -> str:
        how = {0: "is changed", 1: "imports or names it", FAR: "everything depends on it"}
        text = how.get(self.distance, f"{self.distance} steps away")
        return f"{self.changed} → {self.test}  ({text})"


class FileNames:
    """Finds the file of a module by its name, as Python does in the tests."""

    def __init__(self, files: Collection[str], folders: Sequence[str]):
        """folders: in which modules have bare names."""
        self.files, self.folders = set(files), ["", *folders]
        self.helpers = {
            PurePosixPath(file).stem: file for file in files if file.startswith(f"{TESTS}/")
        }

    def file(self, name: str, bare: bool = True) -> str | None:
        """Return the file of a module, None if it is not one of `files`. bare: see folders."""
        path = name.replace(".", "/")
        for folder in self.folders if bare else [""]:
            for end in (".py", "/__init__.py"):
                file = str(PurePosixPath(folder) / f"{path}{end}")
                if file in self.files:
                    return file
        return self.helpers.get(name) if bare else None

    def named(self, text: str) -> Iterator[str]:
        """Yield the files of the package's modules that a text names, maybe with a name inside."""
        for name in NAMED.findall(text):
            while "." in name:
                file = self.file(name, bare=False)
                if file:
                    yield file
                    break
                name = name.rpartition(".")[0]


@dataclass
class Graph:
    """The files of a tree, and what each imports.

    imports: by file, what it imports and how far away that is. texts: of the files of tests.
    recorded: the files whose functions ran, by test file.
    """

    imports: dict[str, dict[str, int]]
    texts: dict[str, str]
    recorded: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def tests(self) -> list[str]:
        """All test files."""
        return [file for file in self.texts if is_test(file)]

    @cached_property
    def importers(self) -> dict[str, list[tuple[str, int]]]:
        """The files that import a file, and how far away it is."""
        importers = defaultdict(list)
        for file, used in self.imports.items():
            for other, step in used.items():
                importers[other].append((file, step))
        return importers

    def distances(self, goals: Collection[str], with_programs: bool = True) -> dict[str, int]:
        """Return the distance of each file that reaches one of `goals`, whose own is 0.

        with_programs: False: without those that reach it only by starting a program.
        """
        shortest: dict[str, int] = {}
        queue = [(0, goal) for goal in sorted(goals)]
        while queue:
            distance, file = heapq.heappop(queue)
            if file in shortest:
                continue
            shortest[file] = distance
            if with_programs or distance == 0 or file not in PROGRAMS:
                for importer, step in self.importers.get(file, ()):
                    heapq.heappush(queue, (distance + step, importer))
        return shortest

    def tests_of(self, goals: Collection[str]) -> dict[str, int]:
        """Return the distance of each test file that reaches one of `goals`."""
        guessed = self.distances(goals)
        ran = set().union(*self.recorded.values())
        if not ran.issuperset(goals):
            return {test: guessed[test] for test in self.tests if test in guessed}
        certain = self.distances(goals, with_programs=False)
        reached = {}
        for test in self.tests:
            known = self.recorded.get(test)
            distance = (guessed if known is None else certain).get(test, FAR)
            if known and known.intersection(goals):
                distance = min(distance, 1 + AFTER)
            if distance < FAR:
                reached[test] = distance
        return reached

    def reached_by(self, file: str) -> dict[str, int]:
        """Return the distances of the test files that reach a changed file of any kind."""
        path = PurePosixPath(file)
        if file in EVERYTHING:
            return dict.fromkeys(self.tests, FAR)
        if path.name == "conftest.py":
            return dict.fromkeys(self.below(path.parent), 1)
        if path.parts[0] == "docs" or path.suffix == ".md":
            return {test: 1 for test in self.tests if test.endswith("/test_docs.py")}
        if path.parts[0] in CONFIGURATION:
            of_room = dict.fromkeys(self.below(PurePosixPath(TESTS, "config")), 2)
            return of_room | self.naming(words_for_configuration(path))
        if path.parts[0] == PACKAGE:
            return self.tests_of(self.modules_of(path))
        own = self.tests_of({file}) if file in self.imports else {}
        is_code = file in self.imports and path.parts[0] == TESTS
        return own if is_code else self.naming(names_of(path)) | own

    def modules_of(self, path: PurePosixPath) -> set[str]:
        """Return the modules that a file of the package stands for.

        They are those of its folder, or of the nearest one above, if it is no module or is gone,
        and for __init__.py.
        """
        if str(path) in self.imports and path.name != "__init__.py":
            return {str(path)}
        for folder in path.parents:
            modules = {file for file in self.imports if PurePosixPath(file).parent == folder}
            if modules:
                return modules
        return set()

    def below(self, folder: PurePosixPath) -> list[str]:
        """Return the test files in a folder and below it."""
        return [test for test in self.tests if test.startswith(f"{folder}/")]

    def naming(self, words: Sequence[str]) -> dict[str, int]:
        """Return the distances of test files that have one of these words, or whose helpers do."""
        pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words))
        files = {file for file, text in self.texts.items() if pattern.search(text)}
        return {test: 1 + distance for test, distance in self.tests_of(files).items()}

    def unlikeness(self, test: str, file: str) -> tuple[int, int]:
        """Return how far the rooms of both are from each other, and minus their common words.

        0: the same room, 1: that of a file which imports the changed one, 2: another one.
        """
        test_path, path = PurePosixPath(test), PurePosixPath(file)
        importers = {room_of(PurePosixPath(name)) for name, _ in self.importers.get(file, ())}
        near = [{room_of(path)}, importers]
        own = room_of(test_path)
        ranks = [
            rank
            for rank, rooms in enumerate(near)
            if own in rooms | {OTHER_ROOMS.get(room) for room in rooms}
        ]
        common = words_of(path) & (words_of(test_path) | {own.removesuffix("s")})
        return min(ranks, default=len(near)), -len(common)

    def choose(self, changed: Sequence[str]) -> list[Choice]:
        """Return the test files that reach any of these files, the nearest first.

        One of the same room with a common word counts as one that imports the changed file.
        """
        best: dict[str, tuple[tuple, Choice]] = {}
        for file in changed:
            for test, distance in self.reached_by(file).items():
                rooms, words = self.unlikeness(test, file)
                steps = min(distance, 1) if rooms == 0 and words < 0 else distance
                rank = steps, rooms, words, distance, test
                if test not in best or rank < best[test][0]:
                    best[test] = rank, Choice(test, distance, file)
        return [choice for _, choice in sorted(best.values())]


def read_graph(root: Path) -> Graph:
    """Return the graph of the files below `root`."""
    paths = {
        path.relative_to(root).as_posix(): path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    names = FileNames(paths, [*bare_folders(root), "tools"])
    texts = {file: path.read_text(encoding="utf-8") for file, path in paths.items()}
    imports = {file: imports_of(file, text, names) for file, text in texts.items()}
    if CLI in imports:  # Hydra finds these by itself
        plugins = (file for file in paths if file.startswith("hydra_plugins/"))
        imports[CLI] |= dict.fromkeys(plugins, 1 + AFTER)
    of_tests = {file: text for file, text in texts.items() if file.startswith(f"{TESTS}/")}
    return Graph(imports, of_tests, read_record(root))


def bare_folders(root: Path) -> list[str]:
    """Return the folders whose modules tests import by bare names."""
    file = root / "pyproject.toml"
    about = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    options = about.get("tool", {}).get("pytest", {}).get("ini_options", {})
    folders = options.get("pythonpath", [TESTS])
    return folders.split() if isinstance(folders, str) else folders


def imports_of(file: str, text: str, names: FileNames) -> dict[str, int]:
    """Return the files that a file imports, or reaches in other ways, and how far away each is."""
    tree = ast.parse(text)
    is_inside = file.startswith(f"{PACKAGE}/")
    modules = {name: names.file(name, bare=not is_inside) for name in imported(tree)}
    used = {other for content in texts_in(tree) for other in names.named(content)}
    if not is_inside and (STARTS.search(text) or uses_fixture(tree)):
        used |= {CLI, names.file(POOL) or CLI} & names.files
    reached = dict.fromkeys(used, 1 + AFTER)
    for name, other in modules.items():
        # `from package import module` does not need what lies in the package's own file
        if other and not (other.endswith("/__init__.py") and has_inner(name, modules)):
            reached[other] = 1 + AFTER if file in PROGRAMS else 1
    return {other: step for other, step in reached.items() if other != file}


def has_inner(name: str, modules: dict[str, str | None]) -> bool:
    """Return True if one of the modules lies in the package `name`."""
    return any(inner.startswith(f"{name}.") and file for inner, file in modules.items())


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a file, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def uses_fixture(tree: ast.AST) -> bool:
    """Return True if a test or a fixture asks for one of FIXTURES."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            is_called = node.name.startswith("test_") or "fixture" in decorators
            if is_called and FIXTURES & {argument.arg for argument in node.args.args}:
                return True
    return False


def is_test(file: str) -> bool:
    """Return True for a file that pytest collects."""
    return file.startswith(f"{TESTS}/") and PurePosixPath(file).name.startswith("test_")


def names_of(path: PurePosixPath) -> list[str]:
    """Return how tests may name a file; data of tests by a folder of it, too."""
    folders = path.parts[2:-1] if path.parts[0] == TESTS else ()
    return [str(path), path.name, *folders]


def words_for_configuration(path: PurePosixPath) -> list[str]:
    """Return how tests may name a file of conf/ or recipes/."""
    if path.parts[0] == "recipes":
        return [str(path), path.stem]
    group = "/".join(path.parts[1:-1])
    options = [f"{group}/{path.stem}", f"{group}={path.stem}"] if group else []
    return [str(path), *options]


def room_of(path: PurePosixPath) -> str:
    """Return the room of a file of the package or of a test; "" for files beside the rooms."""
    return path.parts[1] if len(path.parts) > 2 else ""


def words_of(path: PurePosixPath) -> set[str]:
    """Return the words of a file's name and of its folders below the room, as singulars."""
    text = "_".join([*path.parts[2:-1], path.stem])
    return {word.removesuffix("s") for word in text.split("_")} - {"test", ""}


# --- changes


def changed_since(root: Path, commit: str) -> list[str]:
    """Return the files that differ from a commit, and those that git does not know.

    Raises SystemExit if there is no such commit.
    """
    commands = (
        ["diff", "--name-only", "--no-renames", "-z", commit, "--"],
        [*("ls-files", "--others", "--exclude-standard", "-z")],
    )
    files: list[str] = []
    for words in commands:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        files += filter(None, done.stdout.split("\0"))
    return sorted(set(files))


def run(choices: Sequence[Choice], words: Sequence[str]) -> int:
    """Run the chosen test files with pytest; return its exit code, 0 if no test is selected."""
    files = [choice.test for choice in choices]
    code = subprocess.run([sys.executable, "-m", "pytest", *words, *files], cwd=ROOT).returncode
    return 0 if code == 5 else code


# --- the record


def read_record(root: Path) -> dict[str, set[str]]:
    """Return the files whose functions ran, by test file; {} without a record."""
    file = root / RECORD
    stored = json.loads(file.read_text()) if file.exists() else {}
    return {test: {file_of(module) for module in ran} for test, ran in stored.items()}


def file_of(module: str) -> str:
    return f"{PACKAGE}/{module.replace('.', '/')}.py"


def module_of(file: str) -> str:
    return file.removeprefix(f"{PACKAGE}/").removesuffix(".py").replace("/", ".")


def record(root: Path, tests: Sequence[str]) -> int:
    """Record what these test files run, and write it; return 1 if one of them failed.

    Of one that fails the older entry stays.
    """
    failed = False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for test, files in zip(tests, pool.map(partial(ran_in, root), tests), strict=True):
            failed |= files is None
            text = "failed" if files is None else f"runs functions of {len(files)} modules"
            print(f"{test} {text}", flush=True)
            if files is not None:
                write_record(root, read_record(root) | {test: files})
    return int(failed)


def ran_in(root: Path, test: str) -> set[str] | None:
    """Return the package's files whose functions run in a test file; None if it fails."""
    with tempfile.TemporaryDirectory() as home:
        notes, hook = Path(home, "notes"), Path(home, "hook")
        notes.mkdir()
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(NOTE)
        before = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(hook), before])),
            "FSDP_TRAINER_TESTS_REACH": f"{notes}{os.pathsep}{root / PACKAGE}{os.sep}",
        }
        words = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not faults", test]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=root, env=env, capture_output=True
        )
        if done.returncode not in (0, 5):
            return None
        lines = {line for file in notes.iterdir() for line in file.read_text().splitlines()}
    return {Path(line).relative_to(root).as_posix() for line in lines}


def write_record(root: Path, ran: dict[str, set[str]]) -> None:
    """Write the record with a line for each test file that exists."""
    lines = [
        f" {json.dumps(test)}: {json.dumps(sorted(map(module_of, files)))}"
        for test, files in sorted(ran.items())
        if (root / test).exists()
    ]
    (root / RECORD).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def starting_programs(graph: Graph) -> list[str]:
    """Return the test files that start programs."""
    distances = graph.distances({CLI})
    return [test for test in graph.tests if test in distances]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/reach.py", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="changed files, or test files to record")
    parser.add_argument("--since", metavar="COMMIT", help="the files that have changed since")
    parser.add_argument("--record", action="store_true", help="write tests/reach.json")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="run them, with pytest's words")
    words = parser.parse_args()
    graph = read_graph(ROOT)
    files = [Path(file).resolve().relative_to(ROOT).as_posix() for file in words.files]
    if words.record:
        return record(ROOT, files or starting_programs(graph))
    changed = files + (changed_since(ROOT, words.since) if words.since else [])
    choices = graph.choose(changed)
    if not choices:
        print(f"no test file reaches any of {len(changed)} changed files")
        return 0
    print(*choices, sep="\n", flush=True)
    return 0 if words.run is None else run(choices, words.run)


if __name__ == "__main__":
    sys.exit(main())
