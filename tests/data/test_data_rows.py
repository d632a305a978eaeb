"""Rows of every schema are read by what their columns mean; what is not read is named."""

import json

import pytest
from texts import samples_of, supervised_texts

from fsdp_trainer.config.schema import FORMATS as CHOICES
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.records.record_formats import FORMATS
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

ASK, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CHAT = [ASK, REPLY]
BYTES = load_tokenizer("demo:bytes")


def reader_of(columns, format="auto", fields=None, kind="single"):
    """Return `read(columns)`, which reads a row, and the names of columns that it did not use."""
    reader = make_reader(columns, format, fields, "file", kind=kind)
    return (lambda later: reader.read(Record(later, ("file", 1)))), reader.unused


def read(columns, format="auto"):
    return reader_of(columns, format)[0](columns)


def test_every_format_can_be_chosen():
    assert set(CHOICES) == {"auto", *FORMATS}


@pytest.mark.parametrize(
    ("columns", "messages", "unused"),
    [
        ({"id": 1, "system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, *CHAT], "id"),
        ({"system": "s", "messages": CHAT}, [SYSTEM, *CHAT], ""),
        ({"system": [{"text": "s"}], "messages": CHAT}, [SYSTEM, *CHAT], ""),
        ({"system": "s", "messages": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT], ""),
        ({"inputs": "q", "targets": "a", "language": "en"}, CHAT, "language"),
        ({"prompt": "q", "generation": "a"}, CHAT, ""),
        ({"Instruction": "q", "Input": "", "Response": "a"}, CHAT, ""),
        ({"User Prompt": "u", "query": "q", "answer": "a"}, CHAT, "User Prompt"),
        ({"user": "q", "assistant": "a"}, CHAT, ""),
        ({"question": "q", "solution": "a", "answer": "7"}, CHAT, "answer"),
        ({"question": "q", "answer": "a", "context": {"n": 1}}, CHAT, "context"),
        ({"input": [ASK], "output": "a", "reasoning": "on"}, CHAT, "reasoning"),
        ({"chat": CHAT}, CHAT, ""),
        ({"turns": CHAT, "n": 2}, CHAT, "n"),
        ({"any_name": CHAT, "n": 2}, CHAT, "n"),
        ({"talk": {"messages": CHAT, "id": 1}}, CHAT, "talk.id"),
        ({"conversation": [{"input": "q", "output": "a"}]}, CHAT, ""),
        ({"conversations": ["q", "a"], "source": "x"}, CHAT, "source"),
        ({"data": ["q", "a"], "id": 1}, CHAT, "id"),
        ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, CHAT, ""),
        ({"messages": [{"user": "q"}, {"assistant": "a"}]}, CHAT, ""),
        ({"messages": [{"speaker": "human", "text": "q"}, REPLY]}, CHAT, ""),
        ({"conversations": [ASK, {"from": "bing", "value": "a"}]}, CHAT, ""),
        ({"contents": [{"role": "user", "parts": [{"text": "q"}]}, REPLY]}, CHAT, ""),
        ({"messages": [ASK, REPLY | {"loss_scale": 0}]}, [ASK, REPLY | {"weight": 0}], ""),
    ],
)
def test_columns_and_turns_are_read_under_any_usual_name(columns, messages, unused):
    read_row, left_out = reader_of(columns)
    assert read_row(columns).messages == messages
    assert " ".join(left_out) == unused


@pytest.mark.parametrize("name", ["context", "article", "input"])
def test_what_is_given_beside_a_question_is_part_of_it(name):
    first = {"question": "q", "answer": "a"}
    row = first | {name: "c"}
    for columns in (row, first):
        assert reader_of(columns)[0](row).messages[0]["content"] == "q\nc"


def test_columns_that_later_rows_bring_are_read_or_named():
    first = {"question": "q", "answer": "a"}
    read_row, unused = reader_of(first)
    assert read_row(first | {"system_prompt": "s", "topic": "t"}).messages == [SYSTEM, *CHAT]
    assert list(unused) == ["topic"]


def test_earlier_turns_come_first_in_any_form():
    earlier = {"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}
    for history in ([["q0", "a0"]], list(earlier), [{"question": "q0", "answer": "a0"}]):
        row = {"query": "q", "response": "a", "history": history}
        assert read(row).messages == [*earlier, *CHAT]


def test_calls_as_an_answer_are_tool_calls_where_they_call_the_rows_tools():
    tools = json.dumps([{"name": "add", "description": "d", "parameters": {}}])
    answers = json.dumps([{"name": "add", "arguments": {"a": 1}}])
    row = read({"query": "q", "answers": answers, "tools": tools, "id": 0})
    function = {"name": "add", "arguments": {"a": 1}}
    assert row.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    assert row.tools[0]["function"]["name"] == "add"
    other = json.dumps([{"name": "no tool", "arguments": {}}])
    assert read({"query": "q", "answers": other, "tools": tools}).messages[1]["content"] == other
    listed = read({"messages": CHAT, "tools": json.loads(tools)}).tools
    assert read({"messages": CHAT, "tools": [json.dumps(listed[0])]}).tools == listed


def test_parts_of_a_turn_that_axolotl_does_not_train_are_context():
    def turns(*parts):
        keys = ("begin_offset", "end_offset", "train")
        detail = [dict(zip(keys, part, strict=True)) for part in parts]
        answer = {"role": "assistant", "content": "one two", "train_detail": detail}
        return read({"messages": [ASK, answer]})

    one = (0, 3, False)
    for parts, learnt in (((), "one two<|im_end|>"), ((one, (4, 6, True)), "two<|im_end|>")):
        (sample,), _ = samples_of(BYTES, turns(*parts))
        assert supervised_texts(BYTES, sample) == [learnt]
    with pytest.raises(RecordError, match="train_detail names characters 4 to 7 of 7"):
        turns(one, (4, 7, True))


def test_pairs_are_read_under_any_names_through_fields():
    columns = {"q": "q", "response_j": "a", "response_k": "b", "date": "d"}
    fields = {"prompt": "q", "chosen": "response_j", "rejected": "response_k"}
    read_row, unused = reader_of(columns, fields=fields, kind="pairs")
    pair = read_row(columns)
    assert (pair.prompt, pair.chosen, list(unused)) == ([ASK], [REPLY], ["date"])
    with pytest.raises(UserError, match=r"{prompt: q, completion: response_j}"):
        reader_of(columns, fields=fields, kind="single")


def test_preview_shows_pairs_under_any_names(jsonl, preview):
    file = jsonl({"q": "q", "good": "a", "bad": "b", "date": "d"})
    shown = preview(f"data.path={file}", "data.fields={prompt: q, chosen: good, rejected: bad}")
    assert "preference (q → prompt, good → chosen, bad → rejected)" in shown
    assert "columns not used: date" in shown


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "q", "answer": 5}, "'answer' should be text, it is int 5"),
        ({"chat": [ASK, 5]}, "None of them holds text or turns"),
        ({"messages": [{"who": "Bob", "says": "x"}]}, "its keys: who says"),
        ({"messages": CHAT, "system": 5}, "'system' should be text"),
        ({"messages": CHAT, "images": ["a.png"]}, r"pictures \('images'\)"),
        ({"question": "q", "answer": "a", "audio": {"path": "x"}}, r"sound \('audio'\)"),
        ({"messages": CHAT, "pic": {"bytes": b"x", "path": None}}, r"\('pic'\)"),
        ({"messages": [ASK | {"images": ["x"]}, REPLY]}, "a turn holds an image"),
        ({"role": "user", "text": "q", "parent": 1}, "each row is one turn"),
        ({"chat_log": CHAT, "talk": CHAT}, "{messages: chat_log}"),
        ({"title": "x", "n": 1}, "{text: title}"),
        ({"title": "x", "body": "xyz"}, "{prompt: title, completion: body}.*{text: body}"),
        ({"question": "q", "answers": {"text": ["a"]}}, "'answers' has a turn without a role"),
        (
            {"before": CHAT, "response1": "x", "response2": "y"},
            "{prompt: before, chosen: response1, rejected: response2}",
        ),
        ({"q": "x", "text_a": "y", "text_b": "z"}, "{prompt: q, chosen: text_a, rejected: text_b}"),
    ],
)
def test_errors_name_the_column_in_the_file_and_hints_fit_the_row(columns, message):
    with pytest.raises((RecordError, UserError), match="(?s)" + message):
        read(columns)


