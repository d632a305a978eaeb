"""The measure of how much there is to read, and the limits that `make lint` holds."""

import pytest

from tools.measure import broken_limits, exceeded, measure, of_folders

LONG = "def long(x):\n" + "".join(f"    if x == {n}:\n        return {n}\n" for n in range(11))
REASON = {"a.py:long": "a table"}
PAGE = "class Page: ...\n"
IN_A_FUNCTION = "def f():\n    from package.a import g\n"
PACKAGES = {
    "within the limits": (["from package import b\n", PAGE], {}, []),
    "a circle": (["from package import b\n", IN_A_FUNCTION], {}, ["package.a", "package.b"]),
    "a class twice": ([PAGE, PAGE], {}, ["class Page exists 2 times: a.py, b.py"]),
    "a long function": ([LONG, ""], {}, ["a.py:long has 11 branches"]),
    "a long function with a reason": ([LONG, ""], REASON, []),
    "a reason for one that is not long": (["def long(): ...\n", ""], REASON, ["remove it"]),
}


def tree(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("texts, reasons, said", PACKAGES.values(), ids=PACKAGES)
def test_what_breaks_a_limit_is_a_problem(tmp_path, texts, reasons, said):
    package = tree(tmp_path / "package", dict(zip(("a.py", "b.py"), texts, strict=True)))
    problems = broken_limits(measure(package), reasons)
    assert len(problems) == bool(said)
    assert [text for text in said if text not in problems[0]] == []


def test_a_folder_beside_the_package_is_one_room_whose_columns_have_limits(tmp_path):
    files = {"a.py": "told = 1\n", "data/b.py": '"""Of two."""\nkept = made = 2\n'}
    rooms = measure(tree(tmp_path / "tests", files), "tests").rooms
    limits = {("tests", "vague"): 2, ("tests", "unclear"): 1, ("tests", "tokens"): 99}
    assert exceeded(rooms, limits) == ["vague of tests is 3, of 2 allowed"]


COUNTED = ("whole", "method", "optimizer", "foreign", "tall")


def test_places_where_a_concept_lacks_an_owner_are_counted(tmp_path):
    whole = "def f(cfg: TrainConfig, *, other: int): ...\n"
    files = {
        "config/c.py": whole,
        "a/c.py": f"{whole}if cfg.objective.name == 'dpo': ...\n",
        "a/d.py": "if cfg.optim.name != 'sgd': ...\n",
        "optim/d.py": "if cfg.optim.name != 'sgd': ...\n",
        "a/verb.py": "def g():\n" + "    pass\n" * 81,
        "b/verb.py": "def h(self, ctx, part):\n"
        "    mine = Thing()\n    mine.a = self.b = ctx.c = 1\n"
        "    part.x = 1\n    self.part.y += 1\n",
    }
    package = tree(tmp_path / "package", files)
    figures = measure(package)
    places = {column: figures.places[column] for column in COUNTED}
    assert places == {
        "whole": ["a/c.py:1 f"],
        "method": ["a/c.py:1 "],
        "optimizer": ["a/d.py:1 "],
        "foreign": ["b/verb.py:4 part.x", "b/verb.py:5 self.part.y"],
        "tall": ["a/verb.py:1 g: 82 lines"],
    }
    assert of_folders(package) == {"files in a folder": 3}
