"""Rows of every schema are read by what their columns mean; what is not read is named."""

import json
import math
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import table
from refused import refusal
from texts import BYTES, function, read_row, samples_of, supervised_texts, turn
from world import lines_of

from fsdp_trainer.config.schema import FORMATS as CHOICES
from fsdp_trainer.data.data_statistics import all_findings, length_for_most
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.records.preference_records import PAIRS, PROMPTS, SINGLE, UNPAIRED
from fsdp_trainer.data.records.prompts import make_prompt_reader
from fsdp_trainer.data.records.record_formats import FORMATS, OF_HEADS
from fsdp_trainer.data.store.findings import list_findings
from fsdp_trainer.errors import UserError

CASES = table("data/rows.yaml")

ASK, REPLY, SYSTEM = turn("user", "q"), turn("assistant", "a"), turn("system", "s")
CHAT = [ASK, REPLY]
WITH_SYSTEM = [SYSTEM, *CHAT]
read = partial(read_row, kind="single")


def reader_of(columns, format="auto", fields=None, kind="single"):
    """Return `read(columns)`, which reads a row, and the names of columns that it did not use."""
    reader = make_reader(columns, format, fields, "file", kind)
    return (lambda later: reader.read(Record(later, ("file", 1)))), reader.unused


def columns_of(text):
    """Return the columns of a row of JSON, in which CHAT, ASK, REPLY and SYSTEM are turns."""
    for name in ("CHAT", "ASK", "REPLY", "SYSTEM"):
        text = text.replace(name, json.dumps(globals()[name]))
    return json.loads(text)


def answered(*turns):
    """Return the turn that follows a question in a row with these turns."""
    return read({"messages": [ASK, *turns]}).messages[1]


ROWS = CASES["one conversation"]
"""Rows of one conversation, and the columns that are not used."""


def test_every_format_can_be_chosen():
    assert set(CHOICES) == {"auto", *FORMATS} - {*OF_HEADS}


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


TURNS = CASES["turns of a row"]


@pytest.mark.parametrize("row", TURNS)
def test_turns_calls_and_reasoning_are_read_in_every_form(row):
    assert read(columns_of(row)).messages == columns_of(TURNS[row])


def test_tokens_are_trained_on_as_they_are_with_masks_of_any_name():
    for columns, fields, tokens, weights in CASES["tokens"]:
        (sample,), builder = samples_of(BYTES, read(columns, fields=fields))
        assert (sample.tokens.tolist(), sample.weights.tolist()) == (tokens, weights)
        assert not builder.counts


def test_calls_as_an_answer_are_tool_calls_where_they_call_the_rows_tools():
    tools = json.dumps([{"name": "add", "description": "d", "parameters": {}}])
    answers = json.dumps([{"name": "add", "arguments": {"a": 1}}])
    row = read({"query": "q", "answers": answers, "tools": tools, "id": 0})
    assert row.messages[1]["tool_calls"] == [call("add", arguments={"a": 1})]
    assert row.tools[0]["function"]["name"] == "add"
    other = json.dumps([{"name": "no tool", "arguments": {}}])
    assert read({"query": "q", "answers": other, "tools": tools}).messages[1]["content"] == other
    listed = read({"messages": CHAT, "tools": json.loads(tools)}).tools
    assert read({"messages": CHAT, "tools": [json.dumps(listed[0])]}).tools == listed


def test_parts_of_a_turn_that_axolotl_does_not_train_are_context():
    def turns(*parts):
        keys = ("begin_offset", "end_offset", "train")
        detail = [dict(zip(keys, part, strict=True)) for part in parts]
        answer = turn("assistant", "one two", train_detail=detail)
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


ERRORS = CASES["errors"]


@pytest.mark.parametrize("row", ERRORS)
def test_errors_name_the_column_in_the_file_and_hints_fit_the_row(row):
    with pytest.raises((RecordError, UserError), match="(?s)" + ERRORS[row]):
        samples_of(BYTES, read(columns_of(row)))


def test_the_text_of_rows_with_pictures_is_read_where_that_is_said():
    columns = {"messages": CHAT, "images": ["a.png"]}
    read_row, unused = reader_of(columns, fields={"messages": "messages"})
    assert read_row(columns).messages == CHAT
    assert list(unused) == ["images"]
    assert read(columns | {"images": []}).messages == CHAT
    with pytest.raises(RecordError, match=r"\('pic'\)"):
        read({"messages": CHAT, "pic": {"bytes": b"x", "path": None}})


