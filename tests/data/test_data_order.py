"""Rows: well filled, each sample once an epoch, and the same order for everyone."""

import gc
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import inject
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from texts import Lengths, Texts, turn
from world import lines_of

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.prepared_data import build_data
from fsdp_trainer.data.store.token_store import StoreWriter, TokenStore
from fsdp_trainer.data.tokens.samples import Sample
from fsdp_trainer.training.batches import Batches, BatchOptions, StepPlan


def one_by_one(lengths, capacity):
    """Best-fit decreasing as the textbook has it: how full each row is."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [f for f in free if f >= length]
        if fitting:
            free[free.index(min(fitting))] -= length
        else:
            free.append(capacity - length)
    return sorted(free)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_placing_equal_lengths_together_is_best_fit_decreasing(lengths, capacity):
    packing = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    rows = np.split(packing.documents, packing.offsets[1:-1]) if lengths else []
    assert sorted(capacity - sum(lengths[i] for i in row) for row in rows) == one_by_one(
        lengths, capacity
    )


def test_a_million_samples_are_packed_in_seconds_and_full():
    lengths = np.random.default_rng(0).integers(2, 4096, 1_000_000)
    packing = best_fit(lengths, 8192)
    assert lengths.sum() / (8192 * (len(packing.offsets) - 1)) > 0.999


def epoch_of(order, epoch=0):
    """Return (sample, first token, number of tokens) of all documents, row by row."""
    first = epoch * order.rows_per_epoch
    return [order.row(first + i) for i in range(order.rows_per_epoch)]


def samples_by_row(order, epoch=0):
    return [[sample for sample, _, _ in row] for row in epoch_of(order, epoch)]


def test_a_stream_fills_its_rows_and_is_cut_at_other_places_every_epoch():
    order = RowOrder(Texts([5, 9, 30, 11, 2]), 16, "stream", True, 0)
    first, second = epoch_of(order), epoch_of(order, 1)
    assert first != second
    assert sorted(first) != sorted(second)
    assert sorted(sum(n for _, _, n in row) for row in first) == [9, 16, 16, 16]
    assert order.fill == 57 / 64


def test_the_order_differs_between_epochs_seeds_and_data():
    lengths = np.full(100, 8)
    order, other_seed, other_data = (
        RowOrder(Lengths(lengths, data), 16, "best_fit", True, seed)
        for data, seed in (("f", 0), ("f", 1), ("g", 0))
    )
    others = [epoch_of(order, 1), epoch_of(other_seed), epoch_of(other_data)]
    assert epoch_of(order) not in others


def test_the_order_is_the_same_in_every_version():
    order = RowOrder(Lengths(np.array([3, 3, 3, 5, 5, 8])), 8, "best_fit", True, 0)
    first, second = [[3, 2], [5], [4, 1], [0]], [[4, 1], [2], [3, 0], [5]]
    assert samples_by_row(order) == first
    assert samples_by_row(order, 1) == second


@pytest.mark.parametrize(
    "packing, rows",
    yaml.safe_load("""
