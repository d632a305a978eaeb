"""Files of every form are read, and broken ones named by file and line."""

import gzip
import json
import shutil
from pathlib import Path

import inject
import pytest

from fsdp_trainer.data.files.file_splits import (
    Lines,
    lines_before,
    read_records,
    read_unit,
    split_units,
)
from fsdp_trainer.data.files.sources import Problems, Record, RecordError, find_sources
from fsdp_trainer.data.records.conversations import Conversation, Document, make_reader
from fsdp_trainer.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
QUESTION_ANSWER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(columns, format="auto", fields=None):
    return make_reader(columns, format, fields, "file").read(Record(columns, ("file", 1)))


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}', [1, 3]),
        ("a.json", '[\n{"text": "a"},\n\n {"text":\n "b"}]', [2, 4]),
        ("a.json", '{"version": [1],\n "n": {"x": [1]}}', [1]),
        ("a.json", '{"version": 1, "data":\n [{"text": "a"},\n{"text": "b"}]}', [2, 3]),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', [1, 2]),
        ("a.txt", "a\nb\n", [1, 2]),
        ("a.txt", "\na\nb\n\n\nc", [2, 6]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}', [1]),
    ],
)
def test_every_row_knows_its_line(tmp_path, name, content, lines):
    assert [row.where[1] for row in read_records(written(tmp_path, name, content))] == lines


def test_blank_lines_separate_documents(tmp_path):
    rows = read_records(written(tmp_path, "a.txt", "one\ntwo\n\nthree\n"))
    assert [row.columns["text"] for row in rows] == ["one\ntwo", "three"]


def test_failing_gathers_several_problems_and_skipping_counts_them():
    problems = Problems("fail")
    for line in range(1, 100):
        problems.add(("f", line), "broken")
        assert problems.will_raise
        assert problems.is_enough == (line >= 5)
    with pytest.raises(UserError) as raised:
        problems.raise_if_failing()
    assert [p.what for p in raised.value.problems] == ["f:1", "f:2", "f:3", "f:4", "f:5"]
    skipping = Problems("skip")
    for line in range(1, 100):
        skipping.add(("f", line), "broken")
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
    assert files(str(tmp_path / "*.txt")) == [b]
    assert files([b, a, "demo:backwards"]) == [b, a, "demo:backwards"]


@pytest.mark.parametrize(
    "path", [None, [], 5, "missing.jsonl", "no/*.jsonl", "demo:nothing", "s3://bucket/x"]
)
def test_a_path_without_data_is_refused_by_name(path):
    with pytest.raises(UserError, match=r"data\.path=") as raised:
        find_sources(path, "data.path")
    assert raised.value.problems[0].reason


@pytest.mark.parametrize(
    "columns",
    [
        CHAT,
        {"conversations": CHAT["messages"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "prompter", "value": "q"}, {"from": "model", "value": "a"}]},
        {"instruction": "q", "input": "", "output": "a"},
        {"question": "q", "answer": "a"},
        {"instruction": "q", "response": "a"},
        {"prompt": "q", "completion": "a", "other": 1},
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "a"}],
        },
        {"conversation": {"id": 1, "messages": CHAT["messages"]}, "other": {}},
        {"messages": [{"role": "User", "content": "q"}, {"role": "Assistant", "content": "a"}]},
        {"conversations": [{"role": "user", "value": "q"}, {"from": "gpt", "content": "a"}]},
    ],
)
def test_formats_are_found_out(columns):
    assert read(columns).messages == QUESTION_ANSWER


def test_a_text_column_is_a_document():
    assert read({"text": "t"}) == Document("t", ("file", 1))
    assert read({"content": "t"}) == Document("t", ("file", 1))


def test_fields_say_what_columns_mean():
    columns = {"anfrage": "q", "antwort": "a", "text": "t"}
    assert (
        read(columns, fields={"prompt": "anfrage", "completion": "antwort"}).messages
        == QUESTION_ANSWER
    )
    assert read(columns, fields={"text": "antwort"}) == Document("a", ("file", 1))
    assert read({"chat": CHAT["messages"]}, fields={"messages": "chat"}).messages == QUESTION_ANSWER


def test_what_is_given_beside_an_instruction_is_part_of_the_question():
    for columns in (
        {"input": "i", "output": "a"},
        {"context": "i", "response": "a"},
        {"input": "i", "answer": "a"},
    ):
        assert read({"instruction": "q", **columns}).messages[0]["content"] == "q\ni"


