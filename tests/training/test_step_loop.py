"""Work around the computation of a step: micro-batches made ahead, garbage collected in time, and
what FSDP2 communicates."""

import collections
import contextlib
import gc
import gzip
import json
import threading
import time
from unittest.mock import patch

import inject
import pytest
import torch

from fsdp_trainer.training.after_step.garbage import GarbageCollection
from fsdp_trainer.training.prefetch import Prefetcher
from fsdp_trainer.training.progress import Progress

CPU = torch.device("cpu")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "micro-batches"]


def prefetched(items, depth):
    return contextlib.closing(Prefetcher(items, depth, CPU))


def following(ahead):
    """Return what is left of the items."""
    with contextlib.suppress(StopIteration):
        while True:
            yield ahead.get()


def made(items, count):
    """An iterator that notes what it made."""
    for i in range(count):
        items.append(i)
        yield i


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_no_more_are_made_than_there_is_room_for(depth):
    items = []
    with prefetched(made(items, 9), depth) as ahead:
        assert ahead.get() == 0
        deadline = time.monotonic() + 300
        while len(items) < 1 + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(items) == 1 + depth
        assert list(following(ahead)) == list(range(1, 9))
        assert not list(following(ahead)), "it stays ended"
    assert not workers()


@pytest.mark.parametrize("depth", [0, 2])
def test_what_goes_wrong_ahead_is_heard_where_its_item_is_due(depth):
    def failing():
        yield from range(3)
        raise ValueError("row 3 is torn")

    with prefetched(failing(), depth) as ahead:
        assert [ahead.get() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="row 3 is torn"):
            ahead.get()
    assert not workers()


def test_the_thread_ends_however_the_loop_is_left():
    endless = iter(int, 1)
    with contextlib.suppress(KeyboardInterrupt), prefetched(endless, 2) as ahead:
        ahead.get()
        assert workers()
        raise KeyboardInterrupt
    assert not workers()


@pytest.mark.slow
@pytest.mark.further
def test_making_ahead_changes_nothing_and_a_run_goes_on_bitwise(train):
    how = ["batch.micro_rows=2", "batch.rows=7", "schedule=constant"]
    plain = train("plain", *how, "train.steps=6", ranks=2)
    train("ahead", *how, "train.steps=3", "data.prefetch=3", ranks=2)
    # may change where a run goes on
    ahead = train("ahead", *how, "train.steps=6", "data.prefetch=1", ranks=2)
    for column in ("loss", "grad_norm", "tokens", "supervised_tokens"):
        assert ahead.column(column) == plain.column(column)


@inject.fault
def torn_row():
    """Let rank 1 fail to read its fifth micro-batch, and look for threads that are left behind."""
    before = workers()
    with inject.fails("batch_read", OSError("the disk is gone"), rank=1, nth=5):
        yield
    if set(workers()) - set(before):  # of a run before, whose file hung
        raise AssertionError("a thread was left behind")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 4])
def test_a_row_that_one_rank_cannot_read_ends_the_run_on_all_in_its_own_step(train, ahead):
    run = train(
        "run",
        "train.steps=9",
        f"data.prefetch={ahead}",
        "batch.micro_rows=1",
        ranks=2,
        seam=torn_row(),
        code=1,
    )
    assert run.err.count("rank 1 cannot read its part of rows 6 to 11") == 1
    assert "the disk is gone" in run.err
    assert "Traceback" not in run.err
    assert run.column("step") == [1]
    assert run.events[-1]["exit_code"] == 1
    assert "rank 1 cannot read" in run.events[-1]["reason"]


@pytest.mark.slow
def test_the_run_ends_with_the_last_row_whatever_is_made_ahead(train):
    run = train("run", "train.epochs=1", "data.prefetch=8")
    plain = train("plain", "train.epochs=1")
    assert run.column("loss") == plain.column("loss")
    assert run.column("tokens") == plain.column("tokens")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_after_the_first_step_and_when_due_and_pythons_state_is_put_back(
    enabled,
):
    was = gc.isenabled()
    gc.freeze()  # as a start does with what it imports
    frozen = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        garbage = GarbageCollection(5)
        with (
            patch.object(gc, "collect", wraps=gc.collect) as collected,
            garbage.at_fixed_steps(),
        ):
            assert not gc.isenabled()
            at = []
            for step in range(11, 26):
                before = collected.call_count
                if garbage.due(Progress(step)):
                    garbage.run(Progress(step))
                at += [step] * (collected.call_count - before)
            assert at == [11, 15, 20, 25]
            assert gc.get_freeze_count() > frozen
        assert gc.isenabled() == enabled, (
            "a second run in this process must find the first one's model gone"
        )
        assert gc.get_freeze_count() == 0, (
            "a second run in this process must find the first one's model gone"
        )
        garbage = GarbageCollection(None)
        with garbage.at_fixed_steps():
            assert not garbage.due(Progress(1))
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
        gc.unfreeze()


