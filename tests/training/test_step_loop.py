"""Work around the computation of a step: micro-batches made ahead, garbage collected in time, and
what FSDP2 communicates."""

import contextlib
import gc
import threading
import time
from unittest.mock import patch

import inject
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


@inject.fault
def torn_row():
    """Let rank 1 fail to read its fifth micro-batch, and look for threads that are left behind."""
    before = workers()
    with inject.fails("batch_read", OSError("the disk is gone"), rank=1, nth=5):
        yield
    if set(workers()) - set(before):  # of a run before, whose file hung
        raise AssertionError("a thread was left behind")


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_row_that_one_rank_cannot_read_ends_the_run_on_all_in_its_own_step(train, ahead):
    how = f"train.steps=9 data.prefetch={ahead} batch.micro_rows=1"
    run = train("run", how, ranks=2, seam=torn_row(), code=1)
    assert run.err.count("rank 1 cannot read its part of rows 6 to 11") == 1
    assert "the disk is gone" in run.err
    assert run["step"] == [1]
    assert run.events[-1]["exit_code"] == 1
    assert "rank 1 cannot read" in run.events[-1]["reason"]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_when_due_and_pythons_state_is_put_back(enabled):
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
        # a second run in this process must find the first one's model gone
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0
        garbage = GarbageCollection(None)
        with garbage.at_fixed_steps():
            assert not garbage.due(Progress(1))
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
        gc.unfreeze()


@contextlib.contextmanager
def counted_objects():
    """Print how many objects Python's collector knows of after each of its collections."""
    real = gc.collect

    def collect(*args):
        result = real(*args)
        print("tracked", len(gc.get_objects()), flush=True)
        return result

    with patch.object(gc, "collect", collect):
        yield


def test_many_steps_leave_nothing_behind(train):
    how = "train.steps=50 train.gc_every=5 logging.every=5"
    run = train("run", how, seam=counted_objects)
    tracked = [int(line.split()[1]) for line in run.out.splitlines() if line.startswith("tracked ")]
    assert len(tracked) >= 10, tracked
    assert tracked[-1] <= tracked[5] + 20, tracked


def test_communication_that_the_installed_torch_lacks_is_refused(train):
    how = "sharding.messages=symmetric sharding.reduce_scatter_buffers=3"
    run = train("run", how, seam=inject.around("torch_version", torch_2_11), code=2)
    assert "needs torch 2.12; installed is 2.11.0" in run.err
    assert "needs torch 2.13; installed is 2.11.0" in run.err


def test_stages_that_the_installed_torch_lacks_are_refused(train):
    seam = inject.around("torch_version", torch_2_15)
    run = train("run", "sharding.pipeline=2", seam=seam, code=2)
    assert "does not run with torch 2.15.0:  pip install 'torch<2.15'" in run.err


def torch_2_11(_real, _package):
    return "2.11.0+cu128"


def torch_2_15(_real, _package):
    return "2.15.0"


class PassedBytes(TorchDispatchMode):
    """Counts the bytes that operators read and write of matrices and codes; an update once.

    Products are not counted: they read their weights anyway.
    """

    free = (
        "view", "as_strided", "detach", "empty", "aten.t.", "alias", "slice", "transpose", "mm",
        "linear", "split", "expand", "select", "unbind", "permute",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if not any(word in str(operator) for word in self.free):
            read = tree_leaves((args, kwargs))
            written = [one for one in tree_leaves(out) if not any(one is each for each in read)]
            tensors = [x for x in (*read, *written) if isinstance(x, torch.Tensor)]
            self.count += sum(
                x.nbytes for x in tensors if x.numel() >= MATRIX or x.dtype == torch.uint8
            )
        return out


MATRIX = 2**17
"""Numbers of each matrix of the feed-forward layers, and more than any activation has."""
FEW_TOKENS = (
    "batch.seq_len=16 batch.rows=1 batch.micro_rows=1 train.steps=2 data.loss_on=all"
    " data.too_long=truncate data.max_lost=1 precision.param_dtype=bfloat16"
    " model.hidden_size=128 model.intermediate_size=1024"
)


@inject.fault
def counted(file):
    """Write the bytes of a step for each number of the matrices."""

    def count(real, runner, *args):
        with PassedBytes() as passed:
            result = real(runner, *args)
        sizes = [p.numel() for p in runner.forward_backward.model.parameters()]
        file.write_text(str(passed.count / sum(n for n in sizes if n >= MATRIX // 2)))
        return result

    with inject.around("train_step", count):
        yield


@pytest.mark.parametrize(
    "word, limit",
    {"adapter=none": 36, "adapter=lora": 0, "adapter=qlora": 47, "sharding=ddp": 49}.items(),
)  # qlora decodes twice: 12 bytes a number, of which a byte of codes holds 1.9
def test_a_step_of_whole_weights_passes_over_them_no_more_than_it_must(
    world, input_words, tmp_path, word, limit
):
    words, ranks = [*input_words, FEW_TOKENS, word], 1 + (word == "sharding=ddp")
    world.train(tmp_path / "run", *words, ranks=ranks, seam=counted(tmp_path / "bytes"))
    assert float((tmp_path / "bytes").read_text()) <= limit
