"""Rows: well filled, each sample once an epoch, and the same order for everyone."""

import gc
import json
import mmap
import os
import threading
import time
import weakref

import inject
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import SHARED, Lengths, Texts

from fsdp_trainer.apps.preview.preview import preview
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.config.verbs import PreviewConfig
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.store.token_store import StoreWriter, TokenStore
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.samples import Sample
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.training.batches import Batches, StepPlan


def one_by_one(lengths, capacity):
    """Best-fit decreasing as the textbook has it: how full each row is."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [f for f in free if f >= length]
        if fitting:
            free[free.index(min(fitting))] -= length
        else:
            free.append(capacity - length)
    return sorted(free)


@pytest.mark.slow
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_placing_equal_lengths_together_is_best_fit_decreasing(lengths, capacity):
    packing = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    rows = np.split(packing.documents, packing.offsets[1:-1]) if lengths else []
    assert sorted(capacity - sum(lengths[i] for i in row) for row in rows) == one_by_one(
        lengths, capacity
    )


@pytest.mark.slow
def test_a_million_samples_are_packed_in_seconds_and_full():
    lengths = np.random.default_rng(0).integers(2, 4096, 1_000_000)
    packing = best_fit(lengths, 8192)
    assert lengths.sum() / (8192 * (len(packing.offsets) - 1)) > 0.999


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.integers(2, 16), min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from(["best_fit", "none"]),
    st.integers(0, 3),
)
def test_an_epoch_has_every_sample_once_and_no_row_is_too_long(lengths, shuffle, packing, seed):
    store = Lengths(np.array(lengths))
    order = RowOrder(store, 16, packing, shuffle, seed)
    for epoch in range(2):
        rows = [order.row(epoch * order.rows_per_epoch + i) for i in range(order.rows_per_epoch)]
        assert sorted(document for row in rows for document in row) == [
            (i, 0, n) for i, n in enumerate(lengths)
        ]
        assert all(sum(n for _, _, n in row) <= 16 for row in rows)
        again = RowOrder(store, 16, packing, shuffle, seed)
        assert [
            again.row(epoch * order.rows_per_epoch + i) for i in reversed(range(len(rows)))
        ] == rows[::-1]
    total = order.totals(1, 2 * order.rows_per_epoch)
    parts = [order.totals(i, i + 1) for i in range(1, 2 * order.rows_per_epoch)]
    assert np.allclose(total, np.sum(parts, axis=0) if parts else (0, 0, 0, 0))


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.integers(2, 70), min_size=1, max_size=30),
    st.booleans(),
    st.sampled_from(["stream", "best_fit", "none"]),
)
def test_every_token_of_a_text_that_is_cut_is_read_once_and_learnt_once(lengths, shuffle, packing):
    store = Texts(lengths)
    order = RowOrder(store, 16, packing, shuffle, 0)
    for epoch in range(2):
        rows = [order.read(epoch * order.rows_per_epoch + i) for i in range(order.rows_per_epoch)]
        held = [row.tokens[: sum(row.documents)] for row in rows]
        learnt = [row.labels[row.labels != -100] for row in rows]
        assert sorted(np.concatenate(held)) == list(range(sum(lengths)))
        assert sorted(np.concatenate(learnt)) == sorted(
            set(range(sum(lengths))) - set(store.offsets)
        )
        for row, tokens in zip(rows, held, strict=True):
            there = row.labels[: len(tokens)]
            assert np.all((there == tokens + 1) | (there == -100))
            assert np.array_equal(row.weights > 0, row.labels != -100)
            starts = np.cumsum([0, *row.documents[:-1]])
            inside = np.delete(np.arange(len(tokens)), starts)  # a document's next token is its own
            assert np.array_equal(tokens[inside], tokens[inside - 1] + 1)
        totals = [
            order.totals(epoch * len(rows) + i, epoch * len(rows) + i + 1) for i in range(len(rows))
        ]
        assert totals == [
            (r.weights.sum(), sum(r.documents), len(y), sum(n * n for n in r.documents))
            for r, y in zip(rows, learnt, strict=True)
        ]
        if packing == "stream":
            assert sum(len(tokens) == 16 for tokens in held) >= len(rows) - 1
        if packing == "stream" and not shuffle:
            assert np.concatenate(held).tolist() == list(range(sum(lengths)))


def test_a_stream_is_cut_at_other_places_every_epoch():
    order = RowOrder(Texts([5, 9, 30, 11, 2]), 16, "stream", True, 0)

    def rows(epoch):
        return [order.row(epoch * order.rows_per_epoch + i) for i in range(order.rows_per_epoch)]

    assert rows(0) != rows(1)
    assert sorted(rows(0)) != sorted(rows(1))


@pytest.mark.slow
def test_pretraining_fills_its_rows(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join("x" * (7 + i * i % 500) for i in range(2000)))
    store = prepared(tmp_path, 64, path=str(tmp_path / "a.txt"), too_long="split").train[0]
    assert RowOrder(store, 64, "stream", True, 0).fill > 0.999


def test_the_order_differs_between_epochs_seeds_and_data():
    lengths = np.full(100, 8)

    def rows(order, epoch):
        return [order.row(epoch * order.rows_per_epoch + i) for i in range(order.rows_per_epoch)]

    order = RowOrder(Lengths(lengths), 16, "best_fit", True, 0)
    others = [
        RowOrder(Lengths(lengths), 16, "best_fit", True, 1),
        RowOrder(Lengths(lengths, "g"), 16, "best_fit", True, 0),
    ]
    assert all(rows(order, 0) != other for other in [rows(order, 1), *(rows(o, 0) for o in others)])


def test_the_order_is_the_same_in_every_version():
    order = RowOrder(Lengths(np.array([3, 3, 3, 5, 5, 8])), 8, "best_fit", True, 0)
    assert [[sample for sample, _, _ in order.row(i)] for i in range(8)] == [
        [3, 2],
        [5],
        [4, 1],
        [0],
        [4, 1],
        [2],
        [3, 0],
        [5],
    ]


def test_without_shuffling_rows_follow_the_data():
    order = RowOrder(Lengths(np.array([3, 8, 5, 8, 2])), 8, "best_fit", False, 0)
    assert [[sample for sample, _, _ in order.row(i)] for i in range(order.rows_per_epoch)] == [
        [0, 2],
        [1],
        [3],
        [4],
    ]


def test_labels_are_the_next_token_of_the_same_document(tmp_path):
    writer = StoreWriter(tmp_path / "s")
    writer.write(
        [
            Sample(np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.float32)),
            Sample(np.array([4, 5, 6], np.int32), np.array([0, 0, 0.5], np.float32)),
        ]
    )
    writer.close()
    order = RowOrder(TokenStore(tmp_path / "s", "f"), 8, "best_fit", False, 0)
    row = order.read(0)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert row.tokens.dtype == np.int64
    assert row.labels.tolist() == [2, 3, -100, -100, 6, -100, -100, -100]
    assert row.labels.dtype == np.int64
    assert row.weights.tolist() == [1, 1, 0, 0, 0.5, 0, 0, 0]
    assert row.documents == [3, 3]
    assert order.totals(0, 1) == (2.5, 6, 3, 18)


def prepared(tmp_path, seq_len=64, tokenizer="demo:bytes", **data):
    tokenizer = load_tokenizer(tokenizer)
    return prepare(
        Data(**data),
        Batch(seq_len=seq_len),
        tokenizer,
        load_template(None, tokenizer),
        tmp_path / "cache",
    )


@pytest.mark.slow
def test_totals_are_those_of_the_rows(tmp_path):
    order = RowOrder(prepared(tmp_path, path="demo:backwards").train[0], 64, "best_fit", True, 0)
    n = order.rows_per_epoch
    rows = [order.read(i) for i in range(n - 3, n + 3)]
    weight, supervised = (
        sum(float(r.weights.sum()) for r in rows),
        sum(int((r.labels != -100).sum()) for r in rows),
    )
    lengths = [n for r in rows for n in r.documents]
    assert order.totals(n - 3, n + 3) == (
        weight,
        sum(lengths),
        supervised,
        sum(n * n for n in lengths),
    )


@pytest.mark.slow
@pytest.mark.further
def test_gsm8k_fills_98_percent_of_its_rows(tmp_path):
    if not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    store = prepared(
        tmp_path, 1024, str(SHARED / "bpe4k"), path=str(SHARED / "gsm8k_train.jsonl")
    ).train[0]
    assert RowOrder(store, 1024, "best_fit", True, 0).fill > 0.98


def test_preview_json_is_what_training_reads_and_nothing_else(tmp_path, capsys):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
    rows = [{"messages": chat}] + [
        {"messages": [chat[0], {"role": "assistant", "content": "b" * i}]} for i in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = PreviewConfig()
    cfg.data.path, cfg.tokenizer.path, cfg.data.cache, cfg.batch.seq_len = (
        str(tmp_path / "a.jsonl"),
        "demo:bytes",
        str(tmp_path / "c"),
        128,
    )
    cfg.preview.format, cfg.preview.rows = "json", 8
    assert preview(cfg) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    order = RowOrder(
        prepared(tmp_path / "other", 128, path=cfg.data.path).train[0], 128, "best_fit", True, 0
    )
    weighted = 0
    for index, line in enumerate(lines):
        row, n = order.read(index), sum(line["documents"])
        assert line["row"] == index
        assert line["documents"] == row.documents
        assert line["tokens"] == row.tokens[:n].tolist()
        assert line["labels"] == row.labels[:n].tolist()
        weighted += "weights" in line
        assert (
            line.get("weights", (row.labels[:n] != -100).astype(float).tolist())
            == row.weights[:n].tolist()
        )
    assert len(lines) == 8
    assert 0 < weighted < 8


@pytest.mark.slow
def test_preview_text_marks_what_is_learnt(tmp_path, capsys):
    cfg = PreviewConfig()
    cfg.data.path, cfg.tokenizer.path, cfg.data.cache, cfg.preview.rows, cfg.batch.seq_len = (
        "demo:backwards",
        "demo:bytes",
        str(tmp_path),
        1,
        64,
    )
    cfg.data.shuffle = False
    assert preview(cfg) == 0
    shown = capsys.readouterr().out
    assert "4,000 rows, messages" in shown
    assert "filled" in shown
    assert "<|im_start|>assistant\n[[" in shown
    assert "<|im_end|>]]\n" in shown


@pytest.mark.slow
def test_padding_to_a_multiple_makes_micro_batches_shorter_and_changes_no_loss(train, planned):
    order = Mixture([Component("", planned(packing="none"))])
    whole, cut = (
        list(
            Batches(order, 3, 0, 1, torch.device("cpu"), multiple).micro_batches(
                StepPlan(1, 0, 31, 1.0, 1, 1, 1)
            )
        )
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
    still = ["data.packing=none", "train.steps=3", "batch.micro_rows=2"]
    runs = [
        train(f"{i}", *still, *more, ranks=2)
        for i, more in enumerate(([], ["data.pad_to_multiple=4"]))
    ]
    assert runs[1].column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)
    refused = train("refused", "data.pad_to_multiple=4", "data.packing=best_fit", code=2)
    assert "data.packing=none" in refused.err


# --- plans in files -----------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, enter):
    """A store of 300 samples whose plans are files, as those of large ones are."""
    enter(inject.setting("order_mapped_from", 1))
    writer = StoreWriter(tmp_path / "s")
    for n in range(2, 302):
        writer.write(
            [Sample(np.arange(n % 40 + 2, dtype=np.int32), np.ones(n % 40 + 2, np.float32))]
        )
    writer.close()
    return lambda **more: RowOrder(
        TokenStore(tmp_path / "s", "f"),
        64,
        **{"packing": "best_fit", "shuffle": True, "seed": 0, **more},
    )


def all_rows(order, epochs=2):
    return [order.row(i) for i in range(epochs * order.rows_per_epoch)]


def wait_for_next_epoch():
    """Wait until the threads that plan an epoch ahead have ended."""
    for thread in threading.enumerate():
        if thread.name == "next epoch":
            thread.join()


def groups(order):
    return {group.name for group in order.mapped.folder.iterdir() if group.is_dir()}


@pytest.mark.parametrize("packing", ["best_fit", "none", "stream"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_in_files_is_made_once_and_is_the_one_in_memory(planned, packing, shuffle):
    first = planned(packing=packing, shuffle=shuffle)
    rows, totals, read = (
        all_rows(first),
        first.totals(1, first.rows_per_epoch + 2),
        first.read_rows([3, first.rows_per_epoch + 1]),
    )
    wait_for_next_epoch()
    made_again = AssertionError("made again")
    with inject.fails("plan_epoch", made_again), inject.fails("pack_rows", made_again):
        again = planned(packing=packing, shuffle=shuffle)
        assert all_rows(again) == rows
        assert again.totals(1, again.rows_per_epoch + 2) == totals
        assert isinstance(again.epoch(0).samples.base, np.memmap | mmap.mmap)
    with inject.setting("order_mapped_from", 1 << 40):
        in_memory = RowOrder(again.store, 64, packing, shuffle, 0)
    assert in_memory.mapped is None
    assert all_rows(in_memory) == rows
    assert in_memory.totals(1, again.rows_per_epoch + 2) == totals
    assert all(
        np.array_equal(getattr(read, name), value)
        for name, value in vars(in_memory.read_rows([3, again.rows_per_epoch + 1])).items()
        if isinstance(value, np.ndarray)
    )


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
        (order.mapped.folder / "epoch-0" / "samples.npy", 130),
        (order.mapped.folder / "packing" / "offsets.npy", 0),
    ):
        rest = file.read_bytes()[:size]
        file.unlink()  # which `order` has mapped
        file.write_bytes(rest)
    assert all_rows(planned()) == rows


def test_where_plans_cannot_be_kept_every_rank_has_its_own(planned, tmp_path):
    (tmp_path / "s" / "plans").write_text("in the way")
    order = planned()
    assert all_rows(order) == all_rows(RowOrder(order.store, 64, "best_fit", True, 0))
    assert "Not a directory" in order.note


@pytest.mark.slow
def test_who_comes_while_a_plan_is_made_waits_for_it(planned):
    orders = []

    def make():
        orders.append(1)
        time.sleep(0.2)
        return {"a": np.arange(3)}

    threads = [
        threading.Thread(target=planned().mapped.get, args=("epoch-9", make)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(orders) == 1