@contextlib.contextmanager
def counted_objects():
    """Prints how many objects Python's collector knows of after each of its collections in
    training, before what was frozen."""
    real = gc.collect

    def collect(*args):
        result = real(*args)
        print("tracked", len(gc.get_objects()), flush=True)
        return result

    with patch.object(gc, "collect", collect):
        yield


@pytest.mark.slow
@pytest.mark.further
def test_many_steps_leave_nothing_behind(train):
    run = train(
        "run", "train.steps=150", "train.gc_every=25", "logging.every=10", seam=counted_objects
    )
    tracked = [int(line.split()[1]) for line in run.out.splitlines() if line.startswith("tracked ")]
    assert len(tracked) >= 7, tracked
    assert tracked[-1] <= tracked[2] + 100, tracked


def gathered(run):
    """Return how often each unit was gathered in the profiled step of rank 0."""
    with gzip.open(next((run.folder / "profile").glob("*.json.gz"))) as file:
        names = [e.get("name", "") for e in json.load(file)["traceEvents"]]
    return collections.Counter(
        name.split("(")[1][:-1] for name in names if name.startswith("FSDP::all_gather (")
    )


@pytest.mark.slow
@pytest.mark.further
def test_backward_gathers_the_blocks_but_not_the_embedding(train):
    run = train(
        "run",
        "model.tie_word_embeddings=false",
        "batch.micro_rows=1",
        "train.steps=2",
        "profile.steps=2",
        ranks=2,
    )
    assert gathered(run) == {
        "model.layers.0": 6,
        "model.layers.1": 6,
        "model.embed_tokens": 3,
        "model.norm, lm_head": 3,
    }


@contextlib.contextmanager
def told_groups():
    import torch.distributed as dist

    real = dist.new_group

    def new_group(*args, **kwargs):
        print("group", kwargs.get("group_desc"))
        return real(*args, **kwargs)

    with patch.object(dist, "new_group", new_group):
        yield


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13")
@pytest.mark.parametrize(
    ("ranks", "how", "groups"),
    [
        (2, ["sharding.separate_reduce_scatter=true"], 1),
        pytest.param(2, ["sharding.reduce_scatter_buffers=2"], 0, marks=pytest.mark.slow),
        pytest.param(
            4,
            ["sharding.separate_reduce_scatter=true", "sharding=hsdp", "sharding.replicas=2"],
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.grid(1)
def test_gradients_are_the_same_however_they_travel(train, ranks, how, groups):
    common = ["train.steps=4", "batch.micro_rows=1"]
    other = [
        option for option in how if not option.startswith(("sharding.separate", "sharding.reduce"))
    ]
    run, plain = (
        train("run", *common, *how, ranks=ranks, seam=told_groups),
        train("plain", *common, *other, ranks=ranks),
    )
    assert run.column("loss") == plain.column("loss")
    assert run.column("grad_norm") == plain.column("grad_norm")
    assert run.out.count("group fsdp_reduce_scatter") == groups


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (["sharding.messages=symmetric"], "gloo on a CPU has none"),
        (["sharding.messages=registered", "launch.device=cpu"], "gloo on a CPU has none"),
        (
            ["sharding=ddp", "sharding.separate_reduce_scatter=true"],
            "ddp gathers and scatters nothing",
        ),
        (
            ["sharding.messages=symmetric", "sharding.reduce_scatter_buffers=2"],
            "symmetric messages share one buffer",
        ),
    ],
    ids=str,
)
def test_communication_that_cannot_be_had_is_refused(train, how, reason):
    if torch.cuda.is_available() and how == ["sharding.messages=symmetric"]:
        pytest.skip("a GPU may have it")
    run = train("run", "train.steps=1", *how, code=2)
    assert reason in run.err
    assert not run.metrics


def test_communication_that_the_installed_torch_lacks_is_refused(train):
    run = train(
        "run",
        "train.steps=1",
        "sharding.messages=symmetric",
        "sharding.reduce_scatter_buffers=3",
        seam=inject.around("torch_version", torch_2_11),
        code=2,
    )
    assert "needs torch 2.12; installed is 2.11.0" in run.err
    assert "needs torch 2.13; installed is 2.11.0" in run.err


def torch_2_11(_real, _package):
    return "2.11.0+cu128"
