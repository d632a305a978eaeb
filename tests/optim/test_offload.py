"""States on the host and on a disk: the same bits as on the device, and what can go wrong."""

import errno
import os
import time
from functools import partial

import inject
import pytest
from named_runs import RUNS
from stored import assert_byte_equal, assert_undisturbed, checkpoint, go_on, newest, stored
from world import SPIKY, RankFailed

CPU, DISK = "optim.offload=cpu", "optim.offload=disk"


@inject.fault
def many_small_parts():
    """Divide the states of a tiny model into several files, parts and slices."""
    sizes = {"file_bytes": 2**18, "part_bytes": 2**14, "sliced_bytes": 2**14, "quantum": 4096}
    with inject.together(*(inject.setting(f"state_{name}", n) for name, n in sizes.items()))():
        yield


def assert_same(one, other):
    """Raise AssertionError if two runs differ in a loss, or their newest checkpoints in a bit."""
    assert one["loss"] == other["loss"]
    assert_byte_equal(stored(newest(one)), stored(newest(other)))


@pytest.mark.parametrize(
    "ranks, words, place",
    [
        (
            2,
            "precision.param_dtype=bfloat16 precision.master_dtype=bfloat16 optim=adamw_8bit"
            " batch.micro_rows=1 sharding.accumulate=unsharded",
            DISK,
        ),
        (2, "optim=lamb", CPU),
        (
            2,
            "precision.param_dtype=bfloat16 sharding.tensor=2 optim=lion adapter=lora",
            f"sharding.cpu_offload=true {DISK}",
        ),
    ],
)
def test_states_in_small_parts_in_every_place_give_the_same_bits(train, ranks, words, place):
    """Random rounding too: it depends on the places of the numbers in a parameter."""
    words = ["train.steps=2 data.validation=0.2 train.validate_every=1", *words.split()]
    device = train("device", *words, ranks=ranks)
    elsewhere = train("run", *words, *place.split(), ranks=ranks, seam=many_small_parts())
    assert_same(elsewhere, device)


def test_a_reference_that_is_read_before_the_first_step_has_the_weights(ledger):
    assert_same(ledger.run(words=(*RUNS["dpo"].words, DISK)), ledger.run("dpo"))


@pytest.mark.parametrize("place", [CPU, DISK])
def test_states_in_small_parts_give_the_same_bits_in_each_checkpoint(train, ledger, place):
    """Checkpoints link several files on a disk, and later updates leave these alone."""
    words = "schedule=constant train.steps=5 checkpoint.every=2 checkpoint.keep=9"
    elsewhere = train("run", words, place, ranks=2, seam=many_small_parts())
    for step in (2, 4, 5):
        one, other = (checkpoint(run, step) for run in (elsewhere, ledger.run("every step")))
        assert_byte_equal(stored(one), stored(other))
        assert (len(list(one.glob("__1_*.distcp"))) > 1) == (place == DISK)
    assert not (elsewhere.folder / "states").exists()


def test_a_run_goes_on_with_its_states_in_another_place(ledger, tmp_path):
    whole = ledger.run("every step")
    words = [f"checkpoint.resume={checkpoint(whole, 3)}"]
    for step, place in ((5, DISK), (7, CPU), (9, "optim.offload=none")):
        words += [f"checkpoint=async train.steps={step}", place]
        moved = go_on(ledger, "every step", tmp_path / "run", *words, ranks=2)
        words = []
    assert_undisturbed(moved, whole)


def test_a_rewind_leaves_the_checkpoints_alone_that_link_the_states(train):
    words = [*SPIKY, "train.on_spike=rewind train.steps=21"]
    device, disk = (
        train(place, *words, f"optim.offload={place}", seam=inject.garbage())
        for place in ("none", "disk")
    )
    assert len(device.event("rewind")) == len(disk.event("rewind")) == 1
    for step in (6, 12, 18, 21):
        assert_byte_equal(stored(checkpoint(disk, step)), stored(checkpoint(device, step)))


@inject.fault
def killed_in_an_update(step):
    """Kill the process in the middle of an update."""
    steps = []

    def update(real, *args):
        steps.append(args)
        if len(steps) == step:
            inject.kill()
        return real(*args)

    with inject.around("state_part", update)():
        yield


def test_a_crash_in_an_update_is_noticed_and_the_checkpoint_resumes(train, ledger):
    words = ["train.steps=6 checkpoint.every=2 schedule=constant", DISK]
    with pytest.raises(RankFailed, match="died"):
        train("run", *words, ranks=2, seam=killed_in_an_update(5))
    run = train("run", *words, ranks=2)
    assert "an update was cut off when the run ended" in run.out
    assert_undisturbed(run, ledger.run("every step"))


@pytest.mark.parametrize("point", ["state_file", "state_piece"])
def test_a_full_disk_ends_the_run_with_the_place_and_the_reason(train, point):
    full = inject.fails(point, inject.no_space(), rank=1)
    run = train("run", "train.steps=2", DISK, ranks=2, code=1, seam=full)
    assert "optimizer's states in" in run.err
    assert "rank-" in run.err
    assert "No space left on device" in run.err
    assert "optim.offload_path=FOLDER" in run.err


def refuse_direct_access(real, path, flags, *args):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(path, flags, *args)


def test_a_file_system_without_direct_access_is_used_without_it(train, ledger):
    refused = inject.around("state_open", refuse_direct_access)
    run = train("run", "schedule=constant train.steps=2", DISK, ranks=2, seam=refused)
    assert_undisturbed(run, ledger.run("every step"))


def move_late(real, *args):
    time.sleep(0.05)
    return real(*args)


def test_a_disk_that_makes_most_of_a_step_is_named_with_its_rate(train):
    slow = train("slow", "train.steps=5", DISK, seam=inject.around("state_piece", move_late))
    assert "updates are" in slow.out
    assert slow.event("slow_states")[0]["share"] > 0.5


def list_files(place, listed):
    """Write how many files of states rank 0 has in a folder."""
    listed.write_text(str(len(list(place.glob("*/rank-0/*.states")))))


def test_the_files_are_where_they_are_wanted_and_gone_after_the_run(train, tmp_path):
    place, listed = tmp_path / "disk", tmp_path / "listed"
    look = inject.at("update", partial(list_files, place, listed))
    train("run", "train.steps=1", DISK, f"optim.offload_path={place}", seam=look)
    assert int(listed.read_text()) > 0
    assert not list(place.glob("*/*"))
