"""Rollouts that are begun some steps before the one that learns from them."""

import functools
import json
import signal

import inject
import pytest
from stored import assert_bitwise_equal, newest, stored

from fsdp_trainer.cli import main

GRPO = [
    "objective=grpo", 'objective.rewards=[{name: regex, pattern: "[a-z]"}]', "data.path=demo:sums",
    "tokenizer.path=demo:bytes", "objective.max_new_tokens=6", "objective.samples=4",
    "batch.rows=4", "batch.micro_rows=2", "schedule=constant", "optim.lr=0.01",
    "train.steps=6", "checkpoint.every=1", "checkpoint.keep=9",
]  # fmt: skip
TERM = functools.partial(inject.send, signal.SIGTERM)
PARTS = ["objective.ahead=3", "objective.round_tokens=2"]


def said(run):
    lines = (run.folder / "samples.jsonl").read_text().splitlines()
    return [(line["step"], line["text"], line["reward"]) for line in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "staleness"),
    [
        (["objective.ahead=1"], [0, 1, 1, 1, 1, 1]),
        (["objective.ahead=3"], [0, 1, 2, 3, 3, 3]),
        (["objective.ahead=2", "objective.updates=2"], [0, 1, 2, 3, 2, 3]),
    ],
)
@pytest.mark.grid(1)
def test_rollouts_are_of_the_weights_of_so_many_steps_before(world, tmp_path, keys, staleness):
    keys = [*GRPO, f"data.cache={tmp_path}", *keys]
    run = world.train(tmp_path / "run", *keys, ranks=2)
    assert run.column("staleness") == staleness
    assert run.column("staleness_max") == staleness
    differences = run.column("sampler_difference")
    assert differences[0] < 1e-5 < min(differences[1:]), "older weights give other probabilities"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keys", [["objective.ahead=1"], PARTS])
@pytest.mark.grid(1)
def test_a_run_that_was_stopped_with_open_rollouts_goes_on_exactly(world, tmp_path, ranks, keys):
    keys = [*GRPO, f"data.cache={tmp_path}", *keys]
    whole = world.train(tmp_path / "whole", *keys, ranks=ranks)
    at = {
        "in a step": inject.at("backward", TERM, rank=0, step=3, nth=1),
        "in a round": inject.at("rollouts", TERM, rank=0, step=4, nth=1),
    }
    for name, seam in at.items():
        stopped = world.train(tmp_path / name, *keys, ranks=ranks, seam=seam, code=75)
        assert json.loads((newest(stopped) / "trainer.json").read_text())["rollouts"]
        run = world.train(tmp_path / name, *keys, ranks=ranks)
        for column in ("reward", "loss", "grad_norm", "staleness"):
            assert run.column(column) == whole.column(column), (name, column)
        assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@pytest.mark.slow
@pytest.mark.further
def test_newer_weights_go_on_with_rollouts_on_any_ranks(world, tmp_path):
    keys = [*GRPO, f"data.cache={tmp_path}", *PARTS]
    whole = world.train(tmp_path / "whole", *keys)
    middle = whole.folder / "checkpoints" / "step-00000003"
    rest = world.train(tmp_path / "rest", *keys, f"checkpoint.resume={middle}", ranks=2)
    assert said(rest) == [one for one in said(whole) if one[0] > 3]
    for name in ("reward", "loss", "grad_norm", "sampler_difference"):
        assert rest.column(name) == pytest.approx(whole.column(name)[3:], rel=2e-4, abs=2e-6), name
    at_once = world.train(tmp_path / "once", *keys, "objective.round_tokens=null")
    for due in (1, 2):  # the step that comes next has no limit
        assert [s for s in said(at_once) if s[0] == due] == [s for s in said(whole) if s[0] == due]
    assert [s for s in said(at_once) if s[0] == 3] != [s for s in said(whole) if s[0] == 3]


STATEFUL = """
class Counts:
    def __init__(self):
        self.letters = []
    def reset(self, row):
        return row["messages"], None
    def step(self, messages):
        if "refuse" in messages[0]["content"]:
            raise ValueError("not again")
        self.letters += messages[-1]["content"]
        return [{"role": "user", "content": f"{len(self.letters)} so far"}], False
    def reward(self, messages):
        return sum(each in "abcdefghijklm" for each in self.letters)
"""
TURNS = [
    "objective.rewards=[]", "objective.turns=4", "objective.max_new_tokens=24",
    "batch.seq_len=160", "model.initializer_range=0.5", "objective.ahead=3",
    "objective.round_tokens=12", "train.steps=5",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["sharding.tensor=2"]], ids=["", "tensor"])
@pytest.mark.further
def test_environments_of_open_rollouts_are_where_they_were_after_a_stop(world, tmp_path, layout):
    file = tmp_path / "counts.py"
    file.write_text(STATEFUL)
    keys = [*GRPO, *TURNS, *layout, f"objective.environment={file}:Counts"]
    keys += [f"data.cache={tmp_path}"]
    whole = world.train(tmp_path / "whole", *keys, ranks=2)
    assert max(whole.column("turns_max")) > 1
    assert max(whole.column("reward_std")) > 0
    stopped = inject.at("backward", TERM, rank=0, step=2, nth=1)
    world.train(tmp_path / "run", *keys, ranks=2, seam=stopped, code=75)
    run = world.train(tmp_path / "run", *keys, ranks=2)
    assert said(run) == said(whole)
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))

    middle = whole.folder / "checkpoints" / "step-00000002"
    file.write_text(STATEFUL.replace('"refuse"', '""'))
    failed = world.train(tmp_path / "failed", *keys, f"checkpoint.resume={middle}", ranks=2)
    reasons = {
        reason for event in failed.event("environment_failed") for reason in event["reasons"]
    }
    assert "replay: ValueError: not again" in reasons


@pytest.mark.slow
def test_long_rollouts_are_dropped_and_counted(world, tmp_path):
    keys = [*GRPO, f"data.cache={tmp_path}", "objective.ahead=1", "objective.unfinished=drop"]
    keys += ["objective.max_new_tokens=64", "batch.seq_len=128", "objective.round_tokens=60"]
    run = world.train(tmp_path / "run", *keys, "train.steps=3")
    assert 0 < min(run.column("dropped")) <= max(run.column("dropped")) < 1
    assert run.column("truncated_share") == [0, 0, 0]
    assert max(run.column("answer_tokens_max")) <= 60


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["objective.ahead=3", "objective.updates=2"], "objective.ahead=4"),
        (["objective.ahead=1", "objective.round_tokens=8"], "objective.ahead=2  or more"),
        (["objective.unfinished=drop"], "objective.round_tokens=N"),
    ],
)
def test_what_cannot_be_begun_ahead_is_refused(capsys, typed, named):
    assert main([*GRPO, *typed]) == 2
    assert named in capsys.readouterr().err
