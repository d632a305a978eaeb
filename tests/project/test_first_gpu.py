"""The first run on a GPU: every step is tried, and every result is in the file."""

import json
import re

import pytest
from folders import REPO

from benchmarks.first_gpu import (
    GPU_TESTS,
    MACHINE_SECONDS,
    TESTS,
    TRAIN,
    Command,
    Step,
    run_steps,
    steps,
)
from fsdp_trainer.config.composing.compose import compose


def python(text: str, **expected) -> Command:
    return Command(("-c", text), **expected)


def wrong_figures(_folder):
    raise AssertionError("losses differ")


@pytest.mark.slow
def test_all_steps_are_run_and_every_result_is_in_the_file(tmp_path, capsys):
    path = tmp_path / "results" / "first-gpu.json"
    look_into_file = f"import json; print(json.load(open({str(path)!r}))['steps'][-1])"
    table = [
        Step("fails", 60, (python("print('why'); raise SystemExit(3)"), python("print('next')"))),
        Step("takes too long", 1, (python("import time; time.sleep(600)"), python("print(1)"))),
        Step("is refused as it should", 60, (python("exit('too large')", code=1, says="large"),)),
        Step("wrong", 60, (python("pass"),), figures=wrong_figures),
        Step("passes", 60, (python(look_into_file),), figures=lambda folder: {"here": 1}),
    ]
    assert not run_steps(table, tmp_path, {"date": "today"}, path)
    written = json.loads(path.read_text())
    assert written["date"] == "today"
    states = [step["state"] for step in written["steps"]]
    assert states == ["failed", "out of time", "passed", "failed", "passed"]
    assert written["summary"] == {"failed": 2, "out of time": 1, "passed": 2}
    said = [[(c["exit_code"], c["output"]) for c in step["commands"]] for step in written["steps"]]
    running = "{'name': 'passes', 'state': 'running'}\n"
    assert said == [
        [(3, "why\n"), (0, "next\n")], [(None, "")], [(1, "too large\n")], [(0, "")],
        [(0, running)],
    ]  # fmt: skip
    assert written["steps"][3]["commands"][0]["passed"]
    assert "losses differ" in written["steps"][3]["figures"]
    assert written["steps"][4]["figures"] == {"here": 1}
    out = capsys.readouterr().out
    assert "2 of 5 passed" in out
    assert "raise SystemExit(3)\nwhy\n" in out
    assert run_steps(table[4:], tmp_path, {}, path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_steps_take_25_minutes_at_most_and_their_configurations_compose(device, tmp_path):
    table = steps(device, tmp_path)
    assert sum(step.limit for step in table) + MACHINE_SECONDS <= 25 * 60
    words = [command.words[2:] for step in table for command in step.commands
             if command.words[:2] == TRAIN]  # fmt: skip
    assert len(words) == 8
    for verb, *overrides in words:
        if "=" in verb:
            verb, overrides = "train", [verb, *overrides]
        compose(verb, overrides, inputs=False)


def test_every_test_for_a_gpu_is_in_one_of_the_steps(tmp_path):
    chosen = []
    for step in steps("cuda", tmp_path):
        for command in step.commands:
            if command.words[: len(TESTS)] == TESTS:
                expression, *files = command.words[len(TESTS) + 1 :]
                names = [name for file in files for name in names_in(file)]
                chosen.append([name for name in names if is_chosen(name, expression)])
    assert all(chosen), "a filter chooses nothing"
    ours = [name for part in chosen for name in part if name in names_in(GPU_TESTS[0])]
    assert sorted(ours) == sorted(names_in(GPU_TESTS[0]))


def names_in(file: str) -> list[str]:
    """The names of a file's tests."""
    return re.findall(r"(?m)^def (test_\w+)", (REPO / file).read_text())


def is_chosen(name: str, expression: str) -> bool:
    """True if pytest's -k chooses a test of this name."""

    def holds(word: re.Match[str]) -> str:
        return word[0] if word[0] in ("and", "or", "not") else str(word[0] in name)

    return eval(re.sub(r"\w+", holds, expression))
