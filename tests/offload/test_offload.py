"""States on the host and on a disk: the same bits as on the device, and what can go wrong."""

import errno
import os
import time
from functools import partial

import inject
import pytest
from pairs import write_pairs
from stored import assert_byte_equal, checkpoint, newest, stored
from world import SPIKY

CPU, DISK = "optim.offload=cpu", "optim.offload=disk"
RUNS = {
    "bfloat16": (2, ["precision.param_dtype=bfloat16", "activation_checkpoint=full"]),
    "three ranks, twice a step": (3, ["batch.micro_rows=1"]),
    "tensor groups": (4, ["sharding.tensor=2"]),
    "replicas, and gradients summed once": (
        4,
        ["sharding=hsdp", "sharding.replicas=2", "sharding.accumulate=unsharded"],
    ),
    "adapters": (2, ["adapter=lora"]),
    "moments in eight bits": (2, ["optim=adamw_8bit"]),
    "weights in bfloat16": (
        2,
        ["precision.param_dtype=bfloat16", "precision.master_dtype=bfloat16"],
    ),
    "lion": (1, ["optim=lion"]),
    "sgd": (2, ["optim=sgd"]),
    "gathered blocks": (2, ["sharding.reshard_after_forward=false", "sharding.blocks_per_unit=2"]),
}
"""Numbers of ranks, and overrides."""


@inject.fault
def many_small_parts():
    """Divide the states of a tiny model into several files, parts and slices."""
    sizes = {"file_bytes": 2**18, "part_bytes": 2**14, "sliced_bytes": 2**14, "quantum": 4096}
    with inject.together(*(inject.setting(f"state_{name}", n) for name, n in sizes.items()))():
        yield


def assert_same(one, other):
    """Raise AssertionError if the newest checkpoints of two runs differ in a bit."""
    assert_byte_equal(stored(newest(one)), stored(newest(other)))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), RUNS.values(), ids=RUNS.keys())
@pytest.mark.grid(1)
def test_every_place_of_states_gives_the_same_bits(train, ranks, words):
    words = ["train.steps=2", "data.validation=0.2", "train.validate_every=1", *words]
    device = train("device", *words, ranks=ranks)
    for name, place in (("host", CPU), ("disk", DISK)):
        elsewhere = train(name, *words, place, ranks=ranks)
        assert elsewhere.column("loss") == device.column("loss")
        assert_same(elsewhere, device)


@pytest.mark.slow
@pytest.mark.further
def test_weights_to_compute_with_may_be_on_the_host_too(train):
    words = ["train.steps=3", "precision.param_dtype=bfloat16", "batch.micro_rows=1"]
    device = train("device", *words, ranks=2)
    assert_same(train("disk", *words, DISK, "sharding.cpu_offload=true", ranks=2), device)


@pytest.mark.slow
@pytest.mark.further
def test_a_reference_that_is_read_before_the_first_step_has_the_weights(train, tmp_path):
    words = ["train.steps=2", "objective=dpo", f"data.path={write_pairs(tmp_path / 'pairs.jsonl')}"]
    device, disk = (
        train(name, *words, f"data.cache={tmp_path / name}-cache", place, ranks=2)
        for name, place in (("device", "optim.offload=none"), ("disk", DISK))
    )
    assert disk.column("loss") == device.column("loss")
    assert_same(disk, device)


@pytest.mark.further
def test_states_in_many_files_parts_and_slices_give_the_same_bits_in_each_checkpoint(train):
    """The checkpoints link the files, and later updates leave these alone."""
    words = ["train.steps=5", "checkpoint.every=2", "checkpoint.keep=9"]
    device = train("device", *words, ranks=2)
    disk = train("disk", *words, DISK, ranks=2, seam=many_small_parts())
    for step in (2, 4, 5):
        one, other = checkpoint(disk, step), checkpoint(device, step)
        assert_byte_equal(stored(one), stored(other))
        assert len(list(one.glob("__1_*.distcp"))) > 1
    assert not (disk.folder / "states").exists()


@pytest.mark.slow
def test_large_parameters_in_host_memory_are_updated_as_a_whole(train):
    words = ["train.steps=2"]
    host = train("host", *words, CPU, seam=many_small_parts())
    assert_same(host, train("device", *words))


@pytest.mark.slow
def test_random_rounding_of_large_parameters_is_that_of_their_numbers_places(train):
    """A part of a parameter would draw the random bits of its first numbers again."""
    words = ["train.steps=2", "precision.param_dtype=bfloat16", "precision.master_dtype=bfloat16"]
    disk = train("disk", *words, DISK, seam=many_small_parts())
    assert_same(disk, train("device", *words))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.grid(1)
