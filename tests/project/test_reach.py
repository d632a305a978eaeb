"""Which test files a change can break: tools/reach.py in small trees."""

import subprocess
import sys

import pytest
from folders import REPO, table

sys.path.insert(0, f"{REPO}/tools")

from reach import AFTER, FAR, changed_since, read_graph, starting_programs, write_record

CASES = table("project/reach_tree.yaml")

FILES = CASES["files"]


@pytest.fixture
def tree(tmp_path):
    write(tmp_path, FILES)
    return tmp_path


def write(tree, files):
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def reached(tree, *changed):
    return {choice.test: choice.distance for choice in read_graph(tree).choose(changed)}


def test_imports_count_at_any_place_and_programs_come_after_them(tree):
    through_cli = 1 + AFTER + 1 + AFTER + 1  # test → command line → verb in a text → module
    assert reached(tree, "fsdp_trainer/optim/adam.py") == {
        "tests/optim/test_adam.py": 1,
        "tests/plan/test_start.py": through_cli,
        "tests/plan/test_step.py": through_cli,
    }
    assert reached(tree, "fsdp_trainer/optim/moments.py")["tests/optim/test_adam.py"] == 2
    # of equally near tests those of the room come first
    names = ["tests/optim/test_adam.py", "tests/optim/test_other.py", "tests/config/test_adam.py"]
    write(tree, dict.fromkeys(names[1:], "import fsdp_trainer.optim.adam\n"))
    chosen = read_graph(tree).choose(["fsdp_trainer/optim/adam.py"])
    assert [choice.test for choice in chosen][:3] == names


@pytest.mark.parametrize("changed, tests", CASES["changes"])
def test_changes_beside_the_package(tree, changed, tests):
    assert reached(tree, changed) == tests


def test_a_change_of_the_project_reaches_all_tests_from_afar(tree):
    far = dict.fromkeys((name for name in FILES if "/test_" in name), FAR)
    assert reached(tree, "pyproject.toml") == far


def test_what_is_no_module_reaches_the_tests_of_its_folder(tree):
    for gone in ("fsdp_trainer/optim/page.js", "fsdp_trainer/optim/gone.py"):
        assert reached(tree, gone)["tests/optim/test_adam.py"] == 1


def test_a_record_takes_the_place_of_the_guess(tree):
    run = "fsdp_trainer/optim/adam.py"
    write_record(tree, {"tests/plan/test_step.py": {run}, "tests/plan/test_start.py": set()})
    assert reached(tree, run) == {
        "tests/optim/test_adam.py": 1,
        "tests/plan/test_step.py": 1 + AFTER,
    }
    assert "tests/plan/test_start.py" in reached(tree, "fsdp_trainer/run/verb.py")  # in no record


def test_test_files_that_start_programs_are_known(tree):
    starting = ["tests/plan/test_start.py", "tests/plan/test_step.py"]
    assert starting_programs(read_graph(tree)) == starting


def test_changed_are_files_of_later_commits_of_the_folder_and_unknown_ones(tree):
    def git(line):
        words = f"git -c user.name=a -c user.email=a@b {line}"
        subprocess.run(words, cwd=tree, shell=True, check=True, capture_output=True)

    git("init")
    git("add --all")
    git("commit -m first")
    write(tree, {"README.md": "new"})
    git("add --all")
    git("commit -m second")
    write(tree, {"pyproject.toml": "", "unknown.txt": ""})
    assert changed_since(tree, "HEAD~1") == ["README.md", "pyproject.toml", "unknown.txt"]
    with pytest.raises(SystemExit):
        changed_since(tree, "no-such-commit")
