"""The list of faults that show how much the tests notice, and the tool that tries them."""

import sys
from types import SimpleNamespace

import pytest
from folders import REPO

sys.path.insert(0, str(REPO / "tools"))

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
        text = (self.root / "a.py").read_text()
        self.runs.append(
            SimpleNamespace(tests=[*tests], without=[*without], is_right=text == RIGHT)
        )
        return self.answer(self.runs[-1])


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


def test_a_text_that_is_there_twice_or_not_at_all_is_no_fault(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 0\nx = 1\n")
    twice, never = problems(tmp_path, [fault(name="one"), fault(name="other", old="z")])
    assert twice == "one: its text occurs 2 times in a.py"
    assert never == "other: its text occurs 0 times in a.py"


@pytest.mark.parametrize(
    ("new", "reason"), [("x = 1 # as before", "changes nothing"), ("x = =", "does not compile")]
)
def test_a_change_of_comments_and_one_that_does_not_compile_are_no_faults(tmp_path, new, reason):
    (tmp_path / "a.py").write_text(RIGHT)
    [problem] = problems(tmp_path, [fault(new=new)])
    assert reason in problem


def test_two_faults_of_one_name_are_a_problem(tmp_path):
    (tmp_path / "a.py").write_text(RIGHT)
    assert problems(tmp_path, [fault(), fault()]) == ["n: there are 2 of this name"]


def test_files_are_run_in_their_order_and_more_at_a_time():
    files = [f"test_{i}.py" for i in range(15)]
    parts = list(batches(files))
    assert [len(part) for part in parts] == [4, 8, 3]
    assert [file for part in parts for file in part] == files


def test_a_test_that_fails_with_the_fault_alone_notices_it(tried):
    def answer(run):
        return PytestEnd(0) if run.is_right else PytestEnd(1, "test_a.py::test_x")

    result, copy = tried(answer)
    assert (result.outcome, result.test) == (NOTICED, "test_a.py::test_x")
    assert [run.is_right for run in copy.runs] == [False, True]


def test_a_test_that_fails_without_the_fault_is_left_out(tried):
    def answer(run):
        return PytestEnd(0) if run.without else PytestEnd(1, "test_a.py::test_x")

    result, copy = tried(answer)
    assert result.outcome == PASSED
    assert copy.runs[-1].without == ["test_a.py::test_x"]


def test_a_file_of_which_several_tests_fail_without_the_fault_is_left_out(tried):
    def answer(run):
        number = len(run.without)
        return (
            PytestEnd(1, f"test_a.py::test_{number}")
            if run.tests != ["test_b.py"]
            else PytestEnd(0)
        )

    result, copy = tried(answer, ["test_a.py", "test_b.py"])
    assert result.outcome == PASSED
    assert len(copy.runs[-1].without) == MOST_BROKEN + 1


def test_a_file_that_cannot_be_collected_without_the_fault_is_left_out(tried):
    def answer(run):
        return PytestEnd(2, "test_a.py") if "test_a.py" in run.tests else PytestEnd(0)

    result, copy = tried(answer, ["test_a.py", "test_b.py"])
    assert result.outcome == PASSED
    assert copy.runs[-1].tests == ["test_b.py"]


def test_tests_that_take_too_long_do_not_notice_a_fault(tried):
    result, _ = tried(lambda run: PytestEnd(None))
    assert result.outcome == IN_TIME