def test_a_run_goes_on_with_its_states_in_another_place(train, mode):
    words = ["schedule=constant", f"checkpoint.mode={mode}"]
    whole = train("whole", *words, "train.steps=8", ranks=2)
    for step, place in ((2, DISK), (4, CPU), (6, DISK), (8, "optim.offload=none")):
        moved = train("moved", *words, f"train.steps={step}", place, ranks=2)
    assert_same(moved, whole)


@pytest.mark.slow
@pytest.mark.further
def test_a_rewind_leaves_the_checkpoints_alone_that_link_the_states(train):
    words = [*SPIKY, "train.on_spike=rewind", "train.steps=22"]
    device = train("device", *words, ranks=2, seam=inject.garbage())
    disk = train("disk", *words, DISK, ranks=2, seam=inject.garbage())
    assert len(device.event("rewind")) == len(disk.event("rewind")) == 1
    for step in (6, 12, 18, 22):
        assert_byte_equal(stored(checkpoint(disk, step)), stored(checkpoint(device, step)))


@inject.fault
def killed_in_an_update(step: int):
    """Kill the process in the middle of an update."""
    steps = []

    def update(real, *args):
        steps.append(args)
        if len(steps) == step:
            inject.kill()
        return real(*args)

    with inject.around("state_part", update)():
        yield


@pytest.mark.slow
def test_a_crash_in_an_update_is_noticed_and_the_checkpoint_resumes(train, tmp_path):
    words = ["train.steps=6", "checkpoint.every=2", "schedule=constant"]
    whole = train("whole", *words, ranks=1)
    with pytest.raises(AssertionError, match=r"died|ended"):
        train("killed", *words, DISK, ranks=1, seam=killed_in_an_update(5))
    run = train("killed", *words, DISK, ranks=1)
    assert "an update was cut off when the run ended" in run.out
    assert_same(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["state_file", "state_piece"])
def test_a_full_disk_ends_the_run_with_the_place_and_the_reason(train, point):
    full = OSError(errno.ENOSPC, "No space left on device")
    words = ["train.steps=2", DISK]
    run = train("run", *words, ranks=2, code=1, seam=inject.fails(point, full, rank=1))
    assert "optimizer's states in" in run.err
    assert "rank-" in run.err
    assert "No space left on device" in run.err
    assert "optim.offload_path=FOLDER" in run.err


def refuse_direct_access(real, path, flags, *args):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(path, flags, *args)


@pytest.mark.slow
def test_a_file_system_without_direct_access_is_used_without_it(train):
    words = ["train.steps=2"]
    run = train("run", *words, DISK, seam=inject.around("state_open", refuse_direct_access))
    assert_same(run, train("device", *words))


def move_late(real, *args):
    time.sleep(0.05)
    return real(*args)


@pytest.mark.slow
def test_a_disk_that_makes_most_of_a_step_is_named_with_its_rate(train):
    slow = train("slow", "train.steps=5", DISK, seam=inject.around("state_piece", move_late))
    assert "updates are" in slow.out
    assert slow.event("slow_states")[0]["share"] > 0.5


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([DISK, "optim=muon"], "optim=adamw"),
        ([DISK, "optim=lamb"], "optim=adamw"),
        ([CPU, "sharding.cpu_offload=true"], "sharding.cpu_offload=false"),
        ([CPU, "sharding=ddp"], "sharding=fsdp"),
        (["optim.offload_path=/tmp"], "optim.offload=disk"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_what_can(train, words, wanted):
    assert wanted in train("refused", *words, code=2).err


@pytest.mark.slow
@pytest.mark.further
def test_norms_of_whole_matrices_are_computed_on_the_host(train):
    words = ["train.steps=3", "optim=lamb"]
    assert_same(train("host", *words, CPU, ranks=2), train("device", *words, ranks=2))


def list_files(place, listed):
    """Write how many files of states rank 0 has in a folder."""
    listed.write_text(str(len(list(place.glob("*/rank-0/*.states")))))


@pytest.mark.slow
def test_the_files_are_where_they_are_wanted_and_gone_after_the_run(train, tmp_path):
    place, listed = tmp_path / "disk", tmp_path / "listed"
    look = inject.at("update", partial(list_files, place, listed))
    train("run", "train.steps=1", DISK, f"optim.offload_path={place}", seam=look)
    assert int(listed.read_text()) > 0
    assert not list(place.glob("*/*"))