def test_a_name_with_a_dot_leads_into_a_column():
    columns = {"request": {"body": {"turns": CHAT["messages"]}}, "a.b": "t"}
    assert read(columns, fields={"messages": "request.body.turns"}).messages == QUESTION_ANSWER
    assert read(columns, fields={"text": "a.b"}).text == "t"
    with pytest.raises(RecordError, match=r"has no 'request\.wat\.turns'"):
        read(columns, fields={"messages": "request.wat.turns"})


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"training": False}, {"loss": False}, {"masked": True}]
)
def test_a_turn_that_other_trainers_leave_out_is_not_learnt(flag):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **flag}]
    assert read({"messages": turns}).messages[1] == {
        "role": "assistant",
        "content": "a",
        "weight": 0.0,
    }
    opposite = {name: not value for name, value in flag.items()}
    assert (
        read({"messages": [turns[0], {"role": "assistant", "content": "a", **opposite}]}).messages
        == QUESTION_ANSWER
    )


def test_answers_in_a_prompt_are_not_learnt():
    turns = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    ]
    messages = read({"prompt": turns, "completion": "a2"}).messages
    assert [turn.get("weight", 1.0) for turn in messages if turn["role"] == "assistant"] == [
        0.0,
        1.0,
    ]


def test_answers_that_are_marked_as_bad_are_not_learnt_unseen():
    for row in ({"prompt": "q", "completion": "a"}, CHAT):
        assert read(row | {"label": False}).is_good is False, "which only objective=kto takes"
    assert (
        read(
            {"prompt": "q", "completion": "a", "label": False}, format="prompt_completion"
        ).messages
        == QUESTION_ANSWER
    )
    assert read({"text": "t", "label": True}).text == "t"  # of a classifier


def test_a_function_call_in_the_older_form_of_openai_is_a_tool_call():
    turns = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "add", "arguments": '{"a": 1}'},
        },
        {"role": "function", "name": "add", "content": "2"},
        {"role": "assistant", "content": "a"},
    ]
    messages = read({"messages": turns}).messages
    assert messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert messages[2] == {"role": "tool", "content": "2", "name": "add"}


def test_a_system_column_comes_first():
    columns = {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "s",
    }
    assert read(columns).messages == [{"role": "system", "content": "s"}, *QUESTION_ANSWER]


def test_a_function_call_of_sharegpt_is_a_tool_call_of_the_assistant():
    call = '{"name": "add", "arguments": {"a": 1}}'
    chat = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    conversation = read(
        {"conversations": chat, "tools": json.dumps([{"name": "add", "parameters": {}}])}
    )
    assert isinstance(conversation, Conversation)
    function = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [function],
        "text": call,
    }
    assert conversation.messages[2] == {"role": "tool", "content": "2"}
    assert conversation.tools == [
        {"type": "function", "function": {"name": "add", "parameters": {}}}
    ]


def test_tool_calls_of_openai_have_their_arguments_read():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    conversation = read(
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
        }
    )
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        {"messages": []},
        {"messages": ["x"]},
        {"messages": [{"role": "assistant", "content": "x", "weight": -1}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"no": "name"}]}]},
        {"text": ["x"]},
        {"question": 5, "answer": "a"},
        {"question": None, "answer": "a"},
        {"conversations": [{"from": "human", "value": "q"}], "tools": "no JSON"},
    ],
)
def test_columns_of_the_wrong_type_are_an_error_of_the_row(columns):
    with pytest.raises(RecordError):
        read(columns)


def test_unknown_columns_are_listed_with_an_example():
    with pytest.raises(UserError) as raised:
        read({"body": "x", "title": "y"})
    assert "body title" in str(raised.value)
    assert "data.fields={prompt: body, completion: title}" in str(raised.value)


@pytest.mark.parametrize(
    "fields", [{"wat": "x"}, {"prompt": "x"}, {"prompt": "x", "completion": "y", "wat": "z"}]
)
def test_field_maps_that_fit_no_format_are_refused(fields):
    with pytest.raises(UserError, match=r"data\.fields"):
        read({"x": "1"}, fields=fields)


@pytest.mark.parametrize("column", [None, 5, ["a"]])
def test_a_column_that_is_no_text_is_one_that_the_row_lacks(column):
    with pytest.raises(RecordError, match="its columns: answer"):
        read({"answer": "1"}, fields={"prompt": column, "completion": "answer"})


def test_earlier_turns_of_alpaca_come_first():
    turns = read({"instruction": "q2", "output": "a2", "history": [["q1", "a1"]]}).messages
    assert [(t["role"], t["content"]) for t in turns] == [
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
        ("assistant", "a2"),
    ]


def test_an_empty_list_of_conversations_is_still_sharegpt():
    assert make_reader({"conversations": []}, "auto", None, "file").format == "sharegpt"


def test_line_ends_of_windows_are_not_text(tmp_path):
    assert [
        row.columns["text"] for row in read_records(written(tmp_path, "a.txt", b"a\r\nb\r\n\r\nc"))
    ] == ["a\nb", "c"]