def test_segments_are_learnt_where_their_label_is_true():
    texts = {"<|im_start|>Ask: ": False, "yes<|im_end|>": True}
    segments = [{"label": label, "text": text} for text, label in texts.items()]
    (sample,), builder = samples_of(BYTES, read({"segments": segments}))
    assert BYTES.decode(sample.tokens.tolist(), skip_special=False) == "".join(texts)
    assert supervised_texts(BYTES, sample) == ["yes<|im_end|>"]
    assert not builder.counts


def test_columns_that_are_not_used_are_named_before_a_run_and_in_preview(train, jsonl, preview):
    rows = [{"question": "q", "answer": "a"} | more for more in ({"topic": "t"}, {"n": 1})]
    file = jsonl(*rows)
    line = f"{file}: columns not used: topic, n"
    assert line in preview(f"data.path={file}")
    assert line in train("run", f"data.path={file} train.steps=1").out


def test_tokens_may_be_cut_and_segments_are_not(jsonl, preview):
    words = ["batch.seq_len=32", "data.too_long=split", "preview.format=json", "preview.rows=2"]
    tokens = jsonl({"input_ids": [*range(40, 100)]})
    rows = lines_of(preview(f"data.path={tokens}", *words))
    assert sorted(token for row in rows for token in row["tokens"]) == [*range(40, 100)]
    segments = jsonl({"segments": [{"text": "x" * 60, "label": True}]})
    refused = preview(f"data.path={segments}", *words, code=2)
    assert "only text and tokens can be cut into pieces" in refused


def answers(size):
    return {"prompt": "q", "chosen": "a" * size, "rejected": "b" * size}


def labelled(size):
    return {"prompt": "qp"[size % 2], "completion": "a" * size, "label": size % 2 == 0}


