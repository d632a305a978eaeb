"""checkpoint=async: training goes on while a thread writes, and everything else is as with sync."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import Future
from unittest.mock import patch

import pytest
from stored import assert_bitwise_equal, checkpoint, end_of, newest, stored
from world import RankFailed, read_lines

SYNC = ["schedule=constant", "checkpoint.every=3", "checkpoint.keep=9"]
ASYNC = [*SYNC, "checkpoint=async"]


def when_writing(act):
    """`act(step, run)` before a rank writes its shards of the checkpoint of `step`."""
    from fsdp_trainer.checkpoint import store

    real = store.write_file

    def write(path, windows):
        act(int(path.parent.name.split(".")[1].removeprefix("step-")), path.parents[2])
        return real(path, windows)

    return patch.object(store, "write_file", write)


def wait_until(condition, what):
    deadline = time.monotonic() + 100
    while not condition():
        if time.monotonic() > deadline:
            raise OSError(what)
        time.sleep(0.01)


def steps_on_record(run):
    return len(read_lines(run / "metrics.jsonl"))


def slow_disk():
    """The checkpoint of step 3 is written only when two more steps were trained."""
    return when_writing(
        lambda step, run: (
            step > 3
            or wait_until(lambda: steps_on_record(run) >= 5, "training waited for the write")
        )
    )


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, ["sharding.blocks_per_unit=2"]),
        pytest.param(1, ["sharding=ddp"], marks=pytest.mark.slow),
        pytest.param(4, ["sharding=hsdp", "sharding.replicas=2"], marks=pytest.mark.slow),
        pytest.param(2, ["sharding.cpu_offload=true"], marks=pytest.mark.slow),
    ],
    ids=lambda value: "" if isinstance(value, int) else value[0],
)
def test_steps_taken_while_a_checkpoint_is_written_change_neither_it_nor_the_losses(
    train, ranks, how
):
    background = train("async", *ASYNC, *how, "train.steps=6", ranks=ranks, seam=slow_disk)
    waiting = train("sync", *SYNC, *how, "train.steps=6", ranks=ranks)
    assert background.checkpoints == waiting.checkpoints == ["step-00000003", "step-00000006"]
    for column in ("loss", "grad_norm", "lr", "tokens"):
        assert background.column(column) == waiting.column(column), column
    for step in (3, 6):
        assert_bitwise_equal(
            stored(checkpoint(background, step)), stored(checkpoint(waiting, step))
        )
    first = background.event("checkpoint")[0]
    assert first["step"] == 3 and first["stall_seconds"] < first["seconds"]


@pytest.mark.slow
def test_a_resume_from_it_is_bitwise_an_uninterrupted_run(train):
    train("run", *ASYNC, "train.steps=3", ranks=2)
    run = train("run", *ASYNC, "train.steps=5", ranks=2)
    whole = train("whole", *SYNC, "train.steps=5", ranks=2)
    assert run.column("loss") == whole.column("loss")
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


def full_disk():
    """The second checkpoint cannot be written on rank 1."""

    def act(step, run):
        if step == 6 and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")

    stack = contextlib.ExitStack()
    stack.enter_context(when_writing(act))
    stack.enter_context(patch("fsdp_trainer.training.saving.PAUSES", (0.1, 0.1)))
    return stack


def test_a_write_that_fails_in_the_background_is_told_and_the_next_one_is_written(train):
    run = train("run", *ASYNC, "train.steps=9", ranks=2, seam=full_disk)
    assert run.checkpoints == ["step-00000003", "step-00000009"] and [
        e["step"] for e in run.event("checkpoint")
    ] == [3, 9]
    (failed,) = run.event("checkpoint_failed")
    assert (
        failed["step"] == 6
        and "rank 1 cannot write" in failed["error"]
        and "No space left" in failed["error"]
    )
    assert (
        "no checkpoint of step 6: rank 1" in run.out
        and "the next is written after step 9" in run.out
    )


def best_fails_late():
    """The checkpoint of step 2 cannot be written, which shows when that of step 3 is about to be."""

    def act(step, run):
        if step == 2:
            wait_until(lambda: steps_on_record(run) >= 3, "training waited for the write")
            raise OSError(28, "No space left on device")

    return when_writing(act)


def test_a_checkpoint_does_not_name_a_best_one_that_was_lost_while_it_was_waited_for(train):
    best = [
        "data.validation=0.1",
        "train.validate_every=2",
        "checkpoint.best=true",
        "checkpoint.every=1",
        "train.steps=4",
    ]
    run = train(
        "run",
        "schedule=constant",
        "checkpoint=async",
        "checkpoint.keep=9",
        *best,
        seam=best_fails_late,
    )
    assert [e["step"] for e in run.event("checkpoint_failed")] == [2] and [
        e["step"] for e in run.event("checkpoint")
    ] == [1, 3, 4]
    assert json.loads((checkpoint(run, 3) / "trainer.json").read_text())["best_step"] is None


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_cannot_be_written_fails_and_goes_on_from_the_one_before(train):
    run = train("run", *ASYNC, "train.steps=6", ranks=2, seam=full_disk, code=1)
    assert (
        "step 6, could not be written, again and again" in run.err
        and "Traceback" not in run.err
        and len(run.event("checkpoint_failed")) == 3
    )
    assert run.checkpoints == ["step-00000003"] and end_of(run) == ("end", 1)
    again = train("run", *ASYNC, "train.steps=7", ranks=2)
    assert again.event("resume")[0]["step"] == 3 and again.column("step") == list(range(1, 8))


def broken_rank_0():
    """What is no OSError befalls rank 0 alone, where the others cannot know of it."""
    from fsdp_trainer.checkpoint.store import CheckpointStore

    def complete(self, *args):
        raise ValueError("something else")

    return patch.object(CheckpointStore, "_complete", complete)


@pytest.mark.slow
def test_an_error_of_one_rank_alone_leaves_no_rank_waiting(train, world):
    with pytest.raises(RankFailed, match="something else"):
        train(
            "run",
            *ASYNC,
            "train.steps=100000",
            "launch.timeout=30s",
            ranks=2,
            seam=broken_rank_0,
            patience=2,
        )


def slow_first_write():
    """The first checkpoint is written when the run has waited for it for a second."""
    waits, result = threading.Event(), Future.result

    def wait(self):
        waits.set()
        return result(self)

    stack = contextlib.ExitStack()
    stack.enter_context(
        when_writing(lambda step, run: step > 1 or (waits.wait(100), time.sleep(1)))
    )
    stack.enter_context(patch.object(Future, "result", wait))
    return stack


@pytest.mark.slow
def test_a_save_that_is_still_on_its_way_is_waited_for_and_reported(train):
    run = train(
        "run",
        "schedule=constant",
        "checkpoint=async",
        "checkpoint.every=1",
        "train.steps=2",
        ranks=2,
        seam=slow_first_write,
    )
    (waited,) = run.event("checkpoint_waited")
    assert waited["step"] == 2 and waited["seconds"] > 0.5 and "waited" in run.out
    assert run.checkpoints == ["step-00000001", "step-00000002"]
    assert run.event("checkpoint")[1]["stall_seconds"] >= waited["seconds"], (
        "it is part of what the second one cost"
    )


def fails_at_step_5():
    """The run fails while the checkpoint of step 3 is on its way."""
    from fsdp_trainer.errors import RunFailed
    from fsdp_trainer.training.trainer import Trainer

    real = Trainer.stop_if_nothing_is_learnt

    def fail(self):
        real(self)
        if self.progress.step == 5:
            raise RunFailed("something else")

    stack = contextlib.ExitStack()
    stack.enter_context(slow_disk())
    stack.enter_context(patch.object(Trainer, "stop_if_nothing_is_learnt", fail))
    return stack


def test_a_checkpoint_on_its_way_is_committed_whatever_ends_the_run(train):
    run = train("run", *ASYNC, "train.steps=6", ranks=2, seam=fails_at_step_5, code=1)
    assert "something else" in run.err and run.checkpoints == ["step-00000003"]
    assert [e["event"] for e in run.events] == ["start", "checkpoint", "end"]


def test_a_run_that_is_stopped_leaves_with_its_last_step_committed(train):
    run = train(
        "run",
        "train.steps=100000",
        "train.time_limit=1s",
        "checkpoint=async",
        "checkpoint.every=1",
        ranks=2,
        code=75,
    )
    last = run.metrics[-1]["step"]
    assert (
        run.checkpoints[-1] == f"step-{last:08d}"
        and run.event("checkpoint")[-1]["step"] == last
        and len(run.checkpoints) == min(2, last)
    )


def killed_while_writing():
    """Rank 1 is killed hard in the middle of the second checkpoint."""

    def act(step, run):
        if step == 6:
            wait_until(lambda: steps_on_record(run) >= 7, "training waited for the write")
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    return when_writing(act)


@pytest.mark.slow
def test_killed_while_writing_the_run_goes_on_from_the_checkpoint_before(train):
    with pytest.raises(RankFailed):
        train("run", *ASYNC, "train.steps=9", ranks=2, seam=killed_while_writing)
    run = train("run", *ASYNC, "train.steps=9", ranks=2)
    whole = train("whole", *ASYNC, "train.steps=9", ranks=2)
    assert run.event("resume")[0]["step"] == 3 and run.column("loss") == whole.column("loss")
    assert run.checkpoints == whole.checkpoints, "nothing half written is left"
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))
