"""A disk that is full, broken, read-only or slow, and trackers that hang: told, tried again, and
training continues."""

import contextlib
import errno
import os
import subprocess
import threading
import time
from functools import partial
from unittest.mock import patch

import inject
import pytest
from inject import at, at_phases, quick_retries, together
from stored import assert_bitwise_equal, end_of, newest, stored
from world import read_lines

from fsdp_trainer.observe.console import Console
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.trackers import Trackers

HOW = ["schedule=constant", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9"]


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(folder, MiB)`: a file system of its own there."""
    mounted = []

    def mount(folder, size):
        folder.mkdir(parents=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", folder], capture_output=True
        ).returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Leave no byte."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


def empty(folder):
    (folder / "ballast").unlink(missing_ok=True)


def room_from_step_6(folder):
    """Each rank makes room before it writes its shard: no rank writes ahead of another's room."""
    return at("shards", partial(empty, folder), step=6)


@pytest.fixture(scope="module")
def undisturbed(world, inputs, tmp_path_factory):
    return world.train(
        tmp_path_factory.mktemp("whole") / "run",
        *(f"{k}={v}" for k, v in inputs.items()),
        *HOW,
        ranks=2,
    )


def assert_the_same(run, undisturbed):
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.column("loss") == undisturbed.column("loss")
    assert_bitwise_equal(stored(newest(run)), stored(newest(undisturbed)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.grid(1)
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_and_no_line(
    train, undisturbed, small_disk, tmp_path, mode
):
    disk = small_disk(tmp_path / "disk", 8)
    seam = together(at_phases({(4, "shards"): partial(fill, disk)}), room_from_step_6(disk))
    run = train(
        "run", *HOW, f"run.root={disk}", "run.name=run", f"checkpoint={mode}", ranks=2, seam=seam
    )
    run.folder = disk / "run"
    assert_the_same(run, undisturbed)
    (failed,) = run.event("checkpoint_failed")
    assert failed["step"] == 4
    assert "No space left" in failed["error"]
    assert "rank " in failed["error"]
    assert run.checkpoints == ["step-00000002", "step-00000006"], "and nothing half written"
    assert [e["event"] for e in run.events] == [
        "start",
        "checkpoint",
        "checkpoint_failed",
        "checkpoint",
        "end",
    ], "in their order"


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_is_started_again_on_a_full_disk_goes_on(
    train, undisturbed, small_disk, tmp_path
):
    disk = small_disk(tmp_path / "disk", 8)
    how = [*HOW, f"run.root={disk}", "run.name=run"]
    train("run", *how, "train.steps=4", ranks=2)
    (
        disk / "run" / "checkpoints" / "step-00000004" / "MANIFEST.json"
    ).unlink()  # as if it had been killed before
    fill(disk)
    run = train("run", *how, ranks=2, seam=together(quick_retries(), room_from_step_6(disk)))
    run.folder = disk / "run"
    assert_the_same(run, undisturbed)
    assert run.event("resume")[0]["step"] == 2
    assert run.event("checkpoint_failed")[0]["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
@pytest.mark.grid(1)
def test_writes_that_fail_for_two_steps_cost_one_checkpoint_and_no_line(train, undisturbed, error):
    run = train("run", *HOW, ranks=2, seam=inject.broken_writes((4, 5), error))
    assert_the_same(run, undisturbed)
    assert "metrics.jsonl cannot be written" in run.out
    assert "metrics.jsonl is written again; nothing is missing" in run.out
    assert [e["event"] for e in run.events] == [
        "start",
        "checkpoint",
        "checkpoint_failed",
        "checkpoint",
        "end",
    ]
    assert (
        f"rank 0 cannot write the checkpoint {run.folder}/checkpoints/step-00000004"
        in run.event("checkpoint_failed")[0]["error"]
    )
    assert run.checkpoints == ["step-00000002", "step-00000006"]


def remount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


@pytest.mark.slow
def test_a_folder_that_turns_read_only_costs_one_checkpoint(
    train, undisturbed, small_disk, tmp_path
):
    disk = small_disk(tmp_path / "run" / "checkpoints", 8)
    seam = at_phases(
        {
            (4, "forward"): partial(remount, disk, "ro"),
            (6, "forward"): partial(remount, disk, "rw"),
        },
    )
    run = train("run", *HOW, ranks=2, seam=seam)
    assert_the_same(run, undisturbed)
    assert run.checkpoints == ["step-00000002", "step-00000006"]
    assert "Read-only file system" in run.event("checkpoint_failed")[0]["error"]


@pytest.mark.slow
def test_a_stop_whose_checkpoint_finds_no_room_does_not_say_75(train, small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", 8)
    how = [*HOW, f"run.root={disk}", "run.name=run", "train.time_limit=1s", "checkpoint.every=null"]
    how += ["checkpoint.patience=2s"]
    run = train(
        "run",
        *how,
        seam=at_phases({(1, "clip"): partial(fill, disk), (1, "end"): partial(empty, disk)}),
        code=1,
    )
    run.folder = disk / "run"
    assert run.err.count("could not be written, again and again") == 1
    assert "No space left" in run.err
    assert "Traceback" not in run.err
    assert end_of(run) == ("end", 1)
    assert run.checkpoints == []


@pytest.mark.slow
def test_an_export_that_finds_no_room_is_done_by_the_next_start(train, small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", 8)
    how = [*HOW, f"run.root={disk}", "run.name=run", "checkpoint.export_hf=true"]
    run = train(
        "run",
        *how,
        ranks=2,
        seam=at_phases({(6, "export"): partial(fill, disk), (6, "end"): partial(empty, disk)}),
        code=1,
    )
    run.folder = disk / "run"
    assert run.err.count("cannot write the export") == 1
    assert "No space left" in run.err
    assert "Traceback" not in run.err
    assert end_of(run) == ("end", 1)
    assert run.checkpoints[-1] == "step-00000006"
    assert not (run.folder / "hf").exists()
    again = train("run", *how, ranks=2)
    assert "already finished" in again.out
    assert (run.folder / "hf" / "model.safetensors").exists()


def test_lines_that_the_disk_refuses_are_written_later_in_their_order_and_once(tmp_path):
    said: list[str] = []
    records = Records(tmp_path, said.append)
    records.write([{"step": 1}])
    write, budget = os.write, [7, 0, 0]

    def short_of_room(file, data):
        if not budget:
            return write(file, data)
        if not (room := budget.pop(0)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, bytes(data[:room]))

    with patch.object(os, "write", short_of_room):
        for step in (2, 3, 4):
            records.write([{"step": step}])
    assert [line["step"] for line in read_lines(records.metrics.path)] == [1, 2, 3, 4]
    assert len(said) == 2
    assert "No space left" in said[0]
    assert "nothing is missing" in said[1]


def test_what_memory_cannot_keep_is_counted(tmp_path):
    said: list[str] = []
    records = Records(tmp_path / "gone", said.append)
    with inject.setting("records_kept_bytes", 150):
        for _ in range(10):
            records.event("e", text="." * 60)
    (tmp_path / "gone").mkdir()
    records.event("last")
    assert len(read_lines(records.events.path)) == 3
    assert "but for 8 lines" in said[-1]


def test_a_slow_disk_is_told(tmp_path):
    said: list[str] = []
    with (
        inject.setting("slow_disk_seconds", 0.1),
        patch.object(os, "fsync", lambda file: time.sleep(0.2)),
    ):
        Records(tmp_path, said.append).write([{"step": 1}])
    assert len(said) == 1
    assert "the disk took" in said[0]


def test_an_earlier_attempts_lines_are_cut_on_a_full_disk_too(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", 1)
    records = Records(disk)
    records.write([{"step": step} for step in range(1, 9)])
    fill(disk)
    records.cut_after(5)
    assert [line["step"] for line in read_lines(records.metrics.path)] == [1, 2, 3, 4, 5]


def test_a_cut_that_the_disk_refuses_is_done_before_the_next_line(tmp_path):
    records = Records(tmp_path, lambda text: None)
    records.write([{"step": step} for step in range(1, 5)])
    with patch.object(os, "truncate", side_effect=OSError(errno.EIO, "broken")):
        records.cut_after(2)
        records.write([{"step": 3, "again": True}])
    records.write([{"step": 4, "again": True}])
    assert [line.get("again") for line in read_lines(records.metrics.path)] == [
        None,
        None,
        True,
        True,
    ]


def test_lines_that_a_broken_disk_did_not_take_before_the_run_was_taken_back_are_never_written(
    tmp_path,
):
    records = Records(tmp_path, lambda text: None)
    records.write([{"step": 1}, {"step": 2}])
    with patch.object(os, "write", side_effect=OSError(errno.EIO, "broken")):
        for step in (3, 4, 5):
            records.write([{"step": step}])
        records.cut_after(3)
        records.write([{"step": 4, "again": True}])
    records.write([{"step": 5, "again": True}])
    assert [(line["step"], line.get("again")) for line in read_lines(records.metrics.path)] == [
        (1, None),
        (2, None),
        (3, None),
        (4, True),
        (5, True),
    ]


def test_nothing_comes_after_the_end(tmp_path):
    """A checkpoint that is committed while the process leaves, because another rank has died, is
    found by the next start all the same."""
    records = Records(tmp_path, lambda text: None)
    records.event("end", exit_code=1)
    records.close()
    records.event("checkpoint", step=3)
    assert records.last_event()["event"] == "end"


def test_a_log_that_cannot_be_written_is_no_reason_to_stop():
    with open("/dev/full", "w") as full:
        console = Console(quiet=False, stream=full)
        console.say("a line")
        console.progress("another")
        with contextlib.suppress(OSError):
            full.close()


# --- trackers -----------------------------------------------------------------------------------


def hang(*_):
    """Wait as a tracker does without a network."""
    time.sleep(100)


@pytest.mark.slow
def test_a_tracker_that_hangs_costs_nothing(train):
    run = train(
        "run",
        "train.steps=3",
        "logging.wandb=offline",
        seam=inject.together(
            inject.around("wandb", hang), inject.setting("tracker_close_seconds", 0.3)
        ),
    )
    assert "wandb did not close within" in run.out
    assert end_of(run) == ("end", 0)
    assert max(run.column("step_seconds")) < 50


def test_a_tracker_that_lags_behind_loses_lines_and_says_so_once(tmp_path):
    from fsdp_trainer.config.schema import Logging
    from fsdp_trainer.observe.trackers import Tracker

    said: list[str] = []
    slow = Tracker("wandb", lambda values, step: time.sleep(3), lambda code: None)
    with (
        inject.around("wandb", lambda *_: slow),
        inject.setting("tracker_waiting", 2),
    ):
        trackers = Trackers(Logging(wandb="online"), tmp_path, {}, said.append)
        started = time.monotonic()
        for step in range(50):
            trackers.log({"step": step, "loss": 1.0})
        assert time.monotonic() - started < 60
        assert len(said) == 1
        assert "does not keep up" in said[0]


def test_a_tracker_with_a_full_queue_is_closed_at_the_end(tmp_path):
    from fsdp_trainer.config.schema import Logging
    from fsdp_trainer.observe.trackers import Tracker

    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def log(values, step):
        begun.set()
        go_on.wait(60)

    slow = Tracker("wandb", log, lambda code: closed.set())
    with inject.around("wandb", lambda *_: slow), inject.setting("tracker_waiting", 2):
        trackers = Trackers(Logging(wandb="online"), tmp_path, {}, lambda line: None)
        trackers.log({"step": 0, "loss": 1.0})
        assert begun.wait(60)
        for step in range(1, 9):
            trackers.log({"step": step, "loss": 1.0})
        threading.Timer(0.2, go_on.set).start()
        trackers.close(0)
    assert closed.is_set()


@pytest.mark.slow
def test_tensorboard_shows_no_step_twice_after_a_restart(train):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = ["checkpoint.every=2", "logging.tensorboard=true", "schedule=constant"]
    run = train("run", *how, "train.steps=5")
    killed = [
        path for path in (run.folder / "checkpoints").iterdir() if path.name == "step-00000005"
    ]
    os.rename(killed[0], killed[0].with_name(".lost"))  # as if it had been killed before
    train("run", *how, "train.steps=7")
    shown = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [scalar.step for scalar in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
