"""docs/architecture.md, "One training step": its files and its loop are those of a real run."""

import ast
import re
import sys
from pathlib import Path

import inject
import pytest
from world import read_json, write_json

import fsdp_trainer

PACKAGE = Path(fsdp_trainer.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SECTION = re.search(r"(?ms)^## One training step$(.*?)^## ", PAGE.read_text())[1]
LOOP = re.search(r"(?ms)^```python\n(.*?)^```$", SECTION)[1]
CALL = re.compile(r"#\s+(\S+\.py) (\S+)$")
"""The comment of a line of the loop: the file and the qualified name of the function called."""
CALLED_BY_PYTHON = {"__init__", "forward", "backward", "__call__", "next_micro_batch"}
"""Functions that the loop's text calls by another name: a module, an object, autograd, `for`."""


def files_listed():
    """Return the files in the first column of the section's table."""
    rows = re.findall(r"(?m)^\| (`.*?`) \|", SECTION)
    return [file for row in rows for file in re.findall(r"`([^`]+)`", row)]


def calls_shown():
    """Return file and qualified name of each function that the loop names, in the text's order."""
    return [match.groups() for line in LOOP.splitlines() if (match := CALL.search(line))]


def calls_in_code():
    """Return the name of each function that the loop's code calls, with its line's number."""
    calls = [node for node in ast.walk(ast.parse(LOOP)) if isinstance(node, ast.Call)]
    return [(getattr(c.func, "attr", None) or c.func.id, c.lineno) for c in calls]


@inject.fault
def recorded(calls_file):
    """Write file and qualified name of all functions of the package called from `build` on.

    A lambda counts as the function that made it.
    """
    calls = []

    def note(frame, event, _argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            function = frame.f_code.co_qualname.removesuffix(".<locals>.<lambda>")
            calls.append((path.relative_to(PACKAGE).as_posix(), function))

    def build(real, *parts):
        sys.setprofile(note)
        return real(*parts)

    with inject.around("build", build)():
        try:
            yield
        finally:
            sys.setprofile(None)
            write_json(calls_file, calls)


@pytest.fixture(scope="module")
def calls(world, inputs, tmp_path_factory):
    """All calls of a run of one step with one micro-batch, in order."""
    folder = tmp_path_factory.mktemp("one-step")
    step = "train.steps=1 batch.rows=1 batch.micro_rows=1 train.validate_first=false"
    data = [*(f"{key}={value}" for key, value in inputs.items()), "data.validation=0.2"]
    world.train(folder / "run", *data, step, seam=recorded(folder / "calls.json"))
    return [tuple(call) for call in read_json(folder / "calls.json")]


def test_a_step_passes_every_file_of_the_list(calls):
    passed = {file for file, _ in calls}
    assert [file for file in files_listed() if not (PACKAGE / file).is_file()] == []
    assert [file for file in files_listed() if file not in passed] == []


def test_the_loop_on_the_page_calls_what_a_run_calls_in_the_same_order(calls):
    following = iter(calls)
    for shown in calls_shown():
        assert shown in calls, f"{shown} is not called"
        assert shown in following, f"{shown} is not called after the one above it"


def test_every_call_on_the_page_names_its_function_and_every_file_is_in_the_list():
    lines = LOOP.splitlines()
    for name, number in calls_in_code():
        line = lines[number - 1]
        if line.endswith("# torch"):
            continue
        assert CALL.search(line), f"no file and function: {line}"
        function = CALL.search(line)[2].rpartition(".")[2]
        assert function in {name, *CALLED_BY_PYTHON}, line
    assert {file for file, _ in calls_shown()} <= set(files_listed())