TABLE = [
    {
        "messages": [
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": f"a{i}"} | ({"weight": 0.5} if i % 2 else {}),
        ]
    }
    for i in range(600)
]


def write_table(path, rows):
    """The same rows in every form that holds nested columns."""
    pa = pytest.importorskip("pyarrow")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    table = pa.Table.from_pylist(rows)
    if path.name.endswith((".parquet.gz", ".arrow.gz")):
        inner = Path(write_table(path.with_suffix(""), rows))
        path.write_bytes(gzip.compress(inner.read_bytes()))
        inner.unlink()
    elif path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=250)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        with pa.output_stream(path, compression="zstd") as file:
            file.write(text.encode())
    else:
        make = pa.ipc.new_file if path.name.startswith("file") else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, 250)
    return str(path)


KINDS = [
    "a.parquet",
    "file.arrow",
    "stream.arrow",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.parquet.gz",
    "stream.arrow.gz",
]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    rows = list(read_records(write_table(tmp_path / name, TABLE)))
    assert [
        row.columns for row in rows
    ] == TABLE  # Arrow fills a struct's missing keys with null: they are gone again
    assert [row.where[1] for row in rows] == list(range(1, 601))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_is_read_where_it_lies(tmp_path, name):
    """Files are read by units, over fsspec."""
    file = write_table(tmp_path / name, TABLE)
    units = split_units(f"file://{file}", 1)
    assert len(units) == (3 if name in ("a.parquet", "file.arrow") else 1)
    rows = [
        (row.columns, lines_before(unit) + row.where[1])
        for unit in units
        for row in read_unit(unit)
    ]
    assert rows == [(columns, number) for number, columns in enumerate(TABLE, start=1)]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_was_cut_off_is_named(tmp_path, name):
    path = tmp_path / name
    write_table(path, TABLE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    *whole, last = read_records(str(path))
    assert "from here on" in last.error
    assert last.where == (str(path), len(whole) + 1)
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
    assert [
        reason in row.error
        for row, reason in zip(
            rows[2:], ["3 values for 2 columns", "not UTF-8", "not CSV"], strict=True
        )
    ] == [True] * 3
    assert (
        next(
            read_records(written(tmp_path, "b.tsv", "text\tn\n" + "x" * 200_000 + "\t1\n"))
        ).columns["text"]
        == "x" * 200_000
    )


def test_what_datasets_saves_is_read_and_its_descriptions_are_not(tmp_path):
    pytest.importorskip("pyarrow")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write_table(tmp_path / split / "data-00000-of-00002.arrow", TABLE)
        written(tmp_path / split, "state.json", "{}")
        written(tmp_path / split, "dataset_info.json", "{}")
        written(tmp_path / split, "tokenizer.json", "{}")
    written(tmp_path, "dataset_dict.json", '{"splits": ["train", "test"]}')
    (source,) = find_sources(str(tmp_path / "train"), "data.path")
    assert (source.name, [Path(file).name for file in source.files]) == (
        "data",
        ["data-00000-of-00002.arrow"],
    )
    with pytest.raises(UserError, match="several splits: train test"):
        find_sources(str(tmp_path), "data.path")


def test_a_missing_pyarrow_is_told_with_the_command_that_installs_it(world, tmp_path):
    written(tmp_path, "a.parquet", "")
    arguments = ["preview", f"data.path={tmp_path}", "tokenizer.path=demo:bytes", "logging.wat=1"]
    (result,) = world.command(*arguments, seam=inject.without_package("pyarrow"), code=2)
    assert "2 problems" in result.err
    assert "pip install 'fsdp_trainer[arrow]'" in result.err


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (["a.jsonl", "b.txt"], ["a", "b"]),
        (["x/train.jsonl", "y/train.jsonl"], ["x/train", "y/train"]),
        (["a.jsonl", "a.txt"], ["a.jsonl", "a.txt"]),
        (["a.txt", "b/a.txt", "b/a.jsonl"], ["a.txt", "a.jsonl", "b/a.txt"]),
        (["x/a.txt", "y/a.txt", "c.txt"], ["c", "x/a", "y/a"]),
        (["c4-0-of-2.jsonl", "c4-1-of-2.jsonl", "wiki.jsonl.gz"], ["c4", "wiki"]),
        ([f"{i:03}.txt" for i in range(17)], ["data"]),
    ],
)
def test_sources_have_short_names_that_differ(tmp_path, names, called):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / "data", name, "x")
    sources = find_sources(str(tmp_path / "data"), "data.path")
    assert sum(len(source.files) for source in sources) == len(names)
    assert [source.name for source in sources] == called
    shutil.move(
        tmp_path / "data", tmp_path / "elsewhere" / "data"
    )  # the names are in the fingerprint
    assert [
        source.name for source in find_sources(str(tmp_path / "elsewhere" / "data"), "data.path")
    ] == called


