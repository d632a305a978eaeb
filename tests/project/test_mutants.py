"""The list of faults that show how much the tests notice, and the tool that tries them."""

import sys
from types import SimpleNamespace

import pytest
from folders import REPO

sys.path.insert(0, f"{REPO}/tools")

from mutants import (
    IN_TIME,
    MOST_BROKEN,
    NOTICED,
    PASSED,
    Fault,
    KnownTests,
    PytestEnd,
    batches,
    problems,
    read_faults,
    try_fault,
)

RIGHT, WRONG = "x = 1\n", "x = 2\n"


def fault(**parts):
    usual = {"name": "n", "file": "a.py", "old": "x = 1", "new": "x = 2", "promise": "p"}
    return Fault(**usual | parts)


class CopyWithAnswers:
    """A copy of a tree in which pytest ends as a function of the file's text says."""

    def __init__(self, root, answer):
        self.root, self.answer = root, answer
        self.runs = []
        self.write("a.py", RIGHT)

    def write(self, file, text):
        (self.root / file).write_text(text)

    def run(self, tests, seconds, without=()):
        is_right = (self.root / "a.py").read_text() == RIGHT
        run = SimpleNamespace(tests=[*tests], without=[*without], is_right=is_right)
        self.runs.append(run)
        return self.answer(run)


@pytest.fixture
def tried(tmp_path):
    """Return `tried(answer, tests)`: the result for a fault, and the copy that it was tried in."""

    def try_with(answer, tests=("test_a.py",)):
        copy = CopyWithAnswers(tmp_path, answer)
        result = try_fault(copy, fault(), tests, 60.0, KnownTests())
        assert (tmp_path / "a.py").read_text() == RIGHT
        return result, copy

    return try_with


def test_every_fault_of_the_list_changes_what_the_package_computes():
    assert problems(REPO, read_faults()) == []


OTHER = fault(name="other", old="z")
NO_FAULTS = [
    ([fault()], "x = 1\ny = 0\nx = 1\n", "n: its text occurs 2 times in a.py"),
    ([OTHER], RIGHT, "other: its text occurs 0 times in a.py"),
    ([fault(), fault()], RIGHT, "n: there are 2 of this name"),
    ([fault(new="x = 1 # as before")], RIGHT, "changes nothing"),
    ([fault(new="x = =")], RIGHT, "does not compile"),
]


@pytest.mark.parametrize("faults, text, said", NO_FAULTS)
def test_what_changes_nothing_or_does_not_compile_is_no_fault(tmp_path, faults, text, said):
    (tmp_path / "a.py").write_text(text)
    [problem] = problems(tmp_path, faults)
    assert said in problem


def test_files_are_run_in_their_order_and_more_at_a_time():
    files = [f"test_{i}.py" for i in range(15)]
    parts = list(batches(files))
    assert [len(part) for part in parts] == [4, 8, 3]
    assert [file for part in parts for file in part] == files


FAILED, BOTH = PytestEnd(1, "test_a.py::test_x"), ["test_a.py", "test_b.py"]


def test_a_test_that_fails_with_the_fault_alone_notices_it(tried):
    result, copy = tried(lambda run: PytestEnd(0) if run.is_right else FAILED)
    assert (result.outcome, result.test) == (NOTICED, "test_a.py::test_x")
    assert [run.is_right for run in copy.runs] == [False, True]
    assert tried(lambda run: PytestEnd(None))[0].outcome == IN_TIME, "nothing is noticed"


def test_what_fails_without_the_fault_is_left_out(tried):
    """A test; a file, of which several fail or which cannot be collected."""
    result, copy = tried(lambda run: PytestEnd(0) if run.without else FAILED)
    assert (result.outcome, copy.runs[-1].without) == (PASSED, ["test_a.py::test_x"])

    def failing_one_by_one(run):
        failed = PytestEnd(1, f"test_a.py::test_{len(run.without)}")
        return PytestEnd(0) if run.tests == BOTH[1:] else failed

    result, copy = tried(failing_one_by_one, BOTH)
    assert (result.outcome, len(copy.runs[-1].without)) == (PASSED, MOST_BROKEN + 1)
    broken = PytestEnd(2, "test_a.py")
    result, copy = tried(lambda run: broken if "test_a.py" in run.tests else PytestEnd(0), BOTH)
    assert (result.outcome, copy.runs[-1].tests) == (PASSED, BOTH[1:])


def test_a_test_that_has_another_name_now_notices_nothing(tried):
    """The one that noticed a fault last is run alone, before the files."""
    gone = "test_a.py::test_before"

    def answer(run):
        return PytestEnd(4 if gone in run.tests else 0)

    result, copy = tried(answer, [gone, *BOTH])
    assert (result.outcome, [run.tests for run in copy.runs]) == (PASSED, [[gone], BOTH])
