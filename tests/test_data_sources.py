"""Files of every form are read, and broken ones named by file and line."""

import json

import pytest

from fsdp_trainer.data.conversations import Conversation, Document, make_reader
from fsdp_trainer.data.sources import Problems, Row, RowError, find_sources, read_rows
from fsdp_trainer.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
QUESTION_ANSWER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(columns, format="auto", fields=None):
    return make_reader(columns, format, fields, "file").read(Row(columns, ("file", 1)))


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
    assert [row.where[1] for row in read_rows(written(tmp_path, name, content))] == lines


def test_blank_lines_separate_documents(tmp_path):
    rows = read_rows(written(tmp_path, "a.txt", "one\ntwo\n\nthree\n"))
    assert [row.columns["text"] for row in rows] == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "line", "why"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b', 2, "not JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]', 2, "not an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', 2, "not UTF-8"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xe9"}]', 2, "not UTF-8"),
        ("a.json", '[{"text": "a"},\n{"te', 2, "not JSON"),
        ("a.json", '[{"text": "a"}\n{"text": "b"}]', 2, "not JSON"),
        ("a.json", "5", 1, "neither an array"),
        ("a.txt", b"caf\xe9\n", 1, "not UTF-8"),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path, name, content, line, why):
    broken = [row for row in read_rows(written(tmp_path, name, content)) if row.error]
    assert [row.where[1] for row in broken] == [line] and why in broken[0].error


def test_failing_gathers_several_problems_and_skipping_counts_them():
    problems = Problems("fail")
    with pytest.raises(UserError) as raised:
        for line in range(1, 100):
            problems.add(("f", line), "broken")
    assert [p.what for p in raised.value.problems] == ["f:1", "f:2", "f:3", "f:4", "f:5"]
    skipping = Problems("skip")
    for line in range(1, 100):
        skipping.add(("f", line), "broken")
    assert "99" in skipping.report()[0] and len(skipping.report()) == 6


def test_paths_are_files_folders_globs_and_lists(tmp_path):
    a, b = written(tmp_path, "a.jsonl", "{}"), written(tmp_path, "b.txt", "x")
    written(tmp_path, "notes.pdf", "x")
    written(tmp_path, "README.md", "what this is")
    files = lambda path: [file for source in find_sources(path, "data.path") for file in source.files]  # noqa: E731
    assert files(str(tmp_path)) == [a, b]
    assert files(str(tmp_path / "*.txt")) == [b]
    assert files([b, a, "demo:backwards"]) == [b, a, "demo:backwards"]


@pytest.mark.parametrize("path", [None, [], 5, "missing.jsonl", "no/*.jsonl", "demo:nothing", "s3://bucket/x"])
def test_a_path_without_data_is_refused_by_name(path):
    with pytest.raises(UserError, match=r"data\.path=") as raised:
        find_sources(path, "data.path")
    assert raised.value.problems[0].why


@pytest.mark.parametrize(
    "columns",
    [
        CHAT,
        {"conversations": CHAT["messages"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "prompter", "value": "q"}, {"from": "model", "value": "a"}]},
        {"instruction": "q", "input": "", "output": "a"},
        {"question": "q", "answer": "a"},
        {"instruction": "q", "response": "a"},
        {"prompt": "q", "completion": "a", "other": 1},
    ],
)
def test_formats_are_found_out(columns):
    assert read(columns).messages == QUESTION_ANSWER


def test_a_text_column_is_a_document():
    assert read({"text": "t"}) == Document("t", ("file", 1))
    assert read({"content": "t"}) == Document("t", ("file", 1))


def test_fields_say_what_columns_mean():
    columns = {"anfrage": "q", "antwort": "a", "text": "t"}
    assert read(columns, fields={"prompt": "anfrage", "completion": "antwort"}).messages == QUESTION_ANSWER
    assert read(columns, fields={"text": "antwort"}) == Document("a", ("file", 1))
    assert read({"chat": CHAT["messages"]}, fields={"messages": "chat"}).messages == QUESTION_ANSWER


def test_a_system_column_comes_first():
    columns = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}
    assert read(columns).messages == [{"role": "system", "content": "s"}, *QUESTION_ANSWER]


def test_a_function_call_of_sharegpt_is_a_tool_call_of_the_assistant():
    call = '{"name": "add", "arguments": {"a": 1}}'
    chat = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    conversation = read({"conversations": chat, "tools": json.dumps([{"name": "add", "parameters": {}}])})
    assert isinstance(conversation, Conversation)
    function = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [function], "text": call}
    assert conversation.messages[2] == {"role": "tool", "content": "2"}
    assert conversation.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_tool_calls_of_openai_have_their_arguments_read():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    conversation = read({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]})
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
    with pytest.raises(RowError):
        read(columns)


def test_unknown_columns_are_listed_with_an_example():
    with pytest.raises(UserError) as raised:
        read({"body": "x", "title": "y"})
    assert "body title" in str(raised.value) and "data.fields={prompt: question" in str(raised.value)


def test_preference_data_is_refused_by_name():
    with pytest.raises(UserError, match="preference data"):
        read({"prompt": "q", "chosen": "a", "rejected": "b"})


@pytest.mark.parametrize("fields", [{"wat": "x"}, {"prompt": "x"}, {"prompt": "x", "completion": "y", "wat": "z"}])
def test_field_maps_that_fit_no_format_are_refused(fields):
    with pytest.raises(UserError, match=r"data\.fields"):
        read({"x": "1"}, fields=fields)


def test_earlier_turns_of_alpaca_come_first():
    turns = read({"instruction": "q2", "output": "a2", "history": [["q1", "a1"]]}).messages
    assert [(t["role"], t["content"]) for t in turns] == [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]


def test_an_empty_list_of_conversations_is_still_sharegpt():
    assert make_reader({"conversations": []}, "auto", None, "file").format == "sharegpt"


def test_line_ends_of_windows_are_not_text(tmp_path):
    assert [row.columns["text"] for row in read_rows(written(tmp_path, "a.txt", b"a\r\nb\r\n\r\nc"))] == ["a\nb", "c"]