def test_an_entry_of_a_list_is_one_source(tmp_path):
    (tmp_path / "books").mkdir()
    files = [
        written(tmp_path / "books", "a.txt", "x"),
        written(tmp_path / "books", "b.txt", "x"),
        written(tmp_path, "c.txt", "x"),
    ]
    sources = find_sources([str(tmp_path / "books"), files[2], files[2]], "data.path")
    assert [(source.name, source.files) for source in sources] == [
        ("books", files[:2]),
        ("c", [files[2]] * 2),
    ]


def test_an_entry_of_a_list_that_is_named_in_two_ways_is_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, "a.txt", "x")
    assert [source.name for source in find_sources(["a.txt", "./a.txt", file], "data.path")] == [
        "a"
    ]
    assert [source.name for source in find_sources([file, "demo:backwards",
    "demo:backwards/heldout"], "data.path")] == [
        "a", "demo:backwards", "heldout"
    ]  # fmt: skip


def test_a_folder_with_a_split_to_train_on_and_another_is_refused(tmp_path):
    for name in ("train-00000-of-00002.csv", "train-00001-of-00002.csv", "test-00000-of-00001.csv"):
        written(tmp_path, name, "text\nx\n")
    with pytest.raises(UserError, match="several splits: train test") as raised:
        find_sources(str(tmp_path), "data.path")
    (source,) = find_sources(str(raised.value.problems[0].reason).split("'")[1], "data.path")
    assert source.name == "train"
    assert len(source.files) == 2
    assert len(find_sources(str(tmp_path / "*"), "data.path")) == 2  # named on purpose


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "a", "reasoning_content": "r"},
        {"content": "a", "reasoning": "r", "weight": None},
        {"content": [{"type": "text", "text": "a"}], "thinking": "r"},
        {"content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "value": "a"}]},
        {"content": [{"type": "reasoning", "value": "r"}, "a"]},
    ],
)
def test_reasoning_is_kept_apart_from_the_answer(turn):
    messages = read(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **turn}]}
    ).messages
    assert messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


def test_parts_are_joined_and_tool_calls_among_them_found():
    call = {"name": "add", "arguments": {"a": 1}}
    parts = [
        {"type": "text", "value": "one "},
        {"type": "text", "text": "two"},
        {"type": "tool_call", "value": json.dumps(call)},
    ]
    parts += [{"type": "tool_use", "id": "7", "name": "add", "input": {"a": 1}}]
    message = read(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]}
    ).messages[1]
    assert message["content"] == "one two"
    function = {"type": "function", "function": call}
    assert message["tool_calls"] == [function, {"id": "7", **function}]


def test_turns_as_json_text_are_read():
    assert read({"messages": json.dumps(CHAT["messages"])}).messages == QUESTION_ANSWER


@pytest.mark.parametrize("type", ["input_audio", "image_url"])
def test_a_part_that_is_no_text_is_refused(type):
    part = {"type": type, type: {"url": "x"}}
    with pytest.raises(RecordError, match=r"'input_audio'|a turn holds an image"):
        read({"messages": [{"role": "user", "content": [part]}]})


def test_every_path_of_a_list_that_cannot_be_read_is_told(world, tmp_path):
    good = written(tmp_path, "a.jsonl", '{"text": "x"}')
    (result,) = world.command(
        "preview",
        f"data.path=[{good},{tmp_path}/b.jsonl,{tmp_path}/*.csv]",
        "tokenizer.path=demo:bytes",
        code=2,
    )
    assert "b.jsonl: there is no such file" in result.err
    assert "*.csv: no file matches" in result.err
    assert "a.jsonl:" not in result.err


def test_a_stream_of_conversations_is_refused(world, tmp_path):
    chats = written(tmp_path, "a.jsonl", json.dumps(CHAT))
    how = [
        "preview",
        f"data.path={chats}",
        "tokenizer.path=demo:bytes",
        f"data.cache={tmp_path}",
        "data.packing=stream",
    ]
    assert "data.too_long=split" in world.command(*how, code=2)[0].err
    message = world.command(*how, "data.too_long=split", code=2)[0].err
    assert f"{chats} holds conversations" in message
    assert "Use  data.packing=best_fit data.too_long=drop" in message
    world.command(*how, "data.packing=best_fit", "data.too_long=drop")


TEXTS = {
    "a.jsonl": '{"text": "a"}\n\n{"text": "' + "b" * 50 + '"}\r\n{"text": "c"}\n{"te',
    "a.json": '{"text": "a"}\n{"text": "b"}\n{"text": "c"}',
    "lines.txt": "a\nbb\n" + "c" * 40 + "\nd",
    "blank.txt": "\n \na\nbb\n\n\n" + "c" * 40 + "\nd\r\n\r\ne\n\n",
}


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
