"""Whatever stands in a field of a row, it is a sample or an error of that row."""

import datetime
import decimal
import functools
import gzip
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import inject
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.config.data_files import data_files
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.file_splits import read_records, read_unit, split_units
from fsdp_trainer.data.files.sources import Record, RecordError, find_sources
from fsdp_trainer.data.records.conversations import FIELDS, REQUIRED, make_reader
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

TOKENIZER = load_tokenizer("demo:bytes")
BUILDERS = [
    SampleBuilder(Data(), 64, TOKENIZER, load_template(name, TOKENIZER))
    for name in ("plain", "chatml")
]
TURN = (
    "role",
    "content",
    "weight",
    "loss_weight",
    "tool_calls",
    "reasoning",
    "reasoning_content",
    "thinking",
    "text",
    "name",
)
KNOWN = [
    "user",
    "assistant",
    "system",
    "tool",
    "function_call",
    "gpt",
    "function",
    "name",
    "arguments",
    "type",
    "text",
    "tool_use",
    "input",
    "id",
]
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
    turn = st.fixed_dictionaries({}, optional=dict.fromkeys((role, content, *TURN), ANY))
    return turn.map(lambda odd: [{role: question, content: "q"}, {role: first, content: "a"} | odd])


ROWS = st.one_of(
    *(
        st.fixed_dictionaries(
            {name: ANY | st.just("x") for name in REQUIRED[format]},
            optional={name: ANY for name in FIELDS[format] if name not in REQUIRED[format]},
        ).map(lambda row, format=format: (format, row))
        for format in FIELDS
    ),
    st.tuples(
        st.just("messages"),
        st.fixed_dictionaries(
            {"messages": with_any_turn("assistant", "user", "role", "content"), "tools": ANY}
        ),
    ),
    st.tuples(
        st.just("preference"),
        st.fixed_dictionaries(
            {
                name: with_any_turn("assistant", "user", "role", "content")
                for name in ("chosen", "rejected")
            }
        ),
    ),
    st.tuples(
        st.just("sharegpt"),
        st.fixed_dictionaries({"conversations": with_any_turn("gpt", "human", "from", "value")}),
    ),
)


@pytest.mark.slow
@given(ROWS)
@settings(max_examples=400, deadline=None)
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
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"} | of_answer,
        ]
    }


def prepared(root, path, **data):
    template = load_template(data.pop("template", "chatml"), TOKENIZER)
    return prepare(Data(path=str(path), **data), Batch(seq_len=512), TOKENIZER, template, root)


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = [
    chat(tool_calls=5), chat(tool_calls="none"), chat(role=["user"]), chat(role=None),
    chat(content=5), chat(weight=10**400),
    chat(content=[{"type": ["text"], "text": "x"}]), chat(weight=1e300), chat(weight="1"),
    chat() | {"tools": 5}, chat(role="\ud800"),
    {"messages": DEEP}, {"messages": "\ud800"},
]  # fmt: skip


