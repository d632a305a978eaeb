"""Streamed data: the same rows for everyone, from where a checkpoint stands, and nothing kept of
them."""

import gzip
import itertools
import json
import threading
import time
import tracemalloc
from dataclasses import replace
from unittest.mock import patch

import fsspec
import inject
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from inject import SPIKED
from refused import refusal
from stored import assert_bitwise_equal, stored
from texts import BYTES
from world import SPIKY, write_chats, write_lines

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.stream.row_stream import stream_data, unit_at
from fsdp_trainer.data.stream.stream_readers import Readers, WorkerReaders
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import RunFailed, UserError

TEMPLATE = load_template(None, BYTES)
STREAMED = ["data.streaming=true data.workers=1 batch.micro_rows=1"]
PRETRAIN = {"format": "text", "packing": "stream", "too_long": "split"}


def streamed(path, rows=4, seq_len=64, seed=0, **options):
    data = Data(path=str(path), streaming=True, **options)
    return stream_data(data, Batch(seq_len=seq_len, rows=rows), seed, BYTES, TEMPLATE)


def content(row):
    arrays = [array.tolist() for array in (row.tokens, row.labels, row.weights)]
    return [*arrays, row.documents, row.sources, row.where, row.cursor]


def contents(rows, count):
    return [content(row) for row in itertools.islice(rows, count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A hundred samples as several kinds of files."""
    folder = tmp_path_factory.mktemp("streamed")
    chats, packed, texts = (folder / f"{name}.jsonl" for name in ("chats", "packed", "texts"))
    packed = packed.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(write_chats(chats, 100).read_bytes()))
    rows = [{"text": f"{i:04d}" + "x" * (i * i % 150)} for i in range(100)]
    write_lines(texts, rows)
    return {"chats": chats, "packed": packed, "texts": texts}


@settings(max_examples=25)
@given(
    st.sampled_from(["best_fit", "none", "stream"]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(20, 200),
)
def test_a_stream_goes_on_from_any_of_its_rows(files, packing, shuffle, rows, place, seq_len):
    too_long = "split" if packing == "stream" else "truncate"
    options = {"packing": packing, "shuffle": shuffle, "too_long": too_long}
    data = streamed(files["texts"], rows, seq_len, **options)
    one = contents(data.stream(rows - 1), place + 40)
    again = contents(data.stream(rows - 1, one[place][-1]), 39)
    assert again == one[place + 1 :]


@settings(max_examples=20)
@given(
    st.sampled_from(["chats", "packed", "texts"]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_every_sample_is_dealt_exactly_once_an_epoch_to_some_stream(
    files, kind, shuffle, rows, seed
):
    data = streamed(files[kind], rows, 256, seed, shuffle=shuffle)
    per_epoch = len(data.units) * data.parts
    for epoch in range(2):
        lines = []
        for place in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            turn, number = divmod(place, rows)
            source, unit, part = unit_at(data, place)
            samples = [*data.stream(number)._samples_of_unit(turn, 0, 0)]
            lines += [sample.tokens.tobytes() for sample in samples]
            assert all(sample.source == source == 0 and part < data.parts for sample in samples)
            assert unit in [u for _, u in data.units]
        assert len(lines) == 100, "each of the samples"
        if kind == "texts":
            assert len(set(lines)) == 100, "which differ"


def test_texts_are_cut_where_rows_end_and_every_token_but_the_first_is_learnt_once(files):
    data = streamed(files["texts"], rows=1, seq_len=50, shuffle=False, **PRETRAIN)
    rows = [*itertools.islice(data.stream(0), 100)]
    assert all(len(row.tokens) == 50 == sum(row.documents) for row in rows), "every row is full"
    texts = [json.loads(line)["text"] for line in files["texts"].read_text().splitlines()]
    bos, eos = ([t] if t is not None else [] for t in (BYTES.bos_id, BYTES.eos_id))
    whole = [[*bos, *BYTES.encode(text), *eos] for text in texts]
    flat = [token for text in whole * 2 for token in text][: 50 * 100]
    follows = [label for text in whole * 2 for label in [*text[1:], -100]][: 50 * 100]
    assert np.concatenate([row.tokens for row in rows]).tolist() == flat
    assert np.concatenate([row.labels for row in rows]).tolist() == follows


def test_windows_are_filled_as_well_as_an_epoch(files):
    rows = [*itertools.islice(streamed(files["chats"], rows=1, seq_len=256).stream(0), 200)]
    assert sum(len(row.tokens) for row in rows) / (200 * 256) > 0.96
    assert all(row.documents and len(row.tokens) <= 256 for row in rows)


def test_processes_give_the_same_rows(files):
    data = streamed(files["chats"], rows=3)
    starts = dict.fromkeys(range(3), (0, 0, 0, 0))
    here, elsewhere = Readers(data, starts), WorkerReaders(data, starts, 2)
    try:
        for _ in range(30):
            for number in range(3):
                assert content(here.next(number)) == content(elsewhere.next(number))
        assert elsewhere.waits_for == str(files["chats"])
        next(iter(elsewhere.pool.processes.values())).kill()
        with pytest.raises(RunFailed, match="was killed"):
            for _ in range(10_000):
                elsewhere.next(0)
    finally:
        elsewhere.close()


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = json.dumps({"text": "many words " * 200}) + "\n"
    large = tmp_path / "large.jsonl"
    with open(large, "w") as file:
        for _ in range(40):
            file.write(line * 500)
    assert large.stat().st_size > 40e6
    tracemalloc.start()
    stream = streamed(large, rows=2, seq_len=512, **PRETRAIN).stream(0)
    for _ in range(300):
        next(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_a_run_goes_on_bitwise_and_keeps_nothing(train, tmp_path):
    cache = tmp_path / "unused"
    how = [*STREAMED, f"train.steps=5 checkpoint.every=2 data.cache={cache}"]
    whole = train("whole", *how, ranks=2)
    cut = train("cut", *how, ranks=2, seam=inject.failed(step=4, phase="clip"), code=1)
    assert cut.checkpoints == ["step-00000002"]
    again = train("cut", *how, ranks=2)
    assert again["loss"] == whole["loss"]
    last = "checkpoints/step-00000005"
    assert_bitwise_equal(stored(again.folder / last), stored(whole.folder / last))
    assert not cache.exists()


def test_a_row_that_cannot_be_read_ends_all_ranks_with_its_file_and_line(train, tmp_path):
    broken = write_chats(tmp_path / "broken.jsonl", 300)
    lines = broken.read_text().splitlines()
    lines[199] = '{"prompt": "no end'
    broken.write_text("\n".join(lines) + "\n")
    how = [*STREAMED, f"data.path={broken} data.shuffle=false train.steps=40"]
    how += ["batch.rows=2 model.num_hidden_layers=1"]
    run = train("run", *how, ranks=2, code=2)
    assert f"{broken}:200" in run.err
    assert "data.on_error=skip" in run.err
    assert "Traceback" not in run.err
    trained = len(run.metrics)
    assert run.event("end")[0]["exit_code"] == 2
    assert 10 < trained < 40
    assert run.checkpoints == [f"step-{trained:08d}"], "nothing that was trained is lost"
    run = train("run", *how, "data.on_error=skip", ranks=2)
    assert f"resumes after step {trained}" in run.out
    assert f"skipped {broken}:200" in run.out
    assert len(run.metrics) == 40
    [skipped] = [where for event in run.event("rows_skipped") for where in event["rows"]]
    assert skipped.split()[0] == f"{broken}:200"


@inject.fault
def slow_file(for_ever=False):
    """Rank 1 waits for a file once, until it has been told of three times, or as long as the run
    lasts. Rank 0 takes its time to tell."""
    waited, lines, over = [], [], threading.Event()

    def slowly(real, self, text):
        time.sleep(0.1 if "waits for" in text and not self.quiet else 0)
        real(self, text)

    def read_unit(real, unit):
        if dist.is_initialized() and dist.get_rank() == 1 and not waited:
            waited.append(True)
            while not over.wait(0.05) and (len(lines) < 3 or for_ever):
                pass
        return real(unit)

    def tell_waiting(real, self, *args):
        lines.append(args)
        real(self, *args)

    try:
        with (
            inject.around("stream_read", read_unit),
            inject.around("say", slowly),
            inject.around("stream_waits", tell_waiting),
            inject.setting("stream_round_seconds", 0.1),
            inject.setting("stream_rounds_told", 3),
        ):
            yield
    finally:
        over.set()


def test_a_rank_that_waits_for_its_files_is_named_and_keeps_the_others_out_of_time_outs(train):
    how = [*STREAMED, "train.steps=3"]
    run = train("slow", *how, ranks=2, seam=slow_file())
    lines = run.event("data_wait")[-3:]  # a short wait for another file may come first
    seconds = [line["seconds"] for line in lines]
    assert len(set(seconds)) == 3
    assert seconds == sorted(seconds), "each is told later than the one before"
    event = lines[-1]
    assert event["rank"] == 1
    assert f"rank 1 waits for {event['file']}" in run.out
    assert event["file"].endswith("chats.jsonl")
    assert len(run.metrics) == 3
    for_ever = slow_file(for_ever=True)
    run = train("gives_up", *how, "launch.data_timeout=1s", ranks=2, seam=for_ever, code=1)
    assert "gave nothing for" in run.err
    assert "launch.data_timeout" in run.err


@inject.fault
def one_file_gone_and_one_that_hangs():
    """Rank 0's is gone, and rank 1 waits for its own."""
    over = threading.Event()

    def read_unit(real, unit):
        if not dist.is_initialized():
            return real(unit)
        if dist.get_rank() == 0:
            raise OSError("it is gone")
        return over.wait()

    with (
        inject.around("stream_read", read_unit),
        inject.setting("stream_round_seconds", 0.2),
    ):
        yield
    over.set()


def test_nobody_waits_for_a_file_once_another_rank_has_failed(train):
    how = [*STREAMED, "train.steps=3 launch.data_timeout=20s"]
    run = train("run", *how, ranks=2, seam=one_file_gone_and_one_that_hangs(), code=1)
    assert "rank 0 cannot read its part of the data of step 1" in run.err
    assert "it is gone" in run.err
    assert "rank 1" not in run.err


def test_what_streaming_cannot_do_is_refused(train, files, tmp_path):
    few, how = write_chats(tmp_path / "few.jsonl", 3), [*STREAMED, "train.steps=2"]
    mixture = f"data.path=[{{path: {few}, weight: 1}}, {{path: {files['chats']}, weight: 2}}]"
    for words, message in (
        (f"data.path={few}", "has 3 rows, fewer than a step"),
        (mixture, "weights and repeats"),
    ):
        assert message in train("run", *how, words, code=2).err
    assert "nothing to learn" in refusal(streamed, files["chats"], seq_len=8)


def test_another_number_of_rows_is_other_data(train):
    train("run", *STREAMED, "train.steps=2")
    longer, five = [*STREAMED, "train.steps=4"], "batch.rows=5"
    changed = train("run", *longer, five, code=2).err
    for text in ("data.fingerprint", five, "no file has changed"):
        assert text in changed
    allow = "checkpoint.allow_changes=[batch.rows,data.fingerprint]"
    allowed = train("run", *longer, five, allow)
    anew = train("anew", *STREAMED, "train.steps=2", five)
    assert "data   no file has changed" in allowed.out
    assert "data   the streams begin anew" in allowed.out
    stored = train("run", *longer, "data.streaming=false", code=2).err
    assert "has other content" not in stored
    counts = np.diff(allowed["tokens"][1:]).tolist()
    assert counts == np.diff([0, *anew["tokens"]]).tolist()


def test_the_preview_of_a_stream_tells_whole_lengths_and_what_was_left_out(jsonl, preview):
    rows = [{"text": "x" * 200, "topic": "t"}] * 20
    words = ["data=pretrain", f"data.path={jsonl(*rows[:10], 'broken', *rows[10:])}"]
    words += ["batch.seq_len=64", "batch.rows=1", "data.shuffle=false", "preview.rows=1"]
    shown = preview(*words, "data.streaming=true", "data.on_error=skip")
    for text in ("longest 201", "skipped that cannot be read", "a.jsonl:11", "not used: topic"):
        assert text in shown


def spike(real, self, step):
    """Make step SPIKED a spike; if its rows are left out, look where a stop would leave the run."""
    batches = real(self, step)
    if batches.plan.start == 3 * (SPIKED - 1):
        batches.plan = replace(batches.plan, weight=batches.plan.weight / 50)
    elif step == SPIKED:
        assert batches.plan.start == 3 * SPIKED
        assert 3 * (SPIKED - 1) in self.source.cursors
    return batches


def test_a_rewind_takes_the_streams_back_and_where_it_cannot_they_go_on(train):
    how = [*SPIKY, *STREAMED, f"train.steps={SPIKED + 2}"]
    rewinds = ["train.on_spike=rewind train.rewind_margin=0"]
    spiked = inject.around("stream_step", spike)
    plain = train("plain", *how)
    early, late = (
        train(f"{every}", *how, *rewinds, f"checkpoint.every={every}", seam=spiked, ranks=ranks)
        for every, ranks in ((6, 2), (SPIKED, 1))
    )
    each, left_out, remaining = (
        np.diff([0, *run["tokens"]]).tolist() for run in (plain, early, late)
    )
    assert early.event("rewind")[0]["left_out"] == [3 * (SPIKED - 1), 3 * SPIKED]
    assert left_out[:-1] == [*each[: SPIKED - 1], *each[SPIKED:]]
    assert "there is no checkpoint before step" in late.out
    assert f"step-{SPIKED:08}" in late.checkpoints, "the one that was due after the spike"
    assert remaining == each


def test_a_bad_step_names_the_lines_that_were_streamed(train):
    how = [*STREAMED, "train.steps=3 data.packing=none"]
    run = train("run", *how, ranks=2, seam=inject.bad_gradient())
    (event,) = run.event("skipped")
    assert event["ranks"] == [1]
    [(file, line)] = [sample.rsplit(":", 1) for sample in event["samples"]]
    assert file.endswith("chats.jsonl")
    assert 1 <= int(line) <= 100


def test_a_network_that_fails_is_waited_for_without_losing_or_repeating_a_row(files):
    fsspec.filesystem("memory").pipe("/chats.jsonl", files["chats"].read_bytes())
    data, failed, lines = streamed("memory://chats.jsonl", rows=2), [], []
    expected = contents(data.stream(1), 60)

    def read_unit(real, unit):
        for i, row in enumerate(real(unit)):
            if i == 3 and len(failed) % 3 < 2:
                failed.append(unit)
                reset = ConnectionResetError("reset by peer")
                raise UserError("the data cannot be used") from reset
            yield row
        failed.append(None)

    with inject.around("stream_read", read_unit), patch.object(time, "sleep"):
        assert contents(data.stream(1, opens=lines.append), 60) == expected
        with pytest.raises(UserError):
            next(data.stream(1))
    assert "memory://chats.jsonl, tried again in 1 s (reset by peer)" in lines
    assert len(failed) > 4
