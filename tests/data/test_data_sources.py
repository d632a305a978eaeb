"""Files of every form are read, and broken ones named by file and line."""

import gzip
import json
from pathlib import Path

import inject
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from folders import table
from refused import refusal, refused
from texts import read_row as read
from texts import turn

from fsdp_trainer.data.files import json_values
from fsdp_trainer.data.files.file_splits import (
    Lines,
    lines_before,
    read_records,
    read_unit,
    split_units,
)
from fsdp_trainer.data.files.sources import (
    Problems,
    RecordError,
    find_sources,
    lines_on_folders,
)
from fsdp_trainer.data.records.conversations import Document, make_reader
from fsdp_trainer.errors import UserError

CASES = table("data/source_files.yaml")

ASK, ANSWER = turn("user", "q"), turn("assistant", "a")
QA = [ASK, ANSWER]


def written(folder, name, content=""):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    "name, content, rows",
    CASES["rows by line"],
)
def test_every_row_is_read_with_its_line(tmp_path, name, content, rows):
    """Blank lines separate documents, and line ends of Windows are not text."""
    records = read_records(written(tmp_path, name, content))
    assert {row.where[1]: row.columns.get("text") for row in records} == rows


def test_failing_gathers_several_problems_and_skipping_counts_them():
    failing, skipping = Problems("fail"), Problems("skip")
    for line in range(1, 100):
        for problems in (failing, skipping):
            problems.add(("f", line), "broken")
        assert failing.will_raise
        assert failing.is_enough == (line >= 5)
    problems = refused(failing.raise_if_failing).problems
    assert [p.what for p in problems] == ["f:1", "f:2", "f:3", "f:4", "f:5"]
    skipping.raise_if_failing()
    assert skipping.count == 99
    assert not skipping.will_raise


def test_paths_are_files_folders_globs_and_lists(tmp_path):
    a, b = written(tmp_path, "a.jsonl", "{}"), written(tmp_path, "b.txt", "x")
    written(tmp_path, "notes.pdf", "x")
    written(tmp_path, "README.md", "what this is")

    def files(path):
        return [file for source in find_sources(path, "data.path") for file in source.files]

    assert files(str(tmp_path)) == [a, b]
    assert files(f"{tmp_path}/*.txt") == [b]
    assert files([b, a, "demo:backwards"]) == [b, a, "demo:backwards"]


# --- what a row means ---------------------------------------------------------------------------


def test_a_text_column_is_a_document():
    assert read({"text": "t"}) == read({"content": "t"}) == Document("t", ("f", 1))
    assert make_reader({"conversations": []}, "auto", None, "file").format == "sharegpt"


def test_fields_say_what_columns_mean():
    columns = {"anfrage": "q", "antwort": "a", "text": "t", "body": {"turns": QA}, "a.b": "u"}
    assert read(columns, fields={"prompt": "anfrage", "completion": "antwort"}).messages == QA
    # a name with a dot leads into a column
    assert read(columns, fields={"messages": "body.turns"}).messages == QA
    for column, text in (("antwort", "a"), ("a.b", "u")):
        assert read(columns, fields={"text": column}).text == text
    with pytest.raises(RecordError, match=r"has no 'body\.wat\.turns'"):
        read(columns, fields={"messages": "body.wat.turns"})


def test_answers_that_are_marked_as_bad_are_not_learnt_unseen():
    pair = {"prompt": "q", "completion": "a", "label": False}
    for row in (pair, {"messages": QA, "label": False}):
        assert read(row).is_good is False, "which only objective=kto takes"
    assert read(pair, format="prompt_completion").messages == QA
    assert read({"text": "t", "label": True}).text == "t"  # of a classifier


@pytest.mark.parametrize("column", [None, 5, ["a"]])
def test_a_column_that_is_no_text_is_one_that_the_row_lacks(column):
    with pytest.raises(RecordError, match="its columns: answer"):
        read({"answer": "1"}, fields={"prompt": column, "completion": "answer"})


# --- files of every kind ------------------------------------------------------------------------

TABLE = [
    {
        "messages": [
            turn("user", f"q{i}"),
            turn("assistant", f"a{i}") | ({"weight": 0.5} if i % 2 else {}),
        ]
    }
    for i in range(600)
]


def write_table(path):
    """TABLE in every form that holds nested columns."""
    table, sink = pa.Table.from_pylist(TABLE), pa.BufferOutputStream()
    if ".parquet" in path.suffixes:
        pq.write_table(table, sink, row_group_size=250)
    elif ".arrow" in path.suffixes:
        make = pa.ipc.new_file if path.name.startswith("file") else pa.ipc.new_stream
        with make(sink, table.schema) as writer:
            writer.write_table(table, 250)
    else:
        sink.write("".join(json.dumps(row) + "\n" for row in TABLE).encode())
    content = sink.getvalue().to_pybytes()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = pa.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return str(path)


UNITS = yaml.safe_load("""
a.parquet: 3
file.arrow: 3
stream.arrow: 1
a.jsonl.gz: 1
a.jsonl.zst: 1
a.parquet.gz: 1
stream.arrow.gz: 1
""")


