"""A disk that is full, broken, read-only or slow, and trackers that hang: told, tried again, and
training continues."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from functools import partial
from unittest.mock import patch

import inject
import pytest
from foreign import export
from inject import at, at_phases, quick_retries, together
from stored import assert_undisturbed, checkpoint, end_of
from world import read_lines, wait_until
from zoo import make_folder

from fsdp_trainer.config.schema import Logging
from fsdp_trainer.extensions import Tracker
from fsdp_trainer.observe.console import Console
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.tracker_threads import Trackers

HOW = "schedule=constant train.steps=6 checkpoint.every=2 checkpoint.keep=9"


@pytest.fixture
def small_disk():
    """`small_disk(folder, MiB)`: a file system of its own there."""
    mounted = []

    def mount(folder, size):
        folder.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", folder]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disk(small_disk, tmp_path):
    return small_disk(tmp_path / "disk", 8)


@pytest.fixture
def train_there(train, disk):
    """Return `train_there(*overrides)`: a training whose run is on the small disk."""

    def start(*words, **options):
        run = train("run", HOW, f"run.root={disk} run.name=run", *words, **options)
        run.folder = disk / "run"
        return run

    return start


def fill(folder):
    """Leave no byte."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


def empty(folder):
    """Delete the ballast and wait for its room: another rank may have begun to delete it."""
    (folder / "ballast").unlink(missing_ok=True)
    wait_until(lambda: shutil.disk_usage(folder).free > 2**20)


def room_from_step_6(folder):
    """Each rank makes room before it writes its shard: no rank writes ahead of another's room."""
    return at("shards", partial(empty, folder), step=6)


def assert_one_checkpoint_is_lost(run, ledger, reason):
    assert_undisturbed(run, ledger.run("every step"))
    assert run.checkpoints == ["step-00000002", "step-00000006"], "and nothing half written"
    (failed,) = run.event("checkpoint_failed")
    assert failed["step"] == 4
    assert reason in failed["error"]
    assert "rank " in failed["error"]


def test_a_disk_that_is_full_when_a_run_starts_again_costs_one_checkpoint_and_no_line(
    train_there, ledger, disk
):
    run = train_there("train.steps=4", ranks=2)
    shutil.rmtree(checkpoint(run, 4))  # as if it had been killed before
    fill(disk)
    run = train_there(ranks=2, seam=together(quick_retries(), room_from_step_6(disk)))
    assert_one_checkpoint_is_lost(run, ledger, "No space left")
    assert run.event("resume")[0]["step"] == 2


def test_writes_that_fail_for_two_steps_cost_one_checkpoint_and_no_line(train, ledger):
    run = train("run", HOW, ranks=2, seam=inject.broken_writes((4, 5), errno.EIO))
    where = f"rank 0 cannot write the checkpoint {checkpoint(run, 4)}"
    assert_one_checkpoint_is_lost(run, ledger, where)
    assert "metrics.jsonl cannot be written" in run.out
    assert "metrics.jsonl is written again; nothing is missing" in run.out
    assert [e["event"] for e in run.events] == [
        "start",
        "checkpoint",
        "checkpoint_failed",
        "checkpoint",
        "end",
    ]


def remount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def test_a_folder_that_turns_read_only_costs_one_checkpoint(train, ledger, small_disk, tmp_path):
    checkpoints = small_disk(tmp_path / "run/checkpoints", 8)
    turns = {(4, "forward"): "ro", (6, "forward"): "rw"}
    seam = at_phases({when: partial(remount, checkpoints, how) for when, how in turns.items()})
    run = train("run", HOW, ranks=2, seam=seam)
    assert_one_checkpoint_is_lost(run, ledger, "Read-only file system")


def assert_it_ends_for_want_of_room(run, message):
    assert run.err.count(message) == 1
    assert "No space left" in run.err
    assert end_of(run) == ("end", 1)


def test_a_stop_whose_checkpoint_finds_no_room_does_not_say_75(train_there, disk):
    how = "train.time_limit=1s checkpoint.every=null checkpoint.patience=2s"
    acts = {(1, "clip"): partial(fill, disk), (1, "end"): partial(empty, disk)}
    run = train_there(how, seam=at_phases(acts), code=1)
    assert_it_ends_for_want_of_room(run, "could not be written, again and again")
    assert run.checkpoints == []


def test_an_export_that_finds_no_room_is_done_by_the_next_start(train_there, disk):
    how = "checkpoint.export_hf=true train.steps=2"
    acts = {(2, "export"): partial(fill, disk), (2, "end"): partial(empty, disk)}
    run = train_there(how, ranks=2, seam=at_phases(acts), code=1)
    assert_it_ends_for_want_of_room(run, "cannot write the export")
    assert run.checkpoints[-1] == "step-00000002"
    assert not (run.folder / "hf").exists()
    assert "already finished" in train_there(how, ranks=2).out
    assert (run.folder / "hf/model.safetensors").exists()


