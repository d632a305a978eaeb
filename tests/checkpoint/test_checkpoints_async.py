"""checkpoint=async: a thread writes during training, and everything else is as with sync."""

import threading
import time
from concurrent.futures import Future
from unittest.mock import patch

import inject
import pytest
from stored import assert_bitwise_equal, assert_undisturbed, checkpoint, end_of, stored
from world import RankFailed, read_json, wait_for_step

ASYNC = "schedule=constant checkpoint.every=3 checkpoint.keep=9 checkpoint=async"


def wait_for_two_steps(step, run):
    if step == 3:
        wait_for_step(5, run)


SLOW_DISK = inject.when_writing(wait_for_two_steps)
"""The checkpoint of step 3 is written only when two more steps were trained."""


def test_steps_taken_while_a_checkpoint_is_written_change_neither_it_nor_the_losses(train, ledger):
    background = train("run", ASYNC, "train.steps=6", ranks=2, seam=SLOW_DISK)
    waiting = ledger.run("every step")
    assert background.checkpoints == ["step-00000003", "step-00000006"]
    for column in ("loss", "grad_norm", "lr", "tokens"):
        assert background[column] == waiting[column][:6], column
    for step in (3, 6):
        assert_bitwise_equal(*(stored(checkpoint(run, step)) for run in (background, waiting)))
    first = background.event("checkpoint")[0]
    assert first["step"] == 3
    assert first["stall_seconds"] < first["seconds"]


def no_space_for_each_second(step, _run):
    if step % 6 == 0 and inject.this_rank(1):
        raise inject.no_space()


FULL_DISK = inject.together(inject.when_writing(no_space_for_each_second), inject.quick_retries())
"""The second and the fourth checkpoint cannot be written on rank 1."""


def test_a_write_that_fails_is_told_the_next_one_is_written_and_the_last_one_must_be(train):
    how = [ASYNC, "train.steps=12 checkpoint.patience=7s"]
    run = train("run", *how, ranks=2, seam=FULL_DISK, code=1)
    assert run.checkpoints == ["step-00000003", "step-00000009"]
    assert [e["step"] for e in run.event("checkpoint")] == [3, 9]
    failed, *of_the_last = run.event("checkpoint_failed")
    assert failed["step"] == 6
    assert "rank 1 cannot write" in failed["error"]
    assert "No space left" in failed["error"]
    assert "no checkpoint of step 6: rank 1" in run.out
    assert "the next is written after step 9" in run.out
    assert [event["step"] for event in of_the_last] == [12, 12, 12]
    assert run.out.count("tried again for 7s. Make room: ") == 1
    assert "step 12, could not be written, again and again" in run.err
    assert end_of(run) == ("end", 1)
    again = train("run", ASYNC, "train.steps=13", ranks=2)
    assert again.event("resume")[0]["step"] == 9
    assert again["step"] == list(range(1, 14))


def best_fails_late(step, run):
    """The checkpoint of step 2 cannot be written, which shows when that of step 3 is about to
    be."""
    if step == 2:
        wait_for_step(3, run)
        raise inject.no_space()


def test_a_checkpoint_does_not_name_a_best_one_that_was_lost_while_it_was_waited_for(train):
    words = (
        "data.validation=0.1 train.validate_every=2 checkpoint.best=true checkpoint.every=1"
        " train.steps=4"
    )
    run = train("run", ASYNC, words, seam=inject.when_writing(best_fails_late))
    assert [e["step"] for e in run.event("checkpoint_failed")] == [2]
    assert [e["step"] for e in run.event("checkpoint")] == [1, 3, 4]
    assert read_json(checkpoint(run, 3) / "trainer.json")["best_step"] is None


def test_an_error_of_one_rank_alone_leaves_no_rank_waiting(train):
    # what is no OSError befalls rank 0 alone, where the others cannot know of it
    how = "train.steps=100000 launch.timeout=30s"
    broken = inject.fails("checkpoint_complete", ValueError("something else"))
    with pytest.raises(RankFailed, match="something else"):
        train("run", ASYNC, how, ranks=2, seam=broken, patience=0.1)


@inject.fault
def slow_first_write():
    """Write the first checkpoint when the run has waited for it for a second."""
    waits, result = threading.Event(), Future.result

    def wait(self):
        waits.set()
        return result(self)

    def act(step, _run):
        if step == 1:
            waits.wait(100)
            time.sleep(1)

    with inject.when_writing(act), patch.object(Future, "result", wait):
        yield


def test_a_save_that_is_still_on_its_way_is_waited_for_and_reported(train):
    how = [ASYNC, "checkpoint.every=1 train.steps=2"]
    run = train("run", *how, ranks=2, seam=slow_first_write())
    (waited,) = run.event("checkpoint_waited")
    assert waited["step"] == 2
    assert waited["seconds"] > 0.5
    assert "waited" in run.out
    assert run.checkpoints == ["step-00000001", "step-00000002"]
    assert run.event("checkpoint")[1]["stall_seconds"] >= waited["seconds"], (
        "it is part of what the second one cost"
    )


def test_a_checkpoint_on_its_way_is_committed_whatever_ends_the_run(train):
    fails = inject.together(SLOW_DISK, inject.failed(step=6))  # while that of step 3 is on its way
    run = train("run", ASYNC, "train.steps=6", ranks=2, seam=fails, code=1)
    assert "as good as killed" in run.err
    assert run.checkpoints == ["step-00000003"]
    assert [e["event"] for e in run.events] == ["start", "checkpoint", "end"]


def killed_while_writing(step, run):
    """Rank 1 is killed hard in the middle of the second checkpoint."""
    if step == 6:
        wait_for_step(7, run)
        if inject.this_rank(1):
            inject.kill()


def test_killed_while_writing_the_run_goes_on_from_the_checkpoint_before(train, ledger):
    how = [ASYNC, "train.steps=9"]
    with pytest.raises(RankFailed):
        train("run", *how, ranks=2, seam=inject.when_writing(killed_while_writing))
    run = train("run", *how, ranks=2)
    assert run.event("resume")[0]["step"] == 3
    assert_undisturbed(run, ledger.run("every step"))
    assert run.checkpoints == [f"step-0000000{step}" for step in (3, 6, 9)], (
        "nothing half written is left"
    )
