"""Rows of every schema are read by what their columns mean; what is not read is named."""

import json

import pytest
from texts import samples_of, supervised_texts, turn

from fsdp_trainer.config.schema import FORMATS as CHOICES
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.records.record_formats import FORMATS
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

ASK, REPLY, SYSTEM = turn("user", "q"), turn("assistant", "a"), turn("system", "s")
CHAT = [ASK, REPLY]
WITH_SYSTEM = [SYSTEM, *CHAT]
BYTES = load_tokenizer("demo:bytes")


def reader_of(columns, format="auto", fields=None, kind="single"):
    """Return `read(columns)`, which reads a row, and the names of columns that it did not use."""
    reader = make_reader(columns, format, fields, "file", kind=kind)
    return (lambda later: reader.read(Record(later, ("file", 1)))), reader.unused


def columns_of(text):
    """Return the columns of a row of JSON, in which CHAT, ASK, REPLY and SYSTEM are turns."""
    for name in ("CHAT", "ASK", "REPLY", "SYSTEM"):
        text = text.replace(name, json.dumps(globals()[name]))
    return json.loads(text)


def read(columns, format="auto"):
    return reader_of(columns, format)[0](columns)


ROWS = {
    '{"id": 1, "system_prompt": "s", "question": "q", "response": "a"}': "id",
    '{"system": "s", "messages": CHAT}': "",
    '{"system": [{"text": "s"}], "messages": CHAT}': "",
    '{"system": "s", "messages": [SYSTEM, ASK, REPLY]}': "",
    '{"inputs": "q", "targets": "a", "language": "en"}': "language",
    '{"prompt": "q", "generation": "a"}': "",
    '{"Instruction": "q", "Input": "", "Response": "a"}': "",
    '{"User Prompt": "u", "query": "q", "answer": "a"}': "User Prompt",
    '{"user": "q", "assistant": "a"}': "",
    '{"question": "q", "solution": "a", "answer": "7"}': "answer",
    '{"question": "q", "answer": "a", "context": {"n": 1}}': "context",
    '{"input": [ASK], "output": "a", "reasoning": "on"}': "reasoning",
    '{"chat": CHAT}': "",
    '{"turns": CHAT, "n": 2}': "n",
    '{"any_name": CHAT, "n": 2}': "n",
    '{"talk": {"messages": CHAT, "id": 1}}': "talk.id",
    '{"conversation": [{"input": "q", "output": "a"}]}': "",
    '{"conversations": ["q", "a"], "source": "x"}': "source",
    '{"data": ["q", "a"], "id": 1}': "id",
    '{"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}': "",
    '{"messages": [{"user": "q"}, {"assistant": "a"}]}': "",
    '{"messages": [{"speaker": "human", "text": "q"}, REPLY]}': "",
    '{"conversations": [ASK, {"from": "bing", "value": "a"}]}': "",
    '{"contents": [{"role": "user", "parts": [{"text": "q"}]}, REPLY]}': "",
}
"""Rows of one conversation, and the columns that are not used."""


def test_every_format_can_be_chosen():
    assert set(CHOICES) == {"auto", *FORMATS}


@pytest.mark.parametrize("row", ROWS)
def test_columns_and_turns_are_read_under_any_usual_name(row):
    columns = columns_of(row)
    read_row, left_out = reader_of(columns)
    assert read_row(columns).messages == (WITH_SYSTEM if "system" in row.lower() else CHAT)
    assert " ".join(left_out) == ROWS[row]


@pytest.mark.parametrize("name", ["context", "article", "input"])
def test_what_is_given_beside_a_question_is_part_of_it(name):
    first = {"question": "q", "answer": "a"}
    row = first | {name: "c"}
    for columns in (row, first):
        assert reader_of(columns)[0](row).messages[0]["content"] == "q\nc"


def test_columns_that_later_rows_bring_are_read_or_named():
    first = {"question": "q", "answer": "a"}
    read_row, unused = reader_of(first)
    assert read_row(first | {"system_prompt": "s", "topic": "t"}).messages == WITH_SYSTEM
    assert list(unused) == ["topic"]


