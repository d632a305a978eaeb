"""Whatever stands in a field of a row, it is a sample or an error of that row."""

import datetime
import decimal
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.conversations import FIELDS, REQUIRED, make_reader
from fsdp_trainer.data.prepare import prepare
from fsdp_trainer.data.samples import SampleBuilder
from fsdp_trainer.data.sources import Row, RowError, read_rows
from fsdp_trainer.data.templates import load_template
from fsdp_trainer.data.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

TOKENIZER = load_tokenizer("demo:bytes")
BUILDERS = [SampleBuilder(Data(), 64, TOKENIZER, load_template(name, TOKENIZER)) for name in ("plain", "chatml")]
TURN = ("role", "content", "weight", "loss_weight", "tool_calls", "reasoning", "reasoning_content", "thinking", "text", "name")
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
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=3),
    max_leaves=6,
)


def with_any_turn(first, asked, role, content):
    """Two turns, the second of which has any value in some of its fields."""
    turn = st.fixed_dictionaries({}, optional=dict.fromkeys((role, content, *TURN), ANY))
    return turn.map(lambda odd: [{role: asked, content: "q"}, {role: first, content: "a"} | odd])


ROWS = st.one_of(
    *(
        st.fixed_dictionaries(
            {name: ANY | st.just("x") for name in REQUIRED[format]},
            optional={name: ANY for name in FIELDS[format] if name not in REQUIRED[format]},
        ).map(lambda row, format=format: (format, row))
        for format in FIELDS
    ),
    st.tuples(
        st.just("messages"), st.fixed_dictionaries({"messages": with_any_turn("assistant", "user", "role", "content"), "tools": ANY})
    ),
    st.tuples(st.just("sharegpt"), st.fixed_dictionaries({"conversations": with_any_turn("gpt", "human", "from", "value")})),
)


@given(ROWS)
@settings(max_examples=400, deadline=None)
def test_any_value_in_any_field_is_read_or_an_error_of_the_row(formatted):
    format, columns = formatted
    try:
        read = make_reader(columns, format, None, "f").read(Row(columns, ("f", 1)))
        for builder in BUILDERS:
            builder.render(read)
    except RowError:
        pass


def chat(**of_answer):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | of_answer]}


def prepared(root, path, **data):
    template = load_template(data.pop("template", "chatml"), TOKENIZER)
    return prepare(Data(path=str(path), **data), Batch(seq_len=512), TOKENIZER, template, root)


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = [
    chat(tool_calls=5), chat(tool_calls="none"), chat(role=["user"]), chat(role=None), chat(content=5), chat(weight=10**400),
    chat(content=[{"type": ["text"], "text": "x"}]), chat(weight=1e300), chat(weight="1"), chat() | {"tools": 5}, chat(role="\ud800"),
    {"messages": DEEP}, {"messages": "\ud800"},
]  # fmt: skip


def test_broken_rows_are_skipped_or_named(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [*map(json.dumps, [chat(), *BROKEN]), f'{{"messages": {DEEP}}}', f'{{"messages": {"9" * 5000}}}']
    file.write_text("\n".join(lines))
    skipped = prepared(tmp_path / "c", file, on_error="skip")
    assert len(skipped.train[0]) == 1 and f"skipped {len(lines) - 1} rows" in "\n".join(skipped.report)
    for line in lines[1:]:
        file.write_text(lines[0] + "\n" + line)
        with pytest.raises(UserError, match=r"a\.jsonl:2") as raised:
            prepared(tmp_path / "c", file)
        str(raised.value).encode()


def test_a_history_that_is_no_list_is_an_error_of_the_row(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"instruction": "q", "output": "a", "history": h}) for h in ([], 5, [5], "x")))
    assert "skipped 3 rows" in "\n".join(prepared(tmp_path / "c", tmp_path / "a.jsonl", on_error="skip").report)


def test_a_row_that_is_read_with_the_last_of_the_stack_is_an_error_of_the_row(tmp_path):
    """What could just be read may be too deep to be written: somewhere among these depths."""
    turns = json.dumps(chat(tool_calls=[{"name": "f", "arguments": "HERE"}])["messages"])
    nested = [json.dumps({"messages": turns.replace('"HERE"', "[" * depth + "]" * depth)}) for depth in range(700, 1000)]
    (tmp_path / "a.jsonl").write_text("\n".join([*(json.dumps(chat(content=str(i))) for i in range(20)), *nested]))
    assert "skipped" in "\n".join(prepared(tmp_path / "c", tmp_path / "a.jsonl", on_error="skip", validation=0.5).report)


@pytest.mark.parametrize("content", [f'[{{"text": {DEEP}}}]', f'{{"text": {DEEP}}}\n{{"text": "b"}}', f'[{{"text": {"9" * 5000}}}]'])
def test_json_that_python_does_not_read_is_an_error_of_the_file(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    rows = list(read_rows(str(tmp_path / "a.json")))
    assert "that can be read" in rows[0].error


@pytest.mark.parametrize("validation", [None, 0.5])
@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_a_table_may_hold_what_json_cannot(tmp_path, validation, template):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    odd = {"at": datetime.datetime(2024, 1, 2), "cost": decimal.Decimal("0.10"), "raw": b"\xff"}
    call = {"name": "f", "arguments": odd}
    rows = [chat(content=f"a{i}", tool_calls=[call], **odd) | {"tools": [{"name": "f", "default": odd}]} for i in range(20)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = prepared(tmp_path / "c", tmp_path / "a.parquet", validation=validation, template=template)
    assert len(made.train[0]) + (len(made.validation) if made.validation else 0) == 20
    assert "2024-01-02" in TOKENIZER.decode(made.train[0].read(0)[0].tolist())
