"""Several sources by weight or repeat: exact over any prefix, counted, and changed on the way
without a row lost or repeated.

That an epoch of repeats holds each row as often as asked, and that its rows and totals are those
of the components, is in test_data_properties.py.
"""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import inject
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inject import SPIKED
from texts import Texts
from world import SPIKY, write_chats

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.data.files.file_changes import SAME_FILES, describe_changed_files, stored_files
from fsdp_trainer.data.order.epoch_ends import EpochEnds
from fsdp_trainer.data.order.mixture import Component, Mixture, Turns
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.run.resume import describe_data_change, resume_data
from fsdp_trainer.training.batches import Batches, BatchOptions, StepPlan, count_steps, row_ranges
from fsdp_trainer.training.data_source import last_row
from fsdp_trainer.training.progress import Progress

# --- whose turn it is ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.floats(-4, 0), min_size=1, max_size=20),
    st.integers(0, 10**9),
    st.sampled_from([2**40, 10**5, 1]),
)
def test_after_any_number_of_rows_each_share_is_exact_to_less_than_a_row(exponents, n, whole):
    parts = [max(1, round(10**e * whole)) for e in exponents]
    turns = Turns(parts)
    edge = (n // turns.span + 1) * turns.span  # of two blocks
    for first in (n, edge - 50):
        had, (who, ordinal) = turns.taken(first), turns.at(np.arange(first, first + 100))
        counts = had + np.cumsum(who[:, None] == range(len(parts)), axis=0)
        wanted = np.outer(np.arange(first + 1, first + 101).astype(object), parts)
        assert had.sum() == first
        assert np.array_equal(ordinal, counts[range(100), who] - 1)
        assert (abs(counts.astype(object) * sum(parts) - wanted) < sum(parts)).all()


def test_turns_are_what_they_always_were():
    """A resume under a newer version would else mix up the rows."""
    who, _ = Turns([5, 3, 2]).at(np.arange(20))
    assert "".join("abc"[i] for i in who) == "abacababac" * 2
    who, _ = Turns([7, 2, 1]).at(np.arange(10**9, 10**9 + 20))
    assert Counter(who.tolist()) == {0: 14, 1: 4, 2: 2}


def text_component(name, lengths, weight=1.0):
    """Texts of its own, packed into rows of 16."""
    store = Texts(lengths)
    store.source_names, store.folder, store.where = [name], name, lambda sample: f"{name}:{sample}"
    order = RowOrder(store, 16, "best_fit", True, 0)
    return Component(name, order, f"{name}{list(lengths)}", weight)


def mixture_of(weighted=False, **sources):
    """sources: the lengths of each one's texts, and its weight or repeat."""
    return Mixture([text_component(name, *of_it) for name, of_it in sources.items()], weighted)


def test_half_a_repeat_goes_on_with_the_other_half():
    mixture = mixture_of(a=([16] * 8, 0.5), b=([16] * 3, 1), never=([16], 0))
    assert mixture.rows_per_epoch == 7
    who, index = mixture.locate(range(14))
    assert sorted(index[who == 0]) == list(range(8))
    assert sorted(index[who == 1]) == list(range(6))
    assert 2 not in who
    for row, component in enumerate(who):
        assert mixture.where(row)[0].startswith("ab"[component])


def test_weights_are_shares_of_the_tokens_however_full_the_rows_are():
    mixture = mixture_of(True, full=([16] * 100, 0.5), half=([9] * 100, 0.25), c=([12] * 9, 0.25))
    report = mixture.report(4000)
    for line, share in zip(report, [0.5, 0.25, 0.25], strict=True):
        assert line["share"] == pytest.approx(share, abs=1e-3)
        assert line["share_asked"] == pytest.approx(share, abs=1e-6)
    assert report[2]["epochs"] == pytest.approx(report[2]["rows"] / 9, abs=1e-4)
    assert mixture.rows_per_epoch == 209
    assert sum(line["tokens"] for line in report) == mixture.totals(0, 4000)[1]
    assert "Muennighoff" in mixture.plan(4000)[-1]
    assert "Muennighoff" not in str(mixture.plan(40))


def test_rows_of_the_same_documents_cost_the_same_to_the_last_bit():
    """They are dealt by it, on every machine alike; a mean over windows is no whole number."""
    cost = lambda lengths: lengths**2 / 3 + 0.1  # noqa: E731
    order = RowOrder(Texts([7, 8] * 500), 16, "best_fit", True, 0, cost)
    rows = range(order.rows_per_epoch)
    costs = {}
    for documents, of_row in zip(
        order.read_rows(rows).documents, order.attention_costs(rows).tolist(), strict=True
    ):
        assert costs.setdefault(tuple(sorted(documents)), of_row) == of_row


# --- another mixture at resume ------------------------------------------------------------------


def go_on(mixture, progress, rows):
    """Return the mixture, progress and lines that a resume with `mixture` after `rows` rows
    gives."""
    stored = json.loads(json.dumps(progress.segments))
    progress = Progress(rows=rows, segments=stored, skipped_row_ranges=[[1, 2]])
    return resume_data(mixture, progress, "")


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.integers(0, 40)),
        min_size=1,
        max_size=5,
    )
)
def test_each_source_goes_on_at_its_own_row_whatever_comes_and_goes(segments):
    lengths = {"a": [16] * 7, "b": [9] * 5, "c": [3, 16, 8], "d": [16]}
    samples, progress, start = {name: [] for name in lengths}, Progress(), 0
    for names, rows in segments:
        mixture = Mixture([text_component(name, lengths[name]) for name in sorted(names)])
        mixture, progress, _ = go_on(mixture, progress, start)
        for who, index in zip(*mixture.locate(range(start, start + rows)), strict=True):
            samples[mixture.components[who].name].append(int(index))
        start += rows
        progress.segments = [*progress.segments[:-1], mixture.state(start)]
    assert all(indices == list(range(len(indices))) for indices in samples.values())