- [best_fit, [[0, 2], [1], [3], [4]]]
- [none, [[0], [1], [2], [3], [4]]]
- [stream, [[0, 1], [1, 2], [3], [4]]]
"""),
)
def test_without_shuffling_rows_follow_the_data(packing, rows):
    order = RowOrder(Lengths(np.array([3, 8, 5, 8, 2])), 8, packing, False, 0)
    assert samples_by_row(order) == rows


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_preview_json_is_what_training_reads_and_nothing_else(tmp_path, jsonl, preview, streaming):
    question, answer = turn("user", "q"), turn("assistant", "a")
    answers = [answer | {"content": "b" * i, "weight": (1, 0.5)[i % 7 == 0]} for i in range(21)]
    rows = [{"messages": [question, answer]} for answer in answers]
    words = [
        f"data.path={jsonl(*rows)}",
        f"data.streaming={streaming}",
        f"data.cache={tmp_path}/cache",
        "tokenizer.path=demo:bytes",
        "batch.seq_len=128",
        "batch.rows=4",
        "train.steps=1",
    ]
    printed = preview(*words, "preview.format=json", "preview.rows=8")
    lines = lines_of(printed)
    cfg = compose("train", words)
    data = build_data(cfg)[2]
    if data.streamed:
        streams = [data.streamed.stream(number) for number in range(4)]
        expected = [next(streams[index % 4]) for index in range(8)]
    else:
        order = RowOrder(data.train[0], 128, "best_fit", True, 0)
        expected = [order.read(index) for index in range(8)]
    weighted = []
    for index, (line, row) in enumerate(zip(lines, expected, strict=True)):
        n = sum(row.documents)
        columns = {name: getattr(row, name)[:n].tolist() for name in ("tokens", "labels")}
        learnt = (row.labels[:n] != -100).astype(float).tolist()
        weights = line.pop("weights", learnt)
        assert weights == row.weights[:n].tolist()
        assert line == {"row": index, "documents": row.documents} | columns
        weighted.append(weights != learnt)
    assert {True, False} == set(weighted)


def test_padding_to_a_multiple_makes_micro_batches_shorter_and_changes_no_loss(planned):
    order, plan = (
        Mixture([Component("", planned(packing="none"))]),
        StepPlan(1, 0, 31, 1.0, 1, 1, 1),
    )
    whole, cut = (
        [*Batches(order, BatchOptions(3, 0, 1, torch.device("cpu"), multiple)).micro_batches(plan)]
        for multiple in (None, 8)
    )
    assert {batch.tokens.shape[1] for batch in whole} == {64}
    assert {batch.tokens.shape[1] for batch in cut} == {24, 32, 40, 48}
    for long, short in zip(whole, cut, strict=True):
        length = short.tokens.shape[1]
        assert length - 8 < max(sum(row) for row in short.layout.lengths) <= length
        assert torch.equal(long.tokens[:, :length], short.tokens)
        assert not long.tokens[:, length:].any()
        assert torch.equal(long.targets, short.targets)


# --- plans in files -----------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, enter):
    """A store of 300 samples whose plans are files, as those of large ones are."""
    enter(inject.setting("order_mapped_from", 1))
    writer = StoreWriter(tmp_path / "s")
    for i in range(300):
        tokens = np.arange((i + 2) % 40 + 2, dtype=np.int32)
        writer.write([Sample(tokens, np.ones(len(tokens), np.float32))])
    writer.close()
    return lambda **more: RowOrder(
        TokenStore(tmp_path / "s", "f"),
        64,
        **{"packing": "best_fit", "shuffle": True, "seed": 0, **more},
    )


def all_rows(order):
    return [*epoch_of(order), *epoch_of(order, 1)]


def wait_for_next_epoch():
    """Wait until the threads that plan an epoch ahead have ended."""
    for thread in threading.enumerate():
        if thread.name == "next epoch":
            thread.join()


def groups(order):
    return {group.name for group in order.mapped.folder.iterdir() if group.is_dir()}


def known(order):
    """Return the rows of two epochs, totals over their border, and all arrays of two rows."""
    n = order.rows_per_epoch
    arrays = vars(order.read_rows([3, n + 1])).items()
    lists = {name: array.tolist() for name, array in arrays if isinstance(array, np.ndarray)}
    return all_rows(order), order.totals(1, n + 2), lists


@pytest.mark.parametrize("packing", ["best_fit", "none", "stream"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_in_files_is_made_once_and_is_the_one_in_memory(planned, packing, shuffle):
    first = known(planned(packing=packing, shuffle=shuffle))
    wait_for_next_epoch()
    made_again = AssertionError("made again")
    with inject.fails("plan_epoch", made_again), inject.fails("pack_rows", made_again):
        again = planned(packing=packing, shuffle=shuffle)
        assert known(again) == first
        assert isinstance(again.epoch(0).samples.base, np.memmap | mmap.mmap)
    with inject.setting("order_mapped_from", 1 << 40):
        in_memory = RowOrder(again.store, 64, packing, shuffle, 0)
    assert in_memory.mapped is None
    assert known(in_memory) == first


def test_the_next_epoch_is_planned_from_the_middle_of_this_one(planned):
    order = planned()
    order.read_rows(range(order.rows_per_epoch // 2 - 1))
    assert groups(order) == {"packing", "epoch-0"}
    order.read_rows([order.rows_per_epoch // 2 + 1])
    wait_for_next_epoch()
    assert groups(order) == {"packing", "epoch-0", "epoch-1"}


def test_an_order_that_nobody_uses_closes_its_files_at_once(planned):
    """Each plan is five open files: hundreds are too many for a process that waits for gc."""
    order = planned()
    all_rows(order)
    wait_for_next_epoch()
    gc.disable()
    try:
        gone = weakref.ref(order)
        del order
        assert gone() is None
    finally:
        gc.enable()


def test_plans_of_long_ago_go(planned):
    other, order = planned(seed=1), planned()
    other.epoch(1)
    for epoch in range(4):
        order.epoch(epoch)
    for group in (order.mapped.folder / "epoch-1", other.mapped.folder / "epoch-1"):
        os.utime(group, (1, 1))
    order.epoch(4)
    assert groups(order) == {"packing", "epoch-0", "epoch-2", "epoch-3", "epoch-4"}
    assert groups(other) == {"packing"}


def test_nobody_finds_a_part_of_a_plan_that_goes(planned, monkeypatch):
    order = planned()
    expected, _ = order.epoch(1), order.epoch(2)
    for epoch in (1, 2):
        os.utime(order.mapped.folder / f"epoch-{epoch}", (epoch, epoch))
    monkeypatch.setattr(
        "shutil.rmtree", lambda folder, **_: (folder / "samples.npy").unlink(missing_ok=True)
    )  # so far
    order.epoch(3)
    assert np.array_equal(planned().epoch(1).samples, expected.samples)


def test_a_plan_cut_short_by_a_crash_is_made_anew(planned):
    order = planned()
    rows = all_rows(order)
    for file, size in (
        (order.mapped.folder / "epoch-0/samples.npy", 130),
        (order.mapped.folder / "packing/offsets.npy", 0),
    ):
        rest = file.read_bytes()[:size]
        file.unlink()  # which `order` has mapped
        file.write_bytes(rest)
    assert all_rows(planned()) == rows


def test_where_plans_cannot_be_kept_every_rank_has_its_own(planned, tmp_path):
    (tmp_path / "s/plans").write_text("in the way")
    order = planned()
    assert all_rows(order) == all_rows(RowOrder(order.store, 64, "best_fit", True, 0))
    assert "Not a directory" in order.note


def test_who_comes_while_a_plan_is_made_waits_for_it(planned):
    orders = []

    def make():
        orders.append(1)
        time.sleep(0.2)
        return {"a": np.arange(3)}

    with ThreadPoolExecutor(3) as threads:
        for mapped in [planned().mapped for _ in range(3)]:
            threads.submit(mapped.get, "epoch-9", make)
    assert len(orders) == 1