@pytest.mark.parametrize("form", ["torchtitan", "meta"])
def test_an_export_by_torch_that_finds_no_room_says_so_and_leaves_nothing(
    small_disk, tmp_path, capsys, form
):
    source = make_folder(tmp_path / "hf", vocab_size=20_000)
    disk = small_disk(tmp_path / "disk", 1)
    export(source, disk / "new/out", f"form={form}", code=1)
    assert "No space left" in capsys.readouterr().err
    assert [*disk.iterdir()] == []


# --- records ------------------------------------------------------------------------------------


@pytest.fixture
def said():
    """Return the list of lines that `records` says."""
    return []


@pytest.fixture
def records(tmp_path, said):
    return Records(tmp_path, said.append)


def write_steps(records, *steps, **more):
    for step in steps:
        records.write([{"step": step, **more}])


def steps_of(records):
    return [line["step"] for line in read_lines(records.metrics.path)]


def test_lines_that_the_disk_refuses_are_written_later_in_their_order_and_once(records, said):
    write_steps(records, 1)
    write, budget = os.write, [7, 0, 0]

    def short_of_room(file, data):
        if not budget:
            return write(file, data)
        if not (room := budget.pop(0)):
            raise inject.no_space()
        return write(file, bytes(data[:room]))

    with patch.object(os, "write", short_of_room):
        write_steps(records, 2, 3, 4)
    assert steps_of(records) == [1, 2, 3, 4]
    assert len(said) == 2
    assert "No space left" in said[0]
    assert "nothing is missing" in said[1]


def test_what_memory_cannot_keep_is_counted(tmp_path, said):
    records = Records(tmp_path / "gone", said.append)
    with inject.setting("records_kept_bytes", 150):
        for _ in range(10):
            records.event("e", text="." * 60)
    (tmp_path / "gone").mkdir()
    records.event("last")
    assert len(read_lines(records.events.path)) == 3
    assert "but for 8 lines" in said[-1]


def test_a_slow_disk_is_told(records, said):
    slow = patch.object(os, "fsync", lambda file: time.sleep(0.2))
    with inject.setting("slow_disk_seconds", 0.1), slow:
        write_steps(records, 1)
    assert len(said) == 1
    assert "the disk took" in said[0]


def test_an_earlier_attempts_lines_are_cut_on_a_full_disk_too(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", 1)
    records = Records(disk)
    write_steps(records, *range(1, 9))
    fill(disk)
    records.cut_after(5)
    assert steps_of(records) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "broken, written, unwritten", [("truncate", (1, 2, 3, 4), ()), ("write", (1,), (2, 3, 4))]
)
def test_lines_that_were_taken_back_on_a_broken_disk_are_neither_kept_nor_written(
    records, broken, written, unwritten
):
    write_steps(records, *written)
    with patch.object(os, broken, side_effect=OSError(errno.EIO, "broken")):
        write_steps(records, *unwritten)
        records.cut_after(2)
        write_steps(records, 3, again=True)
    write_steps(records, 4, again=True)
    lines = read_lines(records.metrics.path)
    assert [(line["step"], "again" in line) for line in lines] == [
        (1, False), (2, False), (3, True), (4, True)
    ]  # fmt: skip


def test_nothing_comes_after_the_end(records):
    """A checkpoint that is committed while the process leaves, because another rank has died, is
    found by the next start all the same."""
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


def test_a_tracker_that_hangs_costs_nothing(train):
    hangs = inject.around("open_tracker", hang), inject.setting("tracker_close_seconds", 0.3)
    run = train("run", "train.steps=3 logging.wandb=offline", seam=together(*hangs))
    assert "wandb did not close within" in run.out
    assert end_of(run) == ("end", 0)
    assert max(run["step_seconds"]) < 50


def test_a_tracker_that_lags_behind_gets_each_step_in_the_end_and_nothing_waits_for_it(
    tmp_path, said
):
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    lines, logged = [{"step": step, "loss": step / 2} for step in range(50)], []
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))

    class Slow(Tracker):
        def log(self, values, step):
            logged.append(values | {"step": step})
            begun.set()
            go_on.wait(30)
            go_on.set()

        def close(self, exit_code):
            closed.set()

    slow = inject.around("open_tracker", lambda real, kind, run: Slow(run))
    with slow, inject.setting("tracker_waiting", 2):
        trackers = Trackers(Logging(wandb="online"), tmp_path, {}, said.append)
        trackers.log(lines[0])
        assert begun.wait(60)
        for step, line in enumerate(lines[1:], 1):
            trackers.log(line)
            if step == 20:
                trackers.texts({"answer": "four"}, step)
        assert not go_on.is_set(), "nothing waits for it"
        threading.Timer(0.2, go_on.set).start()
        trackers.close(0)
    assert closed.is_set()
    assert logged == lines
    assert not said
