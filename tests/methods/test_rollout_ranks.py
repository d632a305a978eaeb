"""Ranks that only generate, while the others train."""

import functools
import os
import signal
import subprocess
import sys

import inject
import pytest
from stored import assert_bitwise_equal, newest, stored
from world import SMALL

from fsdp_trainer.base.process import wait_until
from fsdp_trainer.cli import main

GRPO = [
    "objective=grpo", 'objective.rewards=[{name: regex, pattern: "[a-z]"}]', "data.path=demo:sums",
    "tokenizer.path=demo:bytes", "objective.max_new_tokens=6", "objective.samples=4",
    "batch.rows=4", "batch.micro_rows=2", "schedule=constant", "optim.lr=0.01", "train.steps=4",
]  # fmt: skip
ONE = "launch.rollout_ranks=1"
TERM = functools.partial(inject.send, signal.SIGTERM)
COLUMNS = ("reward", "loss", "grad_norm", "staleness", "sampler_difference")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["adapter=lora"], ["optim.offload=cpu"]])
@pytest.mark.grid(1)
def test_without_steps_ahead_the_run_is_that_of_one_rank_to_the_last_bit(world, tmp_path, more):
    keys = [*GRPO, *more, f"data.cache={tmp_path}"]
    alone = world.train(tmp_path / "alone", *keys)
    run = world.train(tmp_path / "run", *keys, ONE, ranks=2)
    for name in COLUMNS:
        assert run.column(name) == alone.column(name), name
    assert_bitwise_equal(stored(newest(run)), stored(newest(alone)))


@pytest.mark.slow
def test_rollouts_ahead_are_those_of_the_training_ranks(world, tmp_path):
    keys = [*GRPO, "objective.ahead=3", "objective.round_tokens=2", f"data.cache={tmp_path}"]
    alone = world.train(tmp_path / "alone", *keys)
    assert alone.column("staleness") == [0, 1, 2, 3]
    run = world.train(tmp_path / "run", *keys, ONE, ranks=2)
    for name in COLUMNS:
        assert run.column(name) == alone.column(name), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(3, [ONE]), (4, ["sharding.tensor=2", "launch.rollout_ranks=2"])],
    ids=["fsdp", "tensor"],
)
@pytest.mark.grid(1)
def test_weights_of_any_layout_reach_the_rollout_ranks(world, tmp_path, ranks, layout):
    keys = [*GRPO, "objective.ahead=1", f"data.cache={tmp_path}"]
    alone = world.train(tmp_path / "alone", *keys)
    run = world.train(tmp_path / "run", *keys, *layout, ranks=ranks)
    for name in COLUMNS:
        assert run.column(name) == pytest.approx(alone.column(name), rel=5e-4, abs=5e-6), name


def touch(file):
    file.touch()


def wait_for(file):
    assert wait_until(file.exists, 60), f"{file.name} has not begun"


