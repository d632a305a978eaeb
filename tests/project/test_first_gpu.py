"""The first run on a GPU: every step is tried, and every result is in the file."""

import re

import pytest
from folders import REPO
from world import read_json

from benchmarks.first_gpu import (
    GPU_TESTS,
    MACHINE_SECONDS,
    TRAIN,
    Command,
    Step,
    run_steps,
    steps,
)
from benchmarks.step_budget import predictions, table
from benchmarks.two_ranks import CASES, COMMON
from fsdp_trainer.config.composing.compose import compose


def python(text, **expected):
    return Command(("-c", text), **expected)


def wrong_figures(_folder):
    raise AssertionError("losses differ")


def test_all_steps_are_run_and_every_result_is_in_the_file(tmp_path, capsys):
    path = tmp_path / "results/first-gpu.json"
    look_into_file = f"import json; print(json.load(open({str(path)!r}))['steps'][-1])"
    table = [
        Step("fails", 60, (python("print('why'); raise SystemExit(3)"), python("print('next')"))),
        Step("takes too long", 1, (python("import time; time.sleep(600)"), python("print(1)"))),
        Step("is refused as it should", 60, (python("exit('too large')", code=1, says="large"),)),
        Step("wrong", 60, (python("pass"),), figures=wrong_figures),
        Step("passes", 60, (python(look_into_file),), figures=lambda folder: {"here": 1}),
    ]
    assert not run_steps(table, tmp_path, {"date": "today"}, path)
    written = read_json(path)
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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_part_takes_five_minutes_at_most_and_its_configurations_compose(device, tmp_path):
    for part in steps(device, tmp_path).values():
        assert sum(step.limit for step in part) + MACHINE_SECONDS <= 5 * 60
        for command in (each for step in part for each in step.commands):
            if command.words[:2] == TRAIN:
                verb, *overrides = command.words[2:]
                if "=" in verb:
                    verb, overrides = "train", [verb, *overrides]
                compose(verb, overrides, inputs=False)
    for case in CASES.values():
        compose("train", [*COMMON.split(), *case.model.split(), *case.words.split()], inputs=False)


def test_every_test_for_a_gpu_is_run():
    files = {
        str(path.relative_to(REPO))
        for path in (REPO / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text())
    }
    assert files <= {*GPU_TESTS}


def test_the_budget_of_a_step_in_the_docs_is_what_the_program_computes():
    assert table() in (REPO / "docs/performance.md").read_text()
    [measured] = re.findall(r"measured: .*", table())
    assert "25,825 (44%)" in measured
    assert predictions()["H100, one row"]["tokens_per_second"] == pytest.approx(25_825, rel=0.02)