def test_what_a_resume_makes_of_changed_data_is_told():
    four, five, one = [16] * 4, [16] * 5, [16]
    first = mixture_of(True, a=(four, 0.5), b=(four, 0.3), c=(one, 0.2))
    begun = Progress(segments=[first.state(10)])
    _, same, message = go_on(Mixture(first.components, True), begun, 10)
    assert message == []
    assert same.skipped_row_ranges == [[1, 2]]
    assert len(same.segments) == 1
    changed = mixture_of(True, a=(four, 0.6), b=(five, 0.2), d=(one, 0.2))
    other, progress, message = go_on(changed, begun, 10)
    assert message == [
        "data   a was requested with 0.5, now with 0.6: continues at epoch 2, row 1 of 4",
        "data   b has other content: begins at the first row of what it is now; what was "
        "seen of it may come again",
        "data   d is new: begins at its first row",
        "data   c is left out: was seen for 2.00 epochs",
    ]
    assert progress.skipped_row_ranges == []
    assert [segment["start"] for segment in progress.segments] == [0, 10]
    assert other.taken(10) == [5, 0, 0]


def test_files_that_changed_are_named_wherever_they_lie_now():
    stored = stored_files({"x/a.jsonl": "1", "x/b.jsonl": "2", "x/c.jsonl": "3"})
    moved = {"y/a.jsonl": "1", "y/b.jsonl": "9", "y/other.jsonl": "3"}
    assert describe_changed_files(stored, moved) == ["y/b.jsonl has other content"]
    assert describe_changed_files(stored, {"a": "1", "b": "2", "c": "3"}) == [SAME_FILES]
    *lines, last = describe_changed_files(stored, {f"{i}.jsonl": f"other {i}" for i in range(20)})
    assert lines[:3] == [f"x/{name}.jsonl is left out" for name in "abc"]
    assert lines[3] == "0.jsonl is new"
    assert last == "and 15 more files"


def test_a_checkpoint_keeps_digests_of_a_thousand_files_and_says_which_it_does_not_know():
    digests = {f"data/shard-{i:05}.jsonl": f"{i:032x}"[::-1] for i in range(3000)}
    stored = json.loads(json.dumps(Mixture([text_component("a", [16])], digests=digests).state(0)))
    assert len(json.dumps(stored)) < 100_000
    now = digests | {"data/shard-00007.jsonl": "other", "data/shard-02999.jsonl": "not compared"}
    del now["data/shard-00009.jsonl"]
    assert describe_changed_files(stored, now) == [
        "data/shard-00007.jsonl has other content",
        "data/shard-00009.jsonl is left out",
        "there are 2,999 files, there were 3,000",
        "2,000 files were not compared: a checkpoint keeps the digests of the first 1,000",
    ]


