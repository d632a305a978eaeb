"""Groups that share the rows of each step: whichever are there, the steps are the same."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import inject
import pytest
import torch
from replica_groups import stopped_by
from stored import assert_near, assert_same_end, newest, stored
from world import SMALL, SPIKY, World, wait_until
from world import Run as WorldRun

from fsdp_trainer.config.schema import Run
from fsdp_trainer.run.run_lock import RunLock

HOW = (
    "train.steps=6 schedule=constant batch.micro_rows=2 data.validation=0.2"
    " train.validate_every=3 checkpoint.every=3"
)


@pytest.fixture(scope="module")
def words(input_words):
    return [*input_words, HOW]


@pytest.fixture(scope="module")
def undisturbed(world, words, tmp_path_factory):
    return world.train(tmp_path_factory.mktemp("alone") / "run", *words)


def assert_same_run(run, undisturbed):
    """Raise AssertionError unless a run has the lines, events and weights of another one."""
    assert run["step"] == undisturbed["step"], "one line for each step"
    assert_near(run, undisturbed, "loss", "grad_norm", "tokens", "lr", rel=1e-4)
    evaluated = [(e["step"], e["loss"]) for e in undisturbed.event("evaluation")]
    assert [e["step"] for e in run.event("evaluation")] == [step for step, _ in evaluated]
    assert run.checkpoints == undisturbed.checkpoints
    ours, theirs = stored(newest(run)), stored(newest(undisturbed))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_one_group_is_the_plain_run_to_the_last_bit(groups, words, undisturbed, tmp_path):
    (run,) = groups.train(tmp_path / "run", *words, groups=1)
    assert run["grad_norm"] == undisturbed["grad_norm"]
    assert_same_end(run, undisturbed)


def test_two_groups_compute_the_steps_of_one(groups, words, undisturbed, tmp_path):
    how = "sharding.pipeline=2 replicas.min=2"
    run, _ = groups.train(tmp_path / "run", *words, how, ranks=2)
    assert [(event["step"], event["groups"]) for event in run.event("groups")] == [(0, 2)]
    assert_same_run(run, undisturbed)


def test_a_killed_group_comes_back_with_the_state_of_the_others(
    groups, words, undisturbed, tmp_path
):
    """The other one waits for it, because of replicas.min, so that it comes back within the run."""
    how = "sharding.tensor=2 replicas.min=2"
    seams = {1: inject.killed(step=3)}
    run, killed = groups.train(tmp_path / "run", *words, how, ranks=2, seams=seams)
    assert "took over step 2 of another group" in killed.out
    assert_same_run(run, undisturbed)


def test_the_group_that_writes_the_files_may_be_killed(groups, words, undisturbed, tmp_path):
    """Three groups of which two are enough: neither a line nor a checkpoint is missing."""
    seams = {0: inject.killed(step=3)}
    run, *_ = groups.train(tmp_path / "run", *words, "replicas.min=2", groups=3, seams=seams)
    assert_same_run(run, undisturbed)


def test_all_groups_stop_together_resume_exactly_go_on_after_a_loss_and_export(
    groups, words, undisturbed, tmp_path
):
    train = partial(groups.train, tmp_path / "run", *words)
    stop = inject.at("forward", partial(inject.send, signal.SIGTERM), step=2)
    first, _ = train("replicas.min=2", seams={0: stop, 1: stop}, code=75)
    assert first.checkpoints == ["step-00000002"]
    lost = inject.killed(step=5)
    run, _ = train("replicas.min=2", seams={0: lost, 1: lost})
    assert [event["step"] for event in run.event("resume")] == [2, 3]
    assert_same_run(run, undisturbed)
    assert not list(run.folder.rglob("hf/model.safetensors"))
    (again,) = train("checkpoint.export_hf=true", groups=1)
    assert "already finished" in again.out
    assert list(run.folder.rglob("hf/model.safetensors"))


def test_groups_rewind_together_after_a_spike(groups, world, input_words, tmp_path):
    how = [*input_words, *SPIKY, f"train.on_spike=rewind train.steps={inject.SPIKED + 2}"]
    alone = world.train(tmp_path / "alone", *how, seam=inject.garbage())
    seams = {0: inject.garbage(), 1: inject.garbage()}
    run, _ = groups.train(tmp_path / "run", *how, "replicas.min=2", seams=seams)
    (rewind,) = run.event("rewind")
    assert (rewind["step"], rewind["to"]) == (inject.SPIKED, 18)
    assert_near(run, alone, loss=1e-4)


def test_a_new_group_waits_for_others_that_hold_the_folder(groups, words, tmp_path):
    folder = tmp_path / "run"
    with ThreadPoolExecutor(1) as thread:
        with RunLock([], group=1).acquire(Run(), "auto", folder):
            training = thread.submit(groups.train, folder, *words, groups=1)
            wait_until(lambda: (folder / ".lock-0").exists() or training.done())
            time.sleep(1)
            until = time.time()
        (run,) = training.result()
    assert run["time"][0] > until


def test_a_plain_run_is_refused_while_groups_train_in_the_folder(world, words, tmp_path):
    with RunLock([], group=0).acquire(Run(), "auto", tmp_path / "run"):
        again = world.train(tmp_path / "run", *words, code=2)
        assert "the run's folder is in use" in again.err
        with RunLock([], group=1).acquire(Run(), "auto", tmp_path / "run"):
            pass


def test_a_group_with_other_settings_is_refused_and_the_others_go_on(groups, words, tmp_path):
    folder = tmp_path / "run"
    rare = [f"{key}=9999" for key in ("train.steps", "train.validate_every", "checkpoint.every")]
    more = [*words, *rare]
    place = f"run.root={tmp_path} run.name=run"
    ids = f"replicas.method=sync replicas.id=2 replicas.lighthouse={groups.address}"
    stops = [tmp_path / "stop-0", tmp_path / "stop-1"]
    seams = {i: stopped_by(file) for i, file in enumerate(stops)}
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(groups.train, folder, *more, seams=seams, code=75)
        shared = WorldRun(folder)
        wait_until(lambda: shared.metrics or training.done())
        stranger = World()
        (result,) = stranger.command("train", *SMALL, *more, place, ids, "optim.lr=0.5", code=2)
        stranger.close()
        before = len(shared.metrics)
        wait_until(lambda: len(shared.metrics) > before)
        for file in stops:
            file.touch()
        training.result()
    assert "optim.lr=0.5" in result.err
    assert "another group has" in result.err
    assert shared["step"] == list(range(1, len(shared.metrics) + 1))