@pytest.mark.parametrize("name", UNITS)
def test_every_kind_of_file_gives_the_same_rows_also_in_units_and_says_where_it_was_cut_off(
    tmp_path, name
):
    """Arrow fills a struct's missing keys with null: they are gone again."""
    file = write_table(tmp_path / name)
    expected = [(columns, number) for number, columns in enumerate(TABLE, start=1)]
    assert [(row.columns, row.where[1]) for row in read_records(file)] == expected
    units = split_units(f"file://{file}", 1)
    assert len(units) == UNITS[name]
    assert expected == [
        (row.columns, lines_before(unit) + row.where[1])
        for unit in units
        for row in read_unit(unit)
    ]
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[: len(content) // 2])
    *whole, last = read_records(file)
    assert "from here on" in last.error
    assert last.where == (file, len(whole) + 1)
    assert not any(row.error for row in whole)


def test_csv_is_read_with_quotes_and_line_breaks_and_named_by_line(tmp_path):
    text = (
        'prompt,completion\r\nq,a\r\n"two\r\nlines","an '
        '""x"""\r\nq,a,b\r\n\r\ncaf\udce9,a\r\nq,"no end'
    )
    rows = list(read_records(written(tmp_path, "a.csv", text.encode("utf-8", "surrogateescape"))))
    assert [row.where[1] for row in rows] == [2, 3, 5, 7, 8]
    assert [row.columns for row in rows[:2]] == [
        {"prompt": "q", "completion": "a"},
        {"prompt": "two\nlines", "completion": 'an "x"'},
    ]
    for row, reason in zip(
        rows[2:], ["3 values for 2 columns", "not UTF-8", "not CSV"], strict=True
    ):
        assert reason in row.error
    (row,) = read_records(written(tmp_path, "b.tsv", "text\tn\n" + "x" * 200_000 + "\t1\n"))
    assert row.columns["text"] == "x" * 200_000


A, B = '{"text": "a"}', '{"text": "b"}'
FORMS = CASES["forms of JSON"]
"""Content of a file, and the lines and texts of its rows; None for those that cannot be read."""


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("content", FORMS)
def test_json_is_read_however_its_objects_lie_in_the_file(tmp_path, name, content):
    packed = gzip.compress(content.encode()) if name.endswith(".gz") else content
    rows = [*read_records(written(tmp_path, name, packed))]
    assert [[row.where[1], row.columns.get("text")] for row in rows] == FORMS[content]
    assert [row.error is None for row in rows] == [text is not None for _, text in FORMS[content]]


def test_a_chat_of_plain_texts_alone_in_its_file_is_one_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["q", "a"]}\n')
    (row,) = read_records(f"{tmp_path}/a.jsonl")
    assert row.columns == {"turns": ["q", "a"]}


def test_an_array_on_one_line_may_hold_more_values_than_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(json_values, "MOST_VALUES", 3)
    rows = [*read_records(written(tmp_path, "a.jsonl", f"[{A}, {B}]"))]
    assert [row.columns["text"] for row in rows] == ["a", "b"]


def test_a_table_with_a_column_twice_is_refused(tmp_path):
    inner = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
    for names, columns in ((["t", "t"], [pa.array(["a"])] * 2), (["t"], [inner])):
        table = pa.Table.from_arrays(columns, names=names)
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(UserError, match=f"column '{'tx'[len(names) == 1]}' twice"):
            [*read_records(f"{tmp_path}/a.parquet")]


TABLES = CASES["tables"]


@pytest.mark.parametrize("name", TABLES)
def test_the_separator_of_a_table_is_found_or_named_in_the_first_line(tmp_path, name):
    rows = [*read_records(written(tmp_path, name, TABLES[name]))]
    assert [row.columns for row in rows] == [
        {"prompt": "q, r", "completion": "a"},
        {"prompt": "s\n;", "completion": "b"},
    ]
    assert [row.where[1] for row in rows] == ([3, 4] if "sep" in TABLES[name] else [2, 4])


def test_columns_without_a_name_are_numbered_and_rows_below_an_open_quote_are_read(tmp_path):
    content = ',text,\n0,a,\n1,"b,\n2,c,\n3,d,\n'
    rows = [*read_records(written(tmp_path, "a.csv", content))]
    assert [row.columns.get("text") for row in rows] == ["a", None, "c", "d"]
    assert rows[0].columns == {"Unnamed: 0": "0", "text": "a", "Unnamed: 2": ""}
    assert "a quote is not closed" in rows[1].error
    text = 'text,n\na,1\n"many\nlines, here\n and, here, too\n'
    *_, last = read_records(written(tmp_path, "b.csv", text))
    assert "the row goes on for 2 more lines" in last.error


def test_files_in_a_folder_that_are_not_read_are_named(tmp_path):
    for name in ("a.jsonl", "b.jsonl.xz", "sub/c.xlsx", "README.md", "p.png", ".d.zip", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path, name, A)
    paths = [str(tmp_path), f"{tmp_path}/a.jsonl"]
    line = f"{tmp_path}: files not read: b.jsonl.xz, sub/c.xlsx"
    assert lines_on_folders(paths) == [line]
    written(tmp_path, "NOTES.md", "x")
    stray = f"{tmp_path}: read as texts, beside other data: NOTES.md"
    assert lines_on_folders(paths) == [line, stray]