@pytest.mark.slow
def test_broken_rows_are_skipped_or_named(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [
        *map(json.dumps, [chat(), *BROKEN]),
        f'{{"messages": {DEEP}}}',
        f'{{"messages": {"9" * 5000}}}',
    ]
    file.write_text("\n".join(lines))
    skipped = prepared(tmp_path / "c", file, on_error="skip")
    assert len(skipped.train[0]) == 1
    assert f"skipped {len(lines) - 1} rows" in "\n".join(skipped.report)
    for line in lines[1:]:
        file.write_text(lines[0] + "\n" + line)
        with pytest.raises(UserError, match=r"a\.jsonl:2") as raised:
            prepared(tmp_path / "c", file)
        str(raised.value).encode()


@pytest.mark.slow
def test_a_row_that_is_read_with_the_last_of_the_stack_is_an_error_of_the_row(tmp_path):
    """A row that could just be read may be too deep to be written: somewhere among these depths."""
    turns = json.dumps(chat(tool_calls=[{"name": "f", "arguments": "HERE"}])["messages"])
    nested = [
        json.dumps({"messages": turns.replace('"HERE"', "[" * depth + "]" * depth)})
        for depth in range(700, 1000)
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join([*(json.dumps(chat(content=str(i))) for i in range(20)), *nested])
    )
    assert "skipped" in "\n".join(
        prepared(tmp_path / "c", tmp_path / "a.jsonl", on_error="skip", validation=0.5).report
    )


@pytest.mark.parametrize(
    "content",
    [
        f'[{{"text": {DEEP}}}]',
        f'{{"text": {DEEP}}}\n{{"text": "b"}}',
        f'[{{"text": {"9" * 5000}}}]',
    ],
)
def test_json_that_python_does_not_read_is_an_error_of_the_file(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    rows = list(read_records(str(tmp_path / "a.json")))
    assert "that can be read" in rows[0].error


@pytest.mark.slow
@pytest.mark.parametrize("validation", [None, 0.5])
@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_a_table_may_hold_what_json_cannot(tmp_path, validation, template):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    odd = {"at": datetime.datetime(2024, 1, 2), "cost": decimal.Decimal("0.10"), "raw": b"\xff"}
    call = {"name": "f", "arguments": odd}
    rows = [
        chat(content=f"a{i}", tool_calls=[call], **odd) | {"tools": [{"name": "f", "default": odd}]}
        for i in range(20)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = prepared(
        tmp_path / "c", tmp_path / "a.parquet", validation=validation, template=template
    )
    assert len(data.train[0]) + (len(data.validation) if data.validation else 0) == 20
    assert "2024-01-02" in TOKENIZER.decode(data.train[0].read(0)[0].tolist())


GOOD = '{"text": "good"}\n'
BROKEN_FILES = {
    "cut.jsonl.gz": (
        gzip.compress((GOOD * 5000).encode(), mtime=0)[:60],
        None,
        "cannot be read from here on",
    ),
    "plain.jsonl.gz": (GOOD, 1, "Not a gzipped file"),
    "cut.jsonl": (GOOD + '{"text": "ha', 2, "not JSON: Unterminated string starting at char"),
    "ended.jsonl": (GOOD + '{"text": "ha\r\n' + GOOD, 2, "Unterminated string .* character 10$"),
    "latin.jsonl": ((GOOD + '{"text": "é"}\n' + GOOD).encode("latin1"), 2, "not UTF-8"),
    "latin.json": (f'[{GOOD},\n{{"text": "é"}}, {GOOD}]'.encode("latin1"), 3, "not UTF-8"),
    "latin.txt": (b"caf\xe9\n", 1, "not UTF-8"),
    "list.jsonl": (GOOD + "[1]", 2, "not an object"),
    "five.json": ("5", 1, "neither an array"),
    "comma.json": (f"[{GOOD}{GOOD}]", 2, "Expecting , at column"),
    "history.jsonl": (
        '{"instruction": "q", "output": "a"}\n{"instruction": "q", "output": "a", "history": [5]}',
        2,
        "'history' should be a list of turns, it holds int 5",
    ),
    "types.jsonl": (GOOD + '{"text": [5]}\n', 2, "'text' should be text, it is list"),
    "nan.jsonl": (GOOD + '{"text": NaN}\n', 2, "'text' is null"),
    "twice.jsonl": (GOOD + '{"text": "a", "text": "b"}\n', 2, "'text' twice"),
    "twice.json": (f'[{GOOD},\n{{"text": "a", "text": "b"}}, {GOOD}]', 3, "'text' twice"),
    "nul.jsonl": (GOOD + "\0" * 100 + "\n", 2, "NUL byte"),
    "nul.txt": ("a\n\0\nb\n", 2, "NUL byte"),
    "nul.csv": ("text\na\nb\0\n", 3, "NUL byte"),
    "two.json": (f"[{GOOD}]\n[{GOOD}]", 3, "something follows the array"),
    "open.json": (f"[{GOOD}", 2, "Expecting ,"),
    "quote.csv": ('text\na\n"b\nc\n', 3, "a quote is not closed"),
    "empty.jsonl": ("", 1, "holds no rows"),
    "empty.json": ("", 1, "neither an array"),
    "empty.csv": ("", 1, "holds no rows"),
    "empty.parquet": ("", 1, "cannot be read"),
    "footer.parquet": (b"PAR1" + b"x" * 100, 1, "footer"),
    "footer.arrow": (b"ARROW1\0\0" + b"x" * 100, 1, "cannot be read"),
    **{
        f"wide{suffix}": (GOOD.encode("utf-16"), 1, "is UTF-16")
        for suffix in (".jsonl", ".json", ".csv", ".txt")
    },
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_named_with_its_line_or_skipped_and_listed(tmp_path, name):
    content, line, reason = BROKEN_FILES[name]
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "whole.jsonl").write_text(GOOD)
    paths = [str(tmp_path / name), str(tmp_path / "whole.jsonl")]
    with pytest.raises(UserError, match=reason) as raised:
        prepared(tmp_path / "c", tmp_path / name)
    (problem,) = raised.value.problems
    assert problem.what.startswith(str(tmp_path / name))
    assert line is None or problem.what.endswith(f":{line}")
    skipped = prepare(
        Data(path=paths, on_error="skip"),
        Batch(seq_len=64),
        TOKENIZER,
        load_template("plain", TOKENIZER),
        tmp_path / "c",
    )
    assert len(skipped.train[0]) >= 1
    assert "skipped 1 rows" in "\n".join(skipped.report)
    (listed,) = [
        json.loads(entry)
        for entry in (skipped.train[0].folder.parent / "skipped.jsonl").read_text().splitlines()
    ]
    assert f"{listed['file']}:{listed['line']}" == problem.what
    assert listed["why"] == problem.reason


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD.encode()),
        ("a.jsonl", GOOD.replace("\n", "\r\n").encode()),
        ("A.JSONL", GOOD.encode()),
        ("A.JSONL.GZ", gzip.compress(GOOD.encode(), mtime=0)),
        ("no_suffix", GOOD.encode()),
        ("no_suffix", b'[{"text": "good"}]'),
        ("no_suffix", gzip.compress(GOOD.encode(), mtime=0)),
        ("a.jsonl", b'{"text": "good", "score": NaN}'),
    ],
)
def test_what_is_only_unusual_is_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    data = prepared(tmp_path / "c", tmp_path / name)
    assert TOKENIZER.decode(data.train[0].read(0)[0].tolist()).startswith("good")