def test_a_checkpoint_without_digests_of_files_names_the_source_that_changed():
    older = mixture_of(a=([16] * 4,)).state(4)
    del older["files"], older["file_count"]
    order = Mixture([text_component("a", [16] * 5)], digests={"a.jsonl": "1"})
    assert describe_data_change(order, [older]) == ["a has other content"]
    _, progress, (note,) = go_on(order, Progress(segments=[older]), 4)
    assert note.startswith("data   a has other content: begins at the first row")
    assert progress.segments[-1]["files"] == {"a.jsonl": "1"}


def test_what_a_version_without_segments_did_counts_by_the_epochs_of_now():
    """The older version named the same data otherwise, and ordered it so."""
    mixture = mixture_of(a=([16] * 10,))
    mixture, progress, (message,) = resume_data(mixture, Progress(rows=13), "older")
    assert "from a version that named data otherwise" in message
    assert mixture.taken(15) == [2]
    assert last_row(3, mixture.rows_per_epoch, progress.segments) == 30


def test_epochs_that_were_done_of_other_data_are_done():
    assert last_row(3, 40, []) == 120
    segments = [
        {"start": start, "rows_per_epoch": rows} for start, rows in ((0, 40), (60, 10), (65, 7))
    ]
    for count, last in ((1, 120), (2, 60 + 15), (3, 65 + 7)):
        now = segments[:count]
        assert last_row(3, now[-1]["rows_per_epoch"], now) == last
    assert last_row(1, 7, segments) == 65
    after_a_stream = [{"start": 0, "rows_per_epoch": 0}, {"start": 60, "rows_per_epoch": 40}]
    assert last_row(3, 40, after_a_stream) == 180


@given(
    st.integers(0, 80),
    st.integers(1, 9),
    st.integers(0, 80),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=3),
    st.none() | st.builds(EpochEnds, st.just(0), st.integers(1, 30)),
)
def test_the_steps_to_come_are_counted_without_going_through_them(
    rows, of_step, last, left_out, ends
):
    ranges = list(row_ranges(of_step, last, rows, [], ends))
    assert not ends or all(stop <= ends.after(first) for first, stop in ranges)
    assert not ends or not ranges or ends.row_after(len(ranges), of_step, rows) >= last
    left_out = [[first, first + length] for first, length in left_out]
    steps = len(list(row_ranges(of_step, last, rows, left_out, ends)))
    assert count_steps(of_step, last, rows, left_out, ends) == steps


# --- which rank has which row -------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_rows_are_dealt_once_each_and_never_less_evenly_than_in_their_order(
    costs, ranks, micro_rows, step
):
    costs, rows = np.array(costs), np.arange(len(costs))
    order = SimpleNamespace(attention_costs=costs.__getitem__, source_names=[""], seq_len=64)
    batches = Batches(order, BatchOptions(micro_rows, 0, ranks, torch.device("cpu")))
    dealt = batches.assign_rows_to_ranks(StepPlan(step, 0, len(costs), 1.0, 1, 1, 1))
    assert sorted(dealt[dealt >= 0]) == rows.tolist()
    in_order = np.pad(rows, (0, dealt.size - len(rows)), constant_values=-1).reshape(dealt.shape)
    if ranks == 1 or len(set(costs)) == 1:
        assert np.array_equal(dealt, in_order)
    if micro_rows == 1:
        slowest, before = (
            np.where(way < 0, 0, costs[way])[..., 0].max(1).sum() for way in (dealt, in_order)
        )
        assert slowest <= before


# --- from the command line ----------------------------------------------------------------------


def by(kind, sources, *numbers):
    entries = [f"{{path: {path}, {kind}: {n}}}" for path, n in zip(sources, numbers, strict=False)]
    return f"data.path=[{','.join(entries)}]"