@pytest.mark.slow
def test_generation_and_training_go_on_at_the_same_time(world, tmp_path):
    """Each of the two waits in the middle for the other one's beginning."""
    generates, trains = tmp_path / "generation", tmp_path / "training"
    # the first round of the rollout rank is for the first step, the second one for the next
    seams = [
        inject.at("rollouts", functools.partial(touch, generates), rank=1, step=2),
        inject.at("rollouts", functools.partial(wait_for, trains), rank=1, step=2),
        inject.at("backward", functools.partial(touch, trains), rank=0, step=1, nth=1),
        inject.at("backward", functools.partial(wait_for, generates), rank=0, step=1, nth=1),
    ]
    keys = [*GRPO, "objective.ahead=1", ONE, f"data.cache={tmp_path}"]
    run = world.train(tmp_path / "run", *keys, ranks=2, seam=inject.together(*seams))
    assert run.column("staleness") == [0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.further
def test_a_stop_waits_for_open_rollouts_and_a_resume_goes_on_exactly(world, tmp_path):
    keys = [*GRPO, "objective.ahead=2", "objective.round_tokens=3", ONE, f"data.cache={tmp_path}"]
    whole = world.train(tmp_path / "whole", *keys, ranks=2)
    stopped = inject.at("backward", TERM, rank=0, step=2, nth=1)
    world.train(tmp_path / "run", *keys, ranks=2, seam=stopped, code=75)
    run = world.train(tmp_path / "run", *keys, ranks=2)
    for name in COLUMNS:
        assert run.column(name) == whole.column(name), name
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


FAILS = """
class Fails:
    def reset(self, row):
        raise ValueError("no such task")
    def step(self, messages):
        return [], True
    def reward(self, messages):
        return 0.0
"""


@pytest.mark.slow
def test_an_error_of_the_rollout_ranks_ends_the_run_with_its_reason(world, tmp_path):
    file = tmp_path / "fails.py"
    file.write_text(FAILS)
    place = [f"run.root={tmp_path}", f"data.cache={tmp_path}", "batch.seq_len=64"]
    keys = [*SMALL, *place, *GRPO, ONE, f"objective.environment={file}:Fails"]
    failed = world.command("train", *keys, ranks=2, code=1)
    assert "rollouts failed, the first with\n  reset: ValueError: no such task" in failed[0].err
    file.write_text(FAILS.replace("class Fails", "class Another"))
    refused = world.command("train", *keys, "run.name=other", ranks=2, code=2)
    assert "Fails" in refused[0].err


UNUSABLE = """
from fsdp_trainer.errors import UserError
class Unusable:
    resets = 0
    def reset(self, row):
        Unusable.resets += 1
        if Unusable.resets > 3 * 16:
            raise UserError("no more of this")
        return row["messages"], None
    def step(self, messages):
        return [], True
    def reward(self, messages):
        return float(len(messages[-1]["content"]))
"""


@pytest.mark.slow
def test_an_error_in_a_round_ahead_ends_the_run_with_what_was_trained(world, tmp_path):
    file = tmp_path / "unusable.py"
    file.write_text(UNUSABLE)
    place = [f"run.root={tmp_path}", f"data.cache={tmp_path}", "batch.seq_len=64", "run.name=run"]
    keys = [*SMALL, *place, *GRPO, ONE, "objective.ahead=1", "objective.rewards=[]"]
    keys += [f"objective.environment={file}:Unusable"]
    failed = world.command("train", *keys, ranks=2, code=2)
    assert "no more of this" in failed[0].err
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert saved == ["step-00000003"], "its rollouts were made before"


@pytest.mark.slow
def test_a_stop_before_the_rollout_ranks_are_ready_ends_all_of_them(world, tmp_path):
    leaves = tmp_path / "training ranks leave"
    seams = [
        inject.at("data", functools.partial(wait_for, leaves), rank=1, step=1),
        inject.at("rollouts", TERM, rank=0, nth=1),
        inject.at("end", functools.partial(touch, leaves), rank=0),
    ]
    keys = [*GRPO, ONE, f"data.cache={tmp_path}"]
    world.train(tmp_path / "run", *keys, ranks=2, seam=inject.together(*seams), code=75)


@pytest.mark.slow
@pytest.mark.further
def test_a_rollout_rank_that_is_killed_ends_the_run_which_goes_on_later(world, tmp_path):
    keys = [*GRPO, "objective.ahead=1", ONE, f"data.cache={tmp_path}", "checkpoint.every=1"]
    whole = world.train(tmp_path / "whole", *keys, ranks=2)
    env = {"OMP_NUM_THREADS": "1"} | inject.killed_once(tmp_path / "seam", rank=1, step=3)
    words = ["train", *SMALL, *keys, f"run.root={tmp_path}", "launch.nproc_per_node=2"]
    words += ["launch.device=cpu", "run.name=run"]
    command = [sys.executable, "-m", "fsdp_trainer", *words]
    ended = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "rank 1 was killed by SIGKILL" in ended.stderr
    run = world.train(tmp_path / "run", *keys, ranks=2)
    assert run.column("step") == [1, 2, 3, 4]
    assert run.column("reward")[:2] == whole.column("reward")[:2]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["objective.server=http://localhost:8000"], "objective.server=null"),
        (["sharding.tensor=2"], "launch.rollout_ranks=2"),
    ],
)
def test_rollout_ranks_that_cannot_be_are_refused(capsys, typed, named):
    assert main([*GRPO, ONE, *typed]) == 2
    assert named in capsys.readouterr().err


def test_ranks_that_generate_need_a_method_that_learns_from_answers(capsys):
    assert main(["data.path=demo:text", "tokenizer.path=demo:bytes", ONE]) == 2
    assert "Only counts with  objective=grpo" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_counts_rollout_ranks_apart(capsys):
    words = ["plan", "model=qwen3_0_6b", "objective=grpo", "objective.rewards=[exact]", ONE]
    words += ["plan.gpu=h100", "objective.ahead=1"]
    assert main([*words, "plan.world_size=4", "batch.rows=6"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on each of 3 × H100" in said
    assert "beside the step below" in said
    assert main([*words, "plan.world_size=1"]) == 2
    assert "leaves no rank for training: there are 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_looks_at_the_layout_of_the_training_ranks(world):
    keys = ["sharding=hsdp", "sharding.replicas=2", "doctor.measure=false", *GRPO]
    said = world.command("doctor", *keys, ONE, "launch.device=cpu", ranks=3)[0].out
    assert "replicate 2" in said


@pytest.mark.slow
def test_a_rank_must_be_left_for_training(world, tmp_path):
    keys = [*SMALL, *GRPO, f"run.root={tmp_path}", f"data.cache={tmp_path}"]
    refused = world.command("train", *keys, "launch.rollout_ranks=2", ranks=2, code=2)
    assert "leaves no rank for training: there are 2" in refused[0].err
