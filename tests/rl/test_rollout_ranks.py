"""Ranks that only generate, while the others train."""

import functools
import signal

import inject
import pytest
from named_runs import GRPO
from rollouts import COLUMNS, KEYS, PARTS, SEVERAL, with_environment
from stored import assert_columns, assert_same_end
from world import cli

from fsdp_trainer.base.process import wait_until

ONE = "launch.rollout_ranks=1"
TERM = functools.partial(inject.send, signal.SIGTERM)


def test_without_steps_ahead_the_run_is_that_of_one_rank_to_the_last_bit(ledger, train):
    words = [*KEYS, "adapter=lora optim.offload=cpu"]
    alone, run = ledger.run(words=words), train("run", *words, ONE, ranks=2)
    assert_columns(run, alone, *COLUMNS)
    assert_same_end(run, alone)


def test_rollouts_ahead_are_those_of_the_training_ranks_also_after_a_stop(ledger, train):
    """The stop waits for open rollouts."""
    words, alone = [*SEVERAL, *PARTS], ledger.run(words=[*SEVERAL, *PARTS])
    stopped = inject.at("backward", TERM, rank=0, step=2, nth=1)
    train("run", *words, ONE, ranks=2, seam=stopped, code=75)
    run = train("run", *words, ONE, ranks=2)
    assert_columns(run, alone, *COLUMNS)
    assert_same_end(run, alone)


def test_weights_of_any_layout_reach_all_rollout_ranks(ledger, train):
    words = [*SEVERAL, "objective.ahead=1"]
    alone = ledger.run(words=words)
    words += ["sharding.tensor=2 launch.rollout_ranks=2 train.steps=3"]
    run = train("run", *words, ranks=4)
    for name in COLUMNS:
        assert run[name] == pytest.approx(alone[name][:3], rel=5e-4, abs=5e-6), name


def wait_for(file):
    assert wait_until(file.exists, 60), f"{file.name} has not begun"


def test_generation_and_training_go_on_at_the_same_time(train, tmp_path):
    """Each of the two waits in the middle for the other one's beginning."""
    generates, trains = tmp_path / "generation", tmp_path / "training"
    # the first round of the rollout rank is for the first step, the second one for the next
    seams = [
        inject.at("rollouts", generates.touch, rank=1, step=2),
        inject.at("rollouts", functools.partial(wait_for, trains), rank=1, step=2),
        inject.at("backward", trains.touch, rank=0, step=1, nth=1),
        inject.at("backward", functools.partial(wait_for, generates), rank=0, step=1, nth=1),
    ]
    run = train("run", *KEYS, "objective.ahead=1", ONE, ranks=2, seam=inject.together(*seams))
    assert run["staleness"] == [0, 1, 1]


FAILS = """
from fsdp_trainer.errors import UserError
class Fails:
    resets = 0
    def reset(self, row):
        Fails.resets += 1
        if Fails.resets > 3 * 16:
            raise UserError("no more of this")
        return row["messages"], None
    def step(self, messages):
        return [], True
    def reward(self, messages):
        return float(len(messages[-1]["content"]))
"""
LOST = """raise ValueError("no such task")"""


def test_an_error_of_the_rollout_ranks_ends_the_run_with_its_reason(train, tmp_path):
    source = FAILS.replace("Fails.resets += 1", LOST)
    words = [*KEYS, ONE, *with_environment(tmp_path, source, "Fails")]
    said = train("run", *words, ranks=2, code=1).err
    assert "rollouts failed, the first with\n  reset: ValueError: no such task" in said
    with_environment(tmp_path, FAILS.replace("class Fails", "class Another"), "Fails")
    assert "Fails" in train("other", *words, ranks=2, code=2).err


def test_an_error_in_a_round_ahead_ends_the_run_with_what_was_trained(train, tmp_path):
    environment = with_environment(tmp_path, FAILS, "Fails")
    words = [*KEYS, *environment, ONE, "objective.ahead=1 train.steps=4"]
    failed = train("run", *words, ranks=2, code=2)
    assert "no more of this" in failed.err
    assert failed.checkpoints == ["step-00000003"], "its rollouts were made before"


def test_a_stop_before_the_rollout_ranks_are_ready_ends_all_of_them(train, tmp_path):
    leaves = tmp_path / "training ranks leave"
    seams = [
        inject.at("data", functools.partial(wait_for, leaves), rank=1, step=1),
        inject.at("rollouts", TERM, rank=0, nth=1),
        inject.at("end", leaves.touch, rank=0),
    ]
    train("run", *KEYS, ONE, ranks=2, seam=inject.together(*seams), code=75)


def test_a_plan_counts_rollout_ranks_apart():
    words = [
        "plan",
        "plan.rehearse=false model=qwen3_0_6b objective=grpo",
        "objective.rewards=[exact]",
        ONE,
    ]
    words += ["plan.gpu=h100 objective.ahead=1"]
    said = " ".join(cli(*words, "plan.world_size=4 batch.rows=6").out.split())
    assert "on each of 3 × H100" in said
    assert "beside the step below" in said
    assert (
        "leaves no rank for training: there are 1" in cli(*words, "plan.world_size=1", code=2).err
    )


def test_the_doctor_looks_at_the_layout_of_the_training_ranks(world, tmp_path):
    words = [*GRPO, ONE, "sharding=hsdp sharding.replicas=2 launch.device=cpu"]
    words += [f"tokenizer.path=demo:bytes run.root={tmp_path}"]
    said = world.command("doctor", *words, "doctor.measure=false", ranks=3)[0].out
    assert "replicate 2" in said