LFS = b"version https://git-lfs.github.com/spec/v1"


@pytest.mark.parametrize(
    "content, advice",
    [
        (gzip.compress(b"{}", mtime=0), "ends in .gz"), (b"PAR1xxxx", "ends in .parquet"),
        (b"PK\3\4xx", "zip archive"), (LFS, "git lfs pull"),
        ("{}".encode("utf-16le"), "iconv -f utf-16le"), ("{}".encode("utf-32"), "iconv -f utf-32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
def test_a_file_of_another_kind_than_its_name_says_is_named(tmp_path, content, advice, suffix):
    (row,) = read_records(written(tmp_path, f"a{suffix}", content))
    assert advice in row.error
    assert row.where[1] == 1
    if content == LFS:
        (row,) = read_records(written(tmp_path, "a.parquet", content))
        assert advice in row.error


TEXTS = CASES["texts"]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bytes_each", [1, 2, 3, 7, 16, 1000])
def test_units_of_a_text_hold_each_row_once_and_in_order(tmp_path, name, bytes_each):
    """Wherever the file is cut, in the middle of a line or of a blank one."""
    file = written(tmp_path, name, TEXTS[name])
    units = split_units(file, bytes_each)
    assert (len(units) > 1) == (bytes_each < 1000)
    assert [(r.columns, r.where[1], r.error) for r in read_records(file)] == [
        (row.columns, lines_before(unit) + row.where[1], row.error)
        for unit in units
        for row in read_unit(unit)
    ]
    counted = Lines()  # once each, also of a file that is named twice
    assert [counted.before(unit) for unit in [*units, *units]] == 2 * [
        lines_before(unit) for unit in units
    ]


# --- sources and their names --------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, called",
    CASES["names"],
)
def test_sources_have_short_names_that_differ_wherever_they_lie(tmp_path, names, called):
    for place in ("here", "there"):  # the names are in the fingerprint
        folder = tmp_path / place / "data"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            written(folder, name)
        sources = find_sources(str(folder), "data.path")
        assert sum(len(source.files) for source in sources) == len(names)
        assert [source.name for source in sources] == called


def test_an_entry_of_a_list_is_one_source_also_if_it_is_named_in_two_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    books = [written(tmp_path / "books", name) for name in ("a.txt", "b.txt")]
    file = written(tmp_path, "c.txt")
    paths = ["books", "c.txt", "./c.txt", file, "demo:backwards", "demo:backwards/heldout"]
    sources = find_sources(paths, "data.path")
    assert [source.name for source in sources] == ["books", "c", "demo:backwards", "heldout"]
    assert [[Path(one).resolve() for one in source.files] for source in sources[:2]] == [
        [*map(Path, books)],
        [Path(file)] * 3,
    ]


def test_a_folder_with_several_splits_is_refused_and_each_can_be_named(tmp_path):
    """One may be saved by `datasets`, of which the descriptions are no data."""
    saved, shards = tmp_path / "saved", tmp_path / "shards"
    for split in ("train", "test"):
        (saved / split).mkdir(parents=True)
        for name in ("data-0-of-2.arrow", "data-1-of-2.arrow", "state.json", "tokenizer.json"):
            written(saved / split, name)
    written(saved, "dataset_dict.json", '{"splits": ["train", "test"]}')
    shards.mkdir()
    for name in ("train-0-of-2.csv", "train-1-of-2.csv", "test-0-of-1.csv"):
        written(shards, name)
    for folder in (saved, shards):
        said = refusal(find_sources, str(folder), "data.path")
        assert "several splits: train test" in said
    advised = said.split("'")[1]
    for path, called in ((saved / "train", "data"), (advised, "train")):
        (source,) = find_sources(str(path), "data.path")
        assert source.name == called
        assert len(source.files) == 2
    assert len(find_sources(f"{shards}/*", "data.path")) == 2  # named on purpose


# --- from the command line ----------------------------------------------------------------------


def test_a_missing_pyarrow_is_told_with_the_command_that_installs_it(tmp_path, preview, enter):
    enter(inject.without_package("pyarrow"))
    written(tmp_path, "a.parquet")
    said = preview(f"data.path={tmp_path}", "logging.wat=1", code=2)
    assert "2 problems" in said
    assert "pip install 'fsdp_trainer[arrow]'" in said


def test_a_stream_of_conversations_is_refused(tmp_path, preview):
    chats = written(tmp_path, "a.jsonl", json.dumps({"messages": QA}))
    streamed = f"data.path={chats}", "data.packing=stream"
    assert "data.too_long=split" in preview(*streamed, code=2)
    message = preview(*streamed, "data.too_long=split", code=2)
    assert f"{chats} holds conversations" in message
    assert "Use  data.packing=best_fit data.too_long=drop" in message
    preview(streamed[0], "data.packing=best_fit", "data.too_long=drop")