@pytest.mark.slow
@pytest.mark.further
def test_a_line_and_a_document_of_50_megabytes_are_read_in_bounded_memory(tmp_path):
    """Whatever the number of units: each byte is looked at once or twice, and the text is held a
    few times."""
    long = "many words " * 4_600_000
    (tmp_path / "line.jsonl").write_text(GOOD + json.dumps({"text": long}) + "\n" + GOOD)
    (tmp_path / "document.txt").write_text("a\n\n" + long + "\n\nb")
    for file in ("line.jsonl", "document.txt"):
        tracemalloc.start()
        lengths = [
            len(row.columns["text"])
            for unit in split_units(str(tmp_path / file), 1 << 20)
            for row in read_unit(unit)
        ]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(lengths) == 3
        assert abs(max(lengths) - len(long)) < 2
        assert peak < 5 * len(long)


@pytest.mark.slow
def test_an_array_is_read_in_bounded_memory(tmp_path):
    (tmp_path / "a.json").write_text(
        "[" + ",\n".join(json.dumps({"text": "x" * 10_000}) for _ in range(2000)) + "]"
    )
    tracemalloc.start()
    assert [row.where[1] for row in read_records(str(tmp_path / "a.json"))] == list(range(1, 2001))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of 20 MB
    tracemalloc.stop()


def test_a_line_without_an_end_is_told_before_it_fills_the_memory(tmp_path, enter):
    enter(inject.setting("longest_row", 1000))
    enter(inject.setting("json_chunk", 100))
    long = json.dumps({"text": "x" * 5000})
    (tmp_path / "a.jsonl").write_text(f"{GOOD}{long}\n{GOOD}")
    (tmp_path / "a.json").write_text(f"[{GOOD},{long}]")
    assert [
        row.error and "longer than" in row.error for row in read_records(str(tmp_path / "a.jsonl"))
    ] == [None, True, None]
    assert [
        row.error and "in one value" in row.error for row in read_records(str(tmp_path / "a.json"))
    ] == [None, True]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("happens", ["vanishes", "shrinks", "changes"])
def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path, happens, on_error):
    """The run ends even if broken rows are skipped: the cache would hold, under the name of the
    whole file, a part of it."""
    file = tmp_path / "a.jsonl"
    file.write_text(GOOD * 1000)

    def read(real, unit):
        rows = real(unit)
        yield next(rows)
        if happens == "vanishes":
            file.unlink()
        else:
            file.write_text(
                GOOD * 10 if happens == "shrinks" else GOOD.replace("good", "evil") * 1000
            )
        yield from rows

    with inject.around("file_read", read), pytest.raises(UserError) as raised:
        prepared(tmp_path / "c", file, on_error=on_error)
    (problem,) = raised.value.problems
    assert problem.what.startswith(str(file))
    assert "Start again" in problem.reason
    assert not [*(tmp_path / "c").glob("*/meta.json")]


@pytest.mark.slow
def test_what_is_tokenized_needs_its_source_no_more(train, tmp_path, chats):
    file = tmp_path / "chats.jsonl"
    shutil.copy(chats, file)
    seam = inject.at("data", functools.partial(file.unlink, missing_ok=True), step=1)
    assert train("run", f"data.path={file}", "train.steps=3", seam=seam).metrics[-1]["step"] == 3


@pytest.mark.parametrize("path", ["**/*.jsonl", "**", "*/**/a.jsonl", "."])
def test_links_in_a_ring_are_gone_through_once_and_those_that_lead_nowhere_are_named(
    tmp_path, path
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jsonl").write_text(GOOD)
    (tmp_path / "data").mkdir()
    for name, target in {
        "in": "../elsewhere",
        "loop": ".",
        "up": "..",
        "back": "../data",
    }.items():  # Python's own glob follows 4^40 paths
        (tmp_path / "data" / name).symlink_to(target)
    files = data_files(str(tmp_path / "data" / path))
    assert {os.path.realpath(file) for file in files} == {str(tmp_path / "elsewhere" / "a.jsonl")}
    assert len(files) < 9
    (tmp_path / "data" / "b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl is a broken or circular link"):
        find_sources(str(tmp_path / "data"), "data.path")


def test_a_folder_that_is_called_like_a_file_is_a_folder(tmp_path):
    (tmp_path / "all.jsonl").mkdir()
    (tmp_path / "all.jsonl" / "part-0.jsonl").write_text(GOOD)
    for path in ("all.jsonl", "*.jsonl", ""):
        assert [
            Path(f).name for s in find_sources(str(tmp_path / path), "data.path") for f in s.files
        ] == ["part-0.jsonl"]


def test_a_file_that_may_not_be_read_is_named_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(GOOD)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    with pytest.raises(UserError, match=r"may not be read by this user:  chmod \+r"):
        find_sources(str(tmp_path), "data.path")