def test_earlier_turns_come_first_in_any_form_and_a_turn_may_have_a_weight():
    earlier = [turn("user", "q0"), turn("assistant", "a0")]
    for history in ([["q0", "a0"]], earlier, [{"question": "q0", "answer": "a0"}]):
        row = {"query": "q", "response": "a", "history": history}
        assert read(row).messages == [*earlier, *CHAT]
    weighted = read({"messages": [ASK, REPLY | {"loss_scale": 0}]}).messages  # of ms-swift
    assert weighted == [ASK, REPLY | {"weight": 0}]


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


ERRORS = {
    '{"question": "q", "answer": 5}': "'answer' should be text, it is int 5",
    '{"chat": [ASK, 5]}': "None of them holds text or turns",
    '{"messages": [{"who": "Bob", "says": "x"}]}': "its keys: who says",
    '{"messages": CHAT, "system": 5}': "'system' should be text",
    '{"messages": CHAT, "images": ["a.png"]}': r"pictures \('images'\)",
    '{"question": "q", "answer": "a", "audio": {"path": "x"}}': r"sound \('audio'\)",
    '{"messages": [{"role": "user", "content": "q", "images": ["x"]}]}': "a turn holds an image",
    '{"role": "user", "text": "q", "parent": 1}': "each row is one turn",
    '{"chat_log": CHAT, "talk": CHAT}': "{messages: chat_log}",
    '{"title": "x", "n": 1}': "{text: title}",
    '{"title": "x", "body": "xyz"}': "{prompt: title, completion: body}.*{text: body}",
    '{"question": "q", "answers": {"text": ["a"]}}': "'answers' has a turn without a role",
    '{"before": CHAT, "response1": "x", "response2": "y"}': "before, chosen: response1, rejected: "
    "response2}",
    '{"q": "x", "text_a": "y", "text_b": "z"}': "{prompt: q, chosen: text_a, rejected: text_b}",
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors_name_the_column_in_the_file_and_hints_fit_the_row(row):
    with pytest.raises((RecordError, UserError), match="(?s)" + ERRORS[row]):
        read(columns_of(row))


def test_the_text_of_rows_with_pictures_is_read_where_that_is_said():
    columns = {"messages": CHAT, "images": ["a.png"]}
    read_row, unused = reader_of(columns, fields={"messages": "messages"})
    assert read_row(columns).messages == CHAT
    assert list(unused) == ["images"]
    assert read(columns | {"images": []}).messages == CHAT
    with pytest.raises(RecordError, match=r"\('pic'\)"):
        read({"messages": CHAT, "pic": {"bytes": b"x", "path": None}})


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


WRONG_TOKENS = {
    '{"input_ids": [5, 100000]}': "token 100000, and the tokenizer has 0 to",
    '{"input_ids": [5, -1]}': "token -1",
    '{"input_ids": [5, 6], "labels": [6, -100]}': "'labels' has 6 at place 0",
    '{"input_ids": [5, 6], "labels": [-100]}': "'labels' has 1 numbers, 'input_ids' has 2",
    '{"input_ids": [5, 6], "labels": 1}': "'labels' should be a list of whole numbers",
}


@pytest.mark.parametrize("row", WRONG_TOKENS)
def test_tokens_that_cannot_be_trained_on_are_refused(row):
    with pytest.raises(RecordError, match=WRONG_TOKENS[row]):
        samples_of(BYTES, read(json.loads(row)))


def test_segments_are_learnt_where_their_label_is_true():
    texts = {"<|im_start|>Ask: ": False, "yes<|im_end|>": True}
    segments = [{"label": label, "text": text} for text, label in texts.items()]
    (sample,), builder = samples_of(BYTES, read({"segments": segments}))
    assert BYTES.decode(sample.tokens.tolist(), skip_special=False) == "".join(texts)
    assert supervised_texts(BYTES, sample) == ["yes<|im_end|>"]
    assert not builder.counts
    with pytest.raises(RecordError, match="needs a text and a label"):
        read({"segments": [{"text": "x"}]}, format="segments")


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