TOO_LONG = {  # kind of data, its rows, and what else is offered than longer rows
    "prompts": (PROMPTS, lambda size: {"prompt": "q" * size, "answer": "1"}, ()),
    "pairs": (PAIRS, answers, ()),
    "labelled": (UNPAIRED, labelled, ()),
    "chats": (SINGLE, lambda size: {"prompt": "q", "completion": "a" * size}, ("truncate",)),
    "documents": (SINGLE, lambda size: {"text": "a" * size}, ("truncate", "split")),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_the_advice_for_samples_that_are_too_long_helps_and_is_not_refused(
    how, jsonl, tmp_path, name
):
    kind, row, others = TOO_LONG[name]
    file = jsonl(*(row(30 + i % 7) if i % 20 else row(400 + i) for i in range(200)))
    answer = 100 if kind == PROMPTS else 0

    def advice(seq_len):
        setting = how(tmp_path / "c", file, seq_len=seq_len)
        prepared = prepare(*setting, kind, None, answer)
        every = all_findings(prepared, seq_len)
        texts = [f"{one.text} {one.fix}" for one in every if "longer" in one.text]
        return texts, length_for_most(prepared)

    [text], needed = advice(400)
    assert f"batch.seq_len={needed} would hold 99%" in text
    assert {word for word in ("truncate", "split") if f"data.too_long={word}" in text} == {*others}
    shown = f"the 300 tokens of batch.seq_len=400 less objective.max_new_tokens={answer}"
    assert (shown if answer else "longer than batch.seq_len=400") in text
    assert not advice(needed)[0]


FALSE = [False, 0, 0.0, Decimal(0), "0", "0.0", "false", "False", " no"]
TRUE = [True, 1, 1.0, Decimal(1), "1", "1.0", "true", "True", "yes"]
MISSING = [None, math.nan, "", "nan", "None"]
NO_FLAGS = [2, -1, 0.5, "none", "maybe", [], {}, 10**400, math.inf]
FLAGS = ("train", "training", "loss", "loss_mask", "masked")
WEIGHTS = ("weight", "loss_weight", "loss_scale")


def learnt(messages, **options):
    """Return the texts that are learnt of turns, and the counts of what was noted."""
    samples, builder = samples_of(BYTES, read({"messages": messages}), **options)
    return [text for one in samples for text in supervised_texts(BYTES, one)], builder.counts


@pytest.mark.parametrize("name", FLAGS + WEIGHTS)
def test_a_turn_is_left_out_by_a_flag_in_any_spelling(name):
    excluding, including = (TRUE, FALSE) if name == "masked" else (FALSE, TRUE)
    for values, weight in ((excluding, 0.0), (including, 1.0), (MISSING, 1.0)):
        for value in values:
            answer = answered(REPLY | {name: value})
            assert answer.get("weight", 1.0) == weight
            assert answer.keys() - {"weight"} == REPLY.keys()
    texts, counts = learnt([ASK, REPLY | {name: excluding[1]}, ASK, turn("assistant", "b")])
    assert (texts, counts) == (["b<|im_end|>"], {})
    for value in NO_FLAGS[3 if name in WEIGHTS else 0 :]:
        with pytest.raises(RecordError, match=rf"turn 2 of 'messages': '{name}' of a turn"):
            answered(REPLY | {name: value})


def test_weights_are_numbers_or_their_texts_and_several_marks_of_a_turn_agree():
    for marks, weight in CASES["weights"]:
        assert answered(REPLY | marks)["weight"] == weight


KEYS = CASES["keys of turns"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_turn_that_is_not_used_is_named(key):
    value, said = KEYS[key]
    assert set(learnt([ASK, REPLY | {key: value}])[1]) == {said} - {""}


def test_a_question_that_is_marked_to_be_learnt_is_warned_about_where_it_is_not():
    for mark in ({"train": True}, {"weight": 2}):
        assert set(learnt([ASK | mark, REPLY])[1]) == {"marked_prompt"}
        assert not learnt([ASK | mark, REPLY], loss_on="all")[1]
    for unmarked in ({"train": False}, {"weight": 1}):
        assert not learnt([ASK | unmarked, REPLY | {"train": True}])[1]


MASKS = CASES["masks"]


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks", "response_mask", "label_mask"])
def test_a_mask_of_tokens_is_used_in_any_spelling(name):
    for mask in MASKS:
        row = read({"input_ids": [7, 8, 258], name: mask})
        assert (row.tokens, row.learnt) == ([7, 8, 258], [False, False, True])
    for mask in CASES["wrong masks"]:
        with pytest.raises(RecordError, match=name):
            read({"input_ids": [7, 8, 258], name: mask})


ROW_MARKS = CASES["marks of rows"]


@pytest.mark.parametrize("mark", ROW_MARKS)
def test_a_column_that_looks_like_a_mask_or_a_label_is_counted(mark):
    row, noted = {"question": "q", "answer": "a"} | json.loads(f"{{{mark}}}"), []
    reader = make_reader(row, "auto", None, "f", "single")
    reader.note = lambda key, where: noted.append(key)
    reader.read(Record(row, ("f", 1)))
    assert noted == [one for one in [ROW_MARKS[mark]] if one]


def test_preview_names_columns_and_keys_that_are_not_used(jsonl, preview):
    row = {"messages": [ASK | {"when": 1}, REPLY], "label": 0}
    shown = preview(f"data.path={jsonl(row)}")
    assert "1 row whose column 'label' may say that less is to be learnt" in shown
    assert "1 conversation whose turns have a key 'when'" in shown
    streamed = preview(f"data.path={jsonl(row)}", "data.streaming=true", "batch.rows=1")
    assert "64 rows whose column 'label' may say" in streamed
    classes = {"unread_column_label": 9, "class_column_label": 1}
    assert len(list_findings(classes, {}, 9, 9, 9)) == 0
    assert len(list_findings(classes | {"unread_column_label": 99}, {}, 99, 9, 9)) == 1


@pytest.mark.parametrize(
    "labels, good",
    [(FALSE, False), (TRUE, True), (["bad", "undesirable"], False), (["good", "Desirable"], True)],
)
def test_labels_of_answers_are_read_in_any_spelling(labels, good):
    for label in labels:
        row = {"prompt": "q", "completion": "a", "label": label}
        assert reader_of(row, kind="unpaired")[0](row).is_good == good
        if str(label) in ("True", "true", "False", "false"):
            assert "false ones would be trained on as well" in refusal(
                reader_of, row, kind="single"
            )
            first = {"prompt": "q", "completion": "a"}
            if not good:
                with pytest.raises(RecordError, match="answers labelled good or bad"):
                    reader_of(first, kind="single")[0](row)


@pytest.mark.parametrize("label", [-1, "5 stars", None, math.nan, ""])
def test_what_is_no_label_is_an_error_of_the_row(label):
    row = {"prompt": "q", "completion": "a", "label": label}
    with pytest.raises(RecordError, match=r"'label' is (null|.*Write true or false)"):
        reader_of(row, kind="unpaired")[0](row)


def call(name="look", **others):
    return function(name, **others)


def test_arguments_of_calls_are_objects_or_an_error_of_the_row():
    for arguments in CASES["no arguments"]:
        answer = answered(turn("assistant", None, tool_calls=[call(arguments=arguments)]))
        assert answer["tool_calls"] == [call(arguments={})]
    for given in CASES["arguments"]:
        answer = answered(turn("assistant", None, tool_calls=[call(**given)]))
        assert answer["tool_calls"] == [call(arguments={"a": 1})]
    broken = [call(arguments=each) for each in CASES["broken arguments"]]
    for one in broken + CASES["broken calls"]:
        with pytest.raises(RecordError, match=r"turn 2 of 'messages': .*(JSON|argum)"):
            answered(turn("assistant", None, tool_calls=[one]))


LOOK = {"name": "look", "arguments": {"a": 1}}
OWN_TURNS = CASES["calls of their own turns"]


@pytest.mark.parametrize("own", OWN_TURNS)
def test_a_call_of_its_own_turn_is_part_of_the_answer_before_it(own):
    text, result, more = turn("assistant", "t"), turn("tool", "r"), {"role": "tool_call", **LOOK}
    calls = [call(arguments={"a": 1})]
    for turns, content, count in (
        ([own], "", 1),
        ([text, own], "t", 1),
        ([text, own, more], "t", 2),
    ):
        messages = read({"messages": [ASK, *turns, result, own]}).messages
        said = [(one["role"], one["content"], one.get("tool_calls")) for one in messages[1:]]
        assert said == [("assistant", content, calls * count), ("tool", "r", None),
                        ("assistant", "", calls)]  # fmt: skip


def test_turns_that_are_two_answers_stay_two_and_are_warned_about():
    for turns in (
        [REPLY, REPLY], [{"role": "tool_call", **LOOK}, REPLY],
        [REPLY, {"role": "tool_call", **LOOK, "train": False}],
    ):  # fmt: skip
        assert len(read({"messages": [ASK, *turns]}).messages) == 3
        assert learnt([ASK, *turns])[1]["two_answers"] == 1


def test_what_a_call_holds_beside_its_arguments_is_named():
    for one in ({**LOOK, "city": "x"}, {**call(arguments={"a": 1}), "city": "x"}):
        turns = [ASK, turn("assistant", "", tool_calls=[one])]
        assert learnt(turns)[1]["unread_key_tool_calls.city"] == 1


@pytest.mark.parametrize("answer", [4, 4.5, Decimal("1.50"), "4"])
def test_the_reference_of_a_prompt_may_be_a_number(answer):
    for row in ({"question": "q", "answer": answer}, {"messages": [ASK], "answer": answer}):
        reader = make_prompt_reader(row | {"label": "True"}, "auto", None, "f")
        assert reader.read(Record(row, ("f", 1))).reference == str(answer)


def test_tables_with_maps_and_binary_texts_are_read_as_objects_and_texts(tmp_path):
    arguments = pa.map_(pa.string(), pa.map_(pa.string(), pa.int64()))
    keys = [("role", pa.string()), ("content", pa.binary()), ("name", pa.string())]
    kinds = pa.list_(pa.struct([*keys, ("arguments", arguments)]))
    turns = [
        turn("user", "ö".encode()),
        {"role": "tool_call", "name": "look", "arguments": [("a", [("b", 1)])]},
        {"role": "tool_call", "name": "none", "arguments": []},
    ]
    twice = [turns[0], {"role": "tool_call", "name": "n", "arguments": [("a", []), ("a", [])]}]
    no_text = [turn("user", b"\xff")]
    table = pa.table({"messages": pa.array([turns, twice, no_text], kinds)})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = [*read_records(f"{tmp_path}/a.parquet")]
    messages = read(rows[0].columns).messages
    assert messages[0] == turn("user", "ö")
    calls = [call("look", arguments={"a": {"b": 1}}), call("none", arguments={})]
    assert messages[1]["tool_calls"] == calls
    assert rows[1].error == "has 'a' twice in one map"
    with pytest.raises(RecordError, match="Only UTF-8 is read"):
        read(rows[2].columns)
