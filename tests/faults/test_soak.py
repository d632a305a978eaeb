"""Episodes of soak.py: a disturbed run ends as an undisturbed one, and what differs is found."""

import copy
import sys

import pytest
from folders import REPO

sys.path.insert(0, str(REPO / "tools"))

from soak import Soak, differences
from soak_faults import read_safely

WHOLE = {
    "metrics": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}],
    "files": {"hf/model.safetensors": "a1"},
    "checkpoints": ["step-00000002", "step-00000006", "step-00000008"],
    "best": "step-00000002",
    "end": ["end", 0],
}


@pytest.mark.faults
def test_a_run_with_faults_between_and_inside_its_starts_ends_as_an_undisturbed_one(tmp_path):
    soak = Soak(tmp_path / "soak")
    soak.prepare()
    for number in (219, 234):  # starts, damage, another layout
        episode = soak.episode(number)
        assert episode.problems == [], episode.line()
        assert episode.faults


CHANGES = [
    (lambda run: run["metrics"].append(run["metrics"][-1]), None),
    (lambda run: run["metrics"].pop(), 0.1),
    (lambda run: run["metrics"][1].update(loss=1.5000001), None),
    (lambda run: run["metrics"][1].update(loss=1.6), 0.01),
    (lambda run: run["files"].update({"hf/model.safetensors": "b2"}), None),
    (lambda run: run["files"].clear(), 0.1),
    (lambda run: run["checkpoints"].insert(1, "step-00000003"), None),
    (lambda run: run["checkpoints"].insert(2, "step-00000007"), None),
    (lambda run: run["checkpoints"].remove("step-00000006"), None),
    (lambda run: run["checkpoints"].remove("step-00000002"), None),
    (lambda run: run.update(best="step-00000006"), None),
    (lambda run: run.update(end=["end", 1]), None),
]


def test_any_difference_from_the_undisturbed_run_is_found():
    for change, tolerance in CHANGES:
        run = copy.deepcopy(WHOLE)
        assert differences(WHOLE, run, tolerance) == []
        change(run)
        assert differences(WHOLE, run, tolerance)


def test_a_checkpoint_of_a_stop_counts_among_the_newest_that_stay():
    run = WHOLE | {"checkpoints": ["step-00000002", "step-00000007", "step-00000008"]}
    assert differences(WHOLE, run, None) == []


def test_the_steps_on_record_before_a_torn_line_count(tmp_path):
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [line["step"] for line in read_safely(record)] == [1]