def test_the_text_of_rows_with_pictures_is_read_where_that_is_said():
    columns = {"messages": CHAT, "images": ["a.png"]}
    read_row, unused = reader_of(columns, fields={"messages": "messages"})
    assert read_row(columns).messages == CHAT
    assert list(unused) == ["images"]
    assert read(columns | {"images": []}).messages == CHAT


def test_tokens_are_trained_on_as_they_are():
    columns = {"input_ids": [7, 8, 9, 258, 0], "labels": [-100, -100, 9, 258, -100]}
    row = read(columns | {"attention_mask": [1, 1, 1, 1, 0]})
    (sample,), builder = samples_of(BYTES, row)
    assert sample.tokens.tolist() == [7, 8, 9, 258]
    assert sample.weights.tolist() == [0, 0, 1, 1]
    assert not builder.counts
    for mask, weights in (({}, [0, 1, 1]), ({"loss_mask": [0, 0, 1]}, [0, 0, 1])):
        (sample,), _ = samples_of(BYTES, read({"input_ids": [7, 8, 258]} | mask))
        assert sample.weights.tolist() == weights


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [5, 100_000]}, "token 100000, and the tokenizer has 0 to"),
        ({"input_ids": [5, -1]}, "token -1"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "'labels' has 6 at place 0"),
        ({"input_ids": [5, 6], "labels": [-100]}, "'labels' has 1 numbers, 'input_ids' has 2"),
        ({"input_ids": [5, 6], "labels": 1}, "'labels' should be a list of whole numbers"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(columns, message):
    with pytest.raises(RecordError, match=message):
        samples_of(BYTES, read(columns))


def test_segments_are_learnt_where_their_label_is_true():
    texts = {"<|im_start|>Ask: ": False, "yes<|im_end|>": True}
    segments = [{"label": label, "text": text} for text, label in texts.items()]
    (sample,), builder = samples_of(BYTES, read({"segments": segments}))
    assert BYTES.decode(sample.tokens.tolist(), skip_special=False) == "".join(texts)
    assert supervised_texts(BYTES, sample) == ["yes<|im_end|>"]
    assert not builder.counts
    with pytest.raises(RecordError, match="needs a text and a label"):
        read({"segments": [{"text": "x"}]}, format="segments")


def test_one_object_that_is_a_conversation_is_one_row(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"conversations": [{"from": "human", "value": "q"}]}, indent=1))
    (row,) = read_records(str(file))
    assert list(row.columns) == ["conversations"]
    file.write_text(json.dumps({"data": [{"question": "q", "answer": "a"}] * 2}, indent=1))
    assert len(list(read_records(str(file)))) == 2


def test_columns_that_are_not_used_are_named_before_a_run_and_in_preview(train, jsonl, preview):
    rows = [{"question": "q", "answer": "a"} | more for more in ({"topic": "t"}, {"n": 1})]
    file = jsonl(*rows)
    line = f"{file}: columns not used: topic, n"
    assert line in preview(f"data.path={file}")
    assert line in train("run", f"data.path={file}", "train.steps=1").out


def test_tokens_may_be_cut_and_segments_are_not(jsonl, preview):
    words = ["batch.seq_len=32", "data.too_long=split", "preview.format=json", "preview.rows=2"]
    tokens = jsonl({"input_ids": [*range(40, 100)]})
    rows = [json.loads(line) for line in preview(f"data.path={tokens}", *words).splitlines()]
    assert sorted(token for row in rows for token in row["tokens"]) == [*range(40, 100)]
    segments = jsonl({"segments": [{"text": "x" * 60, "label": True}]})
    refused = preview(f"data.path={segments}", *words, code=2)
    assert "only text and tokens can be cut into pieces" in refused