def test_a_mixture_by_weights_tells_what_it_gave_and_is_known_again(train, sources):
    how = ["train.steps=6 schedule=constant batch.rows=7"]
    weighted = by("weight", sources, 0.6, 0.4)
    run = train("run", weighted, *how, "batch.micro_rows=7")
    assert set(run.metrics[0]["loss_by_source"]) == {"a", "b"}
    a, b = run.event("data")[0]["sources"]
    assert (a["share_asked"], b["share_asked"]) == (0.6, 0.4)
    assert a["share"] == pytest.approx(0.6, abs=0.05)
    assert a["tokens"] + b["tokens"] == run["tokens"][-1]
    assert a["rows"] + b["rows"] == 42
    assert "mixed by weights; an epoch is as many rows as all have" in run.out
    assert "b: 4" in run.out
    assert f"requested 40.00%; {b['tokens']:,} tokens, {b['epochs']:.2f} epochs" in run.out
    assert "is already finished" in train("run", by("weight", sources, 3, 2), *how).out
    refused = train("run", by("weight", sources[1::-1], 2, 3), *how, code=2)
    assert "the same sources are in another order, or mixed otherwise" in refused.err
    for step, anew in ((7, True), (8, False)):
        newer = inject.setting("mixture_version", 2)
        said = train("run", weighted, *how, f"train.steps={step}", seam=newer).out
        assert anew == (
            "is the same, in other rows or another order: begins at the first row of what it is now"
            in said
        )


def test_an_epoch_goes_on_bitwise_after_a_stop_and_with_a_source_that_may_be_added(
    train, sources, tmp_path
):
    how = ["train.epochs=1", "schedule=constant checkpoint.every=3"]
    before = by("repeat", sources, 1, 2)
    whole = train("whole", before, *how)
    assert [source["epochs"] for source in whole.event("data")[-1]["sources"]] == [1, 2]
    cut = train("cut", before, *how[1:], "train.steps=3")
    a = cut.event("data")[-1]["sources"][0]
    shutil.copytree(cut.folder, tmp_path / "added")
    cut = train("cut", before, *how)
    assert cut["loss"] == whole["loss"]
    assert cut["grad_norm"] == whole["grad_norm"]

    more = by("repeat", sources, 1, 3, 1)
    refused = train("added", more, *how, code=2)
    for text in (
        "data.fingerprint=",
        "b was requested with 2, now with 3\n",
        "c is new\n",
        "'checkpoint.allow_changes=[data.fingerprint]'",
    ):
        assert text in refused.err, text
    run = train("added", more, *how, "checkpoint.allow_changes=[data.path]", ranks=2)
    assert f"a continues at epoch 1, row {a['rows']} of" in run.out
    assert "c is new: begins at its first row" in run.out
    again = train("added", more, *how)  # what was allowed once is the run's data now
    assert "is already finished" in again.out


def test_no_rewind_goes_back_beyond_a_change_of_the_data(train, sources):
    """Rows before the change had other numbers."""
    how = [*SPIKY, "train.on_spike=rewind train.rewind_margin=4"]
    train("run", by("repeat", sources, 1, 1), *how, "train.steps=17")
    run = train(
        "run", by("repeat", sources, 1, 1, 1), *how, f"train.steps={SPIKED + 4}",
        "checkpoint.allow_changes=[data.fingerprint]", seam=inject.garbage(),
    )  # fmt: skip
    (rewind,) = run.event("rewind")
    assert rewind["step"] == SPIKED
    assert rewind["to"] >= 17
    assert run["step"] == list(range(1, SPIKED + 5))
    trained = rewind["left_out"][1] + 3 * (SPIKED + 4 - rewind["to"])
    assert sum(source["rows"] for source in run.event("data")[-1]["sources"]) == trained


def test_validation_takes_a_list_without_weights(tmp_path):
    file = write_chats(tmp_path / "a.jsonl", 3)
    how = [f"data.path={file}", "tokenizer.path=demo:bytes"]
    cfg = compose("train", [*how, f"data.validation=[{{path: {file}, name: held}}]"])
    assert cfg.data.validation == [{"path": str(file), "name": "held"}]
