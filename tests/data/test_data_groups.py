"""Documents that belong together (a preference pair, the answers to one prompt) share a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refusal

from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.token_store import (
    Damaged,
    StoreWriter,
    TokenStore,
    check_columns,
    merge,
)
from fsdp_trainer.data.tokens.samples import Sample
from fsdp_trainer.training.batches import Batches, BatchOptions

SEQ_LEN = 16
GROUPS = st.lists(
    st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=4).filter(lambda g: sum(g) <= SEQ_LEN),
    min_size=1,
    max_size=30,
)
"""The lengths of each group's documents."""


def written(folder, groups, first_token=0):
    """Write groups of documents whose tokens count from first_token on. Return the totals."""
    writer = StoreWriter(folder)
    for lengths in groups:
        samples = []
        for i, length in enumerate(lengths):
            tokens = np.arange(first_token, first_token + length, dtype=np.int32)
            weights = np.array([0.0, *[1.0] * (length - 1)], np.float32)
            samples.append(Sample(tokens, weights, starts_group=i == 0))
            first_token += length
        writer.write(samples)
    writer.close()
    return writer.totals


def rows_of(order, epoch=0):
    """Return the samples of each row of an epoch."""
    first = epoch * order.rows_per_epoch
    return [[sample for sample, _, _ in order.row(first + i)] for i in range(order.rows_per_epoch)]


@settings(max_examples=40)
@given(
    GROUPS,
    st.sampled_from(["best_fit", "none"]),
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_group_is_never_split_and_every_supervised_token_knows_its_document_and_group(
    tmp_path_factory, groups, packing, shuffle, seed, micro_rows, ranks
):
    folder = tmp_path_factory.mktemp("groups") / "store"
    written(folder, groups)
    order = RowOrder(TokenStore(folder, "f"), SEQ_LEN, packing, shuffle, seed)
    lengths = [length for group in groups for length in group]
    group_of = [i for i, group in enumerate(groups) for _ in group]
    members = [[k for k, other in enumerate(group_of) if other == i] for i in range(len(groups))]
    for epoch in range(2):
        rows = rows_of(order, epoch)
        assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
        assert all(sum(lengths[sample] for sample in row) <= SEQ_LEN for row in rows)
        for group in members:
            (row,) = [row for row in rows if group[0] in row]
            at = row.index(group[0])
            assert row[at : at + len(group)] == group
        if packing == "none":
            assert sorted(rows) == members
        else:
            whole = best_fit(np.array([sum(group) for group in groups]), SEQ_LEN)
            assert len(rows) == len(whole.offsets) - 1

    firsts, all_documents = np.cumsum([0, *lengths]), []
    mixture = Mixture([Component("", order)])
    batches = [
        Batches(
            mixture,
            BatchOptions(micro_rows, rank, ranks, torch.device("cpu"), number_documents=True),
        )
        for rank in range(ranks)
    ]
    for plan in batches[0].plans(4, mixture.rows_per_epoch):
        for batch in (batch for rank in batches for batch in rank.micro_batches(plan)):
            count, learnt = len(batch.documents.groups), (batch.weights > 0).numpy()
            assert (batch.documents.index.numpy()[~learnt] == count).all()
            numbers, targets = batch.documents.index.numpy()[learnt], batch.targets.numpy()[learnt]
            samples = np.searchsorted(firsts, targets, side="right") - 1
            pairs = sorted(set(zip(numbers.tolist(), samples.tolist(), strict=True)))
            assert [number for number, _ in pairs] == list(range(count))
            documents = [sample for _, sample in pairs]
            theirs = [group_of[document] for document in documents]
            in_batch = {group: number for number, group in enumerate(dict.fromkeys(theirs))}
            assert batch.documents.groups.tolist() == [in_batch[group] for group in theirs]
            all_documents += documents
    assert sorted(all_documents) == list(range(len(lengths)))


def test_without_groups_nothing_is_written_and_rows_are_what_they_were(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 17, 200).tolist()
    written(tmp_path / "store", [[length] for length in lengths])
    store = TokenStore(tmp_path / "store", "f")
    assert store.group_starts is None
    assert not (tmp_path / "store/group_starts.bin").exists()
    expected = best_fit(np.array(lengths), SEQ_LEN)
    order = RowOrder(store, SEQ_LEN, "best_fit", True, 0)
    assert order.rows_per_epoch == len(expected.offsets) - 1
    batches = Batches(Mixture([Component("", order)]), BatchOptions(2, 0, 1, torch.device("cpu")))
    assert batches.assemble(order.read_rows([0, 1])).document_targets is None


def test_parts_with_and_without_groups_are_joined(tmp_path):
    totals = written(tmp_path / "a", [[3], [4]])
    written(tmp_path / "b", [[5, 6], [2]], first_token=7)
    fingerprint = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both", lambda: None)
    store = TokenStore(tmp_path / "both", fingerprint)
    assert store.group_starts.tolist() == [True, True, True, False, True]
    written(tmp_path / "apart", [[5], [6], [2]], first_token=7)
    separate = merge([tmp_path / "a", tmp_path / "apart"], tmp_path / "none", lambda: None)
    assert separate != fingerprint
    (tmp_path / "a/group_starts.bin").write_bytes(b"\1")
    with pytest.raises(Damaged, match="group_starts"):
        check_columns(tmp_path / "a", totals)


def test_a_group_that_no_row_holds_is_refused(tmp_path):
    written(tmp_path / "store", [[3], [10, 10]])
    store = TokenStore(tmp_path / "store", "f", files=["pairs.jsonl"])
    said = refusal(RowOrder, store, SEQ_LEN, "best_fit", True, 0)
    assert "pairs.jsonl:0, has 20 tokens in 2 documents" in said
    assert "batch.seq_len=20" in said


def test_a_stream_of_text_cannot_keep_groups(tmp_path):
    written(tmp_path / "store", [[3], [4, 4]])
    assert "data.packing=stream" in refusal(
        RowOrder, TokenStore(tmp_path / "store", "f"), SEQ_LEN, "stream", True, 0
    )
