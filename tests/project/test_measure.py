"""The measure of how much there is to read, and the limits that `make lint` holds."""

import sys

import pytest
from folders import REPO

sys.path.insert(0, str(REPO / "tools"))

from measure import broken_limits, exceeded, measure, of_folders

LONG = "def long(x):\n" + "".join(f"    if x == {n}:\n        return {n}\n" for n in range(11))


@pytest.fixture
def problems(tmp_path):
    """Return the limits that a package of these files breaks."""

    def write_and_measure(files, reasons=None):
        package = tmp_path / "package"
        package.mkdir()
        for name, text in files.items():
            (package / name).write_text(text)
        return broken_limits(measure(package), reasons or {})

    return write_and_measure


def test_a_package_within_the_limits_has_no_problem(problems):
    assert problems({"a.py": "from package import b\n", "b.py": "class B: ...\n"}) == []


def test_a_circle_of_imports_is_a_problem(problems):
    [circle] = problems(
        {"a.py": "from package import b\n", "b.py": "def f():\n    from package.a import g\n"}
    )
    assert "package.a" in circle
    assert "package.b" in circle


def test_a_class_name_that_exists_twice_is_a_problem(problems):
    [twice] = problems({"a.py": "class Page: ...\n", "b.py": "class Page: ...\n"})
    assert twice == "class Page exists 2 times: a.py, b.py"


def test_a_long_function_is_a_problem_unless_it_has_a_reason(problems):
    [long] = problems({"a.py": LONG})
    assert "a.py:long has 11 branches" in long


def test_a_long_function_with_a_reason_is_none(problems):
    assert problems({"a.py": LONG}, {"a.py:long": "a table"}) == []


def test_a_reason_for_a_function_that_is_not_long_is_a_problem(problems):
    [stale] = problems({"a.py": "def long(): ...\n"}, {"a.py:long": "a table"})
    assert "remove it" in stale


def test_a_folder_beside_the_package_is_one_room_whose_columns_have_limits(tmp_path):
    (tmp_path / "tests" / "data").mkdir(parents=True)
    (tmp_path / "tests" / "a.py").write_text("told = 1\n")
    (tmp_path / "tests" / "data" / "b.py").write_text('"""Of two."""\nkept = made = 2\n')
    rooms = measure(tmp_path / "tests", "tests").rooms
    limits = {("tests", "vague"): 2, ("tests", "unclear"): 1, ("tests", "tokens"): 99}
    assert exceeded(rooms, limits) == ["vague of tests is 3, of 2 allowed"]


def test_places_where_a_concept_lacks_an_owner_are_counted(tmp_path):
    package = tmp_path / "package"
    for folder in ("a", "b", "config"):
        (package / folder).mkdir(parents=True)
    whole = "def f(cfg: TrainConfig, *, other: int): ...\n"
    (package / "config" / "c.py").write_text(whole)
    (package / "a" / "c.py").write_text(f"{whole}if cfg.objective.name == 'dpo': ...\n")
    (package / "a" / "verb.py").write_text("def g():\n" + "    pass\n" * 81)
    (package / "b" / "verb.py").write_text(
        "def h(self, ctx, part):\n"
        "    mine = Thing()\n    mine.a = self.b = ctx.c = 1\n"
        "    part.x = 1\n    self.part.y += 1\n"
    )
    figures = measure(package)
    places = {column: figures.places[column] for column in ("whole", "method", "foreign", "tall")}
    assert places == {
        "whole": ["a/c.py:1 f"],
        "method": ["a/c.py:1 "],
        "foreign": ["b/verb.py:4 part.x", "b/verb.py:5 self.part.y"],
        "tall": ["a/verb.py:1 g: 82 lines"],
    }
    assert of_folders(package) == {"files in a folder": 2, "names twice": 1}
