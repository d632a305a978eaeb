"""Whatever stands in a field of a row, it is a sample or an error of that row."""

import datetime
import decimal
import functools
import gzip
import io
import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path

import inject
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from folders import table
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refusal, refused
from texts import BYTES, turn
from world import read_lines

from fsdp_trainer.config.data_files import data_files
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files import tables
from fsdp_trainer.data.files.file_splits import read_records, read_unit, split_units
from fsdp_trainer.data.files.sources import Record, RecordError, find_sources
from fsdp_trainer.data.files.table_sizes import size_of_values
from fsdp_trainer.data.records.conversations import FIELDS, REQUIRED, make_reader
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer_template import load_template

BUILDERS = [
    SampleBuilder(Data(), 64, BYTES, load_template(name, BYTES)) for name in ("plain", "chatml")
]
FILES = table("data/broken_files.yaml")
KNOWN = FILES["known"]
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([*KNOWN, 10**400, "[1]", '{"name": "f"}']),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=3)
    ),
    max_leaves=6,
)


def with_any_turn(first, question, role, content):
    """Two turns, the second of which has any value in some of its fields."""
    turn = st.fixed_dictionaries({}, optional=dict.fromkeys((role, content, *FILES["turn"]), ANY))
    return turn.map(lambda odd: [{role: question, content: "q"}, {role: first, content: "a"} | odd])


TURNS = with_any_turn("assistant", "user", "role", "content")
SHAREGPT = with_any_turn("gpt", "human", "from", "value")
ODD_TURNS = {
    "messages": {"messages": TURNS, "tools": ANY},
    "preference": {"chosen": TURNS, "rejected": TURNS},
    "sharegpt": {"conversations": SHAREGPT},
}


def rows_of(format):
    """Rows of a format with any values in its fields."""
    required, others = REQUIRED[format], set(FIELDS[format]) - set(REQUIRED[format])
    fields = dict.fromkeys(required, ANY | st.just("x"))
    return st.fixed_dictionaries(fields, optional=dict.fromkeys(sorted(others), ANY))


ROWS = st.one_of(
    *(st.tuples(st.just(format), rows_of(format)) for format in FIELDS),
    *(st.tuples(st.just(name), st.fixed_dictionaries(odd)) for name, odd in ODD_TURNS.items()),
)


@given(ROWS)
@settings(max_examples=150)
def test_any_value_in_any_field_is_read_or_an_error_of_the_row(formatted):
    format, columns = formatted
    row = Record(columns, ("f", 1))
    try:
        reader = make_reader(columns, format, None, "f")
        for builder in BUILDERS:
            builder.render(reader.read(row))
    except RecordError:
        pass


def chat(**of_answer):
    answer = turn("assistant", "a") | of_answer
    return {"messages": [turn("user", "q"), answer]}


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = [
    chat(tool_calls=5), chat(tool_calls="none"), chat(role=["user"]), chat(role=None),
    chat(content=5), chat(weight=10**400),
    chat(content=[{"type": ["text"], "text": "x"}]), chat(weight=1e300), chat(weight="1 kg"),
    chat() | {"tools": 5}, chat(role="\ud800"),
    {"messages": DEEP}, {"messages": "\ud800"},
]  # fmt: skip


def test_broken_rows_are_skipped_or_named(prepared, jsonl):
    lines = [
        *map(json.dumps, [chat(), *BROKEN]),
        f'{{"messages": {DEEP}}}',
        f'{{"messages": {"9" * 5000}}}',
    ]
    file = jsonl(*lines)
    skipped = prepared(file, on_error="skip")
    assert len(skipped.train[0]) == 1
    assert f"skipped {len(lines) - 1} rows" in "\n".join(skipped.report)
    for line in lines[1:]:
        jsonl(lines[0], line)
        assert b"a.jsonl:2" in refusal(prepared, file).encode()


def test_a_row_that_is_read_with_the_last_of_the_stack_is_an_error_of_the_row(prepared, jsonl):
    """A row that could just be read may be too deep to be written: somewhere among these depths."""
    turns = json.dumps(chat(tool_calls=[{"name": "f", "arguments": "HERE"}])["messages"])
    nested = [
        {"messages": turns.replace('"HERE"', "[" * depth + "]" * depth)}
        for depth in range(700, 1000)
    ]
    file = jsonl(*(chat(content=str(i)) for i in range(20)), *nested)
    assert "skipped" in "\n".join(prepared(file, on_error="skip", validation=0.5).report)


@pytest.mark.parametrize("template, validation", [("plain", None), ("chatml", 0.5)])
def test_a_table_may_hold_what_json_cannot(prepared, tmp_path, template, validation):
    odd = {"at": datetime.datetime(2024, 1, 2), "cost": decimal.Decimal("0.10"), "raw": b"\xff"}
    call = {"name": "f", "arguments": odd}
    rows = [
        chat(content=f"a{i}", tool_calls=[call], **odd) | {"tools": [{"name": "f", "default": odd}]}
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = prepared(tmp_path / "a.parquet", validation=validation, template=template)
    assert len(data.train[0]) + (len(data.validation) if data.validation else 0) == 20
    assert "2024-01-02" in BYTES.decode(data.train[0].read(0)[0].tolist())


GOOD = '{"text": "good"}\n'
BROKEN_FILES = FILES["broken"] | {
    "cut.jsonl.gz": (
        gzip.compress((GOOD * 5000).encode(), mtime=0)[:60],
        None,
        "cannot be read from here on",
    ),
    "latin.jsonl": ((GOOD + '{"text": "é"}\n' + GOOD).encode("latin1"), 2, "not UTF-8"),
    "latin.json": (f'[{GOOD},\n{{"text": "é"}}, {GOOD}]'.encode("latin1"), 3, "not UTF-8"),
    "latin.txt": (b"caf\xe9\n", 1, "not UTF-8"),
    "deep.json": (f'[{{"text": {DEEP}}}]', 1, "that can be read"),
    "digits.json": (f'[{{"text": {"9" * 5000}}}]', 1, "that can be read"),
    "footer.parquet": (b"PAR1" + b"x" * 100, 1, "footer"),
    "footer.arrow": (b"ARROW1\0\0" + b"x" * 100, 1, "cannot be read"),
    **{
        f"wide{suffix}": (GOOD.encode("utf-16"), 1, "is UTF-16")
        for suffix in (".jsonl", ".json", ".csv", ".txt")
    },
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_named_with_its_line_or_skipped_and_listed(prepared, tmp_path, name):
    content, line, reason = BROKEN_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "whole.jsonl").write_text(GOOD)
    error = refused(prepared, tmp_path / name)
    (problem,) = error.problems
    assert re.search(reason, problem.reason)
    assert problem.what.startswith(f"{tmp_path}/{name}")
    assert line is None or problem.what.endswith(f":{line}")
    assert ("on_error=skip" in str(error)) != (reason == "holds no rows")
    paths = [tmp_path / name, tmp_path / "whole.jsonl"]
    skipped = prepared(*paths, on_error="skip", template="plain")
    assert len(skipped.train[0]) >= 1
    assert "skipped 1 row " in "\n".join(skipped.report)
    list_of_skipped = skipped.train[0].folder.with_name("skipped.jsonl")
    (listed,) = read_lines(list_of_skipped)
    assert f"{listed['file']}:{listed['line']}" == problem.what
    assert listed["why"] == problem.reason


@pytest.mark.parametrize(
    "name, content",
    yaml.safe_load(r"""
- [a.jsonl, "\ufeff{\"text\": \"good\"}\n"]
- [a.jsonl, "{\"text\": \"good\"}\r\n"]
- [A.JSONL, "{\"text\": \"good\"}\n"]
- [A.JSONL.GZ, "{\"text\": \"good\"}\n"]
- [no_suffix, "{\"text\": \"good\"}\n"]
- [no_suffix, '[{"text": "good"}]']
- [no_suffix_gz, "{\"text\": \"good\"}\n"]
- [a.jsonl, '{"text": "good", "score": NaN}']
"""),
)
def test_what_is_only_unusual_is_read(prepared, tmp_path, name, content):
    packed = content.encode()
    if name.lower().endswith("gz"):
        packed = gzip.compress(packed, mtime=0)
    (tmp_path / name).write_bytes(packed)
    data = prepared(tmp_path / name)
    assert BYTES.decode(data.train[0].read(0)[0].tolist()).startswith("good")


def test_a_long_line_document_or_array_is_read_in_bounded_memory(tmp_path):
    """Whatever the number of units: the text is held a few times, and an array never whole."""
    long = "many words " * 460_000
    array = [{"text": "x" * 10_000}] * 2000
    files = {
        "line.jsonl": (GOOD + json.dumps({"text": long}) + "\n" + GOOD, 3, 5 * len(long)),
        "document.txt": ("a\n\n" + long + "\n\nb", 3, 5 * len(long)),
        "array.json": (",\n".join(json.dumps(array).split(", ")), 2000, 8 << 20),  # of 20 MB
    }
    for name, (content, rows, limit) in files.items():
        (tmp_path / name).write_text(content)
        tracemalloc.start()
        lines = [
            (row.where[1], len(row.columns["text"]))
            for unit in split_units(f"{tmp_path}/{name}", 1 << 17)
            for row in read_unit(unit)
        ]
        assert tracemalloc.get_traced_memory()[1] < limit
        tracemalloc.stop()
        assert len(lines) == rows
        if name == "array.json":
            assert [line for line, _ in lines] == list(range(1, 2001))
        else:
            assert abs(max(length for _, length in lines) - len(long)) < 2


def test_a_line_without_an_end_is_told_before_it_fills_the_memory(jsonl, enter):
    enter(inject.setting("longest_row", 1000))
    enter(inject.setting("json_chunk", 100))
    long = json.dumps({"text": "x" * 5000})
    array = jsonl(f"[{GOOD},{long}]", name="a.json")
    for file, reason, message in (
        (jsonl(GOOD.strip(), long, GOOD.strip()), "longer than", [None, True, None]),
        (array, "in one value", [None, True]),
    ):
        errors = [row.error for row in read_records(str(file))]
        assert [error and reason in error for error in errors] == message


def zstd(content):
    packed = io.BytesIO()
    with pa.output_stream(packed, compression="zstd") as file:
        file.write(content)
        file.flush()
        return packed.getvalue()


def parquet(column, **how):
    file = io.BytesIO()
    pq.write_table(pa.table({"text": column}), file, **how)
    return file.getvalue()


def arrow(column, **how):
    file = io.BytesIO()
    batch = pa.record_batch([column], names=["input_ids"])
    how = pa.ipc.IpcWriteOptions(**how)
    with pa.ipc.new_file(file, batch.schema, options=how) as writer:
        writer.write_batch(batch)
    return file.getvalue()


def arrow_of_edges(*edges):
    """Return an Arrow file with lists of ten numbers between these edges, whatever they say."""
    places = pa.py_buffer(np.array(edges, "<i4").tobytes())
    lists = pa.Array.from_buffers(
        pa.list_(pa.int32()), len(edges) - 1, [None, places],
        children=[pa.array(range(10), pa.int32())],
    )  # fmt: skip
    return arrow(lists)


def arrow_of_nothing():
    """Return an Arrow file with a list of 2³¹ values without a byte."""
    nothing = pa.Array.from_buffers(pa.null(), 2**31 - 2, [None])
    return arrow(pa.ListArray.from_arrays(pa.array([0, 2**31 - 2], pa.int32()), nothing))


def arrow_of_references():
    """Return an Arrow file with a text of 64 KiB once, and 4,000 rows that are this text."""
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), ["x" * 65536])
    return arrow(rows)


def of_pieces(*pieces):
    """Return a function that returns texts, some of which are repeated: [text, times]."""
    texts = (one if isinstance(one, str) else of_pieces(*one[:-1])() * one[-1] for one in pieces)
    return lambda: "".join(texts)


ZEROS, TOO_MUCH = b"\0" * (1 << 22), "at most 200 for each byte are read"
TOO_LARGE = {
    **{name: (of_pieces(*pieces), reason)
       for name, (reason, *pieces) in FILES["too large"].items()},
    **{f"a{suffix}.gz": (lambda: gzip.compress(ZEROS), TOO_MUCH)
       for suffix in (".jsonl", ".json", ".txt", ".csv", ".bin", ".npy", ".parquet", ".arrow")},
    "a.jsonl.zst": (lambda: zstd(ZEROS), TOO_MUCH),
    "a.bin.zst": (lambda: zstd(ZEROS), TOO_MUCH),
    "references.parquet": (lambda: parquet(["x" * 65536] * 100), TOO_MUCH),
    "runs.parquet": (lambda: parquet([7] * (1 << 20)), TOO_MUCH),
    "references.arrow": (arrow_of_references, TOO_MUCH),
    "nothing.arrow": (arrow_of_nothing, TOO_MUCH),
    "backwards.arrow": (lambda: arrow_of_edges(0, 5, 3, 9), "non-monotonic"),
    "outside.arrow": (lambda: arrow_of_edges(0, 5, 100000, 9), "out of bounds"),
    "long.parquet": (lambda: parquet(["x" * 90000, "y"]), "is longer than"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_fill_the_memory_is_one_error_with_the_limit(tmp_path, enter, name):
    make, reason = TOO_LARGE[name]
    limits = {"unpacked_freely": 1 << 18, "most_values": 4000, "json_chunk": 3000}
    limits |= {"longest_row": 80_000} if name.startswith("long") else {}
    for limit, value in limits.items():
        enter(inject.setting(limit, value))
    content = make()
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    errors = [row.error for row in read_records(f"{tmp_path}/{name}") if row.error]
    assert len(errors) == 1
    assert reason in errors[0]


def test_a_compressed_batch_is_refused_before_it_is_unpacked(tmp_path, enter, monkeypatch):
    enter(inject.setting("unpacked_freely", 1 << 18))
    monkeypatch.setattr(tables, "size_of_rows", lambda batch: 1 / 0)
    (tmp_path / "a.arrow").write_bytes(arrow(["x" * 65536] * 100, compression="zstd"))
    (row,) = read_records(f"{tmp_path}/a.arrow")
    assert TOO_MUCH in row.error


def test_views_of_texts_are_read_and_counted(tmp_path):
    texts = pa.array(["short", None, "x" * 40], pa.string_view())
    table = pa.table({"text": texts})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    rows = [row.columns.get("text") for row in read_records(f"{tmp_path}/a.arrow")]
    assert rows == ["short", None, "x" * 40]
    assert size_of_values(texts) == 3 + 45
    assert size_of_values(texts[2:]) == 1 + 40


def test_a_hundred_lists_within_each_other_and_unequal_rows_are_read(jsonl):
    """The limits are those of damaged files: what is nearly as large is as good as any."""
    (row,) = read_records(str(jsonl('{"text": ' + "[" * 99 + "]" * 99 + "}")))
    assert row.error is None
    (row,) = read_records(str(jsonl(json.dumps({"text": "[" * 500 + "," * 500}))))
    assert row.error is None


def test_compressed_tokens_are_not_held_in_memory(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 250, 1 << 22).astype("<u2")
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(tokens.tobytes(), 1))
    tracemalloc.start()
    (row,) = read_records(f"{tmp_path}/a.bin.gz")
    assert tracemalloc.get_traced_memory()[1] < tokens.nbytes / 2
    tracemalloc.stop()
    assert np.array_equal(row.columns["input_ids"].tokens, tokens)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("happens", ["vanishes", "shrinks", "changes"])
def test_a_file_that_changes_while_it_is_read_ends_the_run(prepared, tmp_path, happens, on_error):
    """The run ends even if broken rows are skipped: the cache would hold, under the name of the
    whole file, a part of it."""
    file = tmp_path / "a.jsonl"
    file.write_text(GOOD * 1000)
    changed = {"shrinks": GOOD * 10, "changes": GOOD.replace("good", "evil") * 1000}

    def read(real, unit):
        rows = real(unit)
        yield next(rows)
        if happens == "vanishes":
            file.unlink()
        else:
            file.write_text(changed[happens])
        yield from rows

    with inject.around("file_read", read):
        (problem,) = refused(prepared, file, on_error=on_error).problems
    assert problem.what.startswith(str(file))
    assert "Start again" in problem.reason
    assert not [*(tmp_path / "c").glob("*/meta.json")]


def test_what_is_tokenized_needs_its_source_no_more(train, tmp_path, chats):
    file = tmp_path / "chats.jsonl"
    shutil.copy(chats, file)
    seam = inject.at("data", functools.partial(file.unlink, missing_ok=True), step=1)
    assert train("run", f"data.path={file} train.steps=3", seam=seam).metrics[-1]["step"] == 3


@pytest.mark.parametrize("path", ["**/*.jsonl", "**", "*/**/a.jsonl", "."])
def test_links_in_a_ring_are_gone_through_once_and_those_that_lead_nowhere_are_named(
    tmp_path, path
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.jsonl").write_text(GOOD)
    (tmp_path / "data").mkdir()
    for name, target in {
        "in": "../elsewhere",
        "loop": ".",
        "up": "..",
        "back": "../data",
    }.items():  # Python's own glob follows 4^40 paths
        (tmp_path / "data" / name).symlink_to(target)
    files = data_files(str(tmp_path / "data" / path))
    assert {os.path.realpath(file) for file in files} == {f"{tmp_path}/elsewhere/a.jsonl"}
    assert len(files) < 9
    (tmp_path / "data/b.jsonl").symlink_to("b.jsonl")
    assert "b.jsonl is a broken or circular link" in refusal(
        find_sources, f"{tmp_path}/data", "data.path"
    )


def test_a_folder_that_is_called_like_a_file_is_a_folder(tmp_path):
    (tmp_path / "all.jsonl").mkdir()
    (tmp_path / "all.jsonl/part-0.jsonl").write_text(GOOD)
    for path in ("all.jsonl", "*.jsonl", ""):
        assert [
            Path(f).name for s in find_sources(str(tmp_path / path), "data.path") for f in s.files
        ] == ["part-0.jsonl"]


def test_a_file_that_may_not_be_read_is_named_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(GOOD)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    assert "may not be read by this user:  chmod +r" in refusal(
        find_sources, str(tmp_path), "data.path"
    )
