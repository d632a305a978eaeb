"""Rows of a file become what is learnt and a loss, as in `transformers`, which reads every document
by itself."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from folders import table
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import (
    assert_learnt_alike,
    function,
    learnt_in_transformers,
    read_row,
    samples_of,
    talk,
    turn,
    write_tokenizer,
)
from world import edit_json, write_lines
from zoo import make_model

from fsdp_trainer.data.files.built_in_templates import TEMPLATES
from fsdp_trainer.data.records.conversations import Conversation
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

SEQ_LEN = 384
MOST_ROWS = 24
# ChatML that knows tools, reasoning and calls, and marks what the model writes, with its end
TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- '<|im_start|>tools' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One tokenizer, as this trainer and as transformers load it from a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TEMPLATES["chatml"].markers)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    template = load_template(None, ours)
    return SimpleNamespace(folder=folder, ours=ours, theirs=theirs, template=template)


FORMS, TOOL, CALL = map(table("data/learnt_rows.yaml").get, ("forms", "tool", "call"))
TOOLS = [function(**TOOL)]
CALLING = turn("assistant", "", tool_calls=[function(**CALL)])


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_learnt_where_transformers_says_the_assistant_writes(both, form):
    text, messages = FORMS[form]["row"], FORMS[form]["messages"]
    texts = {"CALL_TEXT": json.dumps(CALL), "TOOLS_TEXT": json.dumps([TOOL])}
    for name, value in (texts | {"CALL": CALL, "TOOL": TOOL}).items():
        text = text.replace(name, json.dumps(value))
    columns = json.loads(text)
    tools = TOOLS if "tools" in columns else None
    (sample,), _ = samples_of(both.ours, read_row(columns), both.template)
    assert_learnt_alike(sample, both.theirs, messages, tools)
    assert sample.weights.any()


TEXT = st.lists(
    st.sampled_from(
        [
            *("", " ", "\n", "\t", "a", "é", "🎉", "👩‍👩‍👧", "e\u0301", "你好", "<|im_end|>"),
            *("<|im_start|>assistant\n", "</s>", "{{ x }}", "\u00a0", "\x00"),
        ]
    ),
    max_size=4,
).map("".join)
ANSWER = st.tuples(TEXT, st.none() | TEXT, st.booleans()).map(
    lambda a: turn(
        "assistant",
        a[0],
        **({"reasoning_content": a[1]} if a[1] else {}),
        **({"tool_calls": CALLING["tool_calls"]} if a[2] else {}),
    )
)
TURNS = st.lists(
    TEXT.map(lambda t: turn("user", t)) | TEXT.map(lambda t: turn("tool", t)) | ANSWER, max_size=5
)


@settings(max_examples=80)
@given(st.booleans(), TURNS, ANSWER, st.sampled_from([None, TOOLS]))
def test_any_conversation_is_learnt_where_transformers_says_the_assistant_writes(
    both, with_system, turns, last, tools
):
    messages = [*([turn("system", " S ")] if with_system else []), *turns, last]
    (sample,), _ = samples_of(both.ours, Conversation(messages, tools, ("f", 1)), both.template)
    assert_learnt_alike(sample, both.theirs, messages, tools)
    assert sample.weights.any()


# Whole documents, made here, of lengths from a few tokens to more than a row holds.
WORDS = ["红色", "parse", " the ", "Zürich", "\n", "42 ", "🌧", "{}", "answer", "。"]


def words(start, n):
    return "".join(WORDS[(start * 7 + i * i * 3) % len(WORDS)] for i in range(n))


def conversation(i):
    messages = [
        turn("user", words(i, 3)),
        CALLING,
        turn("tool", words(i + 1, 2)),
        turn("assistant", words(i, i % 9)),
    ]
    for _ in range(2 * (i % 5 == 0)):
        messages += talk(words(i + 2, 2), words(i + 3, i % 30))
    return {"messages": messages} | ({"tools": TOOLS} if i % 2 else {})


def document(both, row):
    """(tokens, whether each is learnt) of a row, by transformers alone."""
    if "text" in row:
        ids = both.theirs("<s>" + row["text"] + "</s>", add_special_tokens=False)["input_ids"]
        return ids, [1] * len(ids)
    return learnt_in_transformers(both.theirs, row["messages"], row.get("tools"))


def test_the_loss_of_packed_rows_is_the_mean_over_documents_one_by_one_in_transformers(
    train, both, tmp_path
):
    alone = make_model("llama tied", vocab_size=len(both.theirs), max_position_embeddings=SEQ_LEN)
    alone.save_pretrained(tmp_path / "model")
    chats = [conversation(i) for i in range(20)]
    texts = [{"text": words(i, 1 + i * i % 120)} for i in range(20)]
    for name, rows in {"chats": chats, "texts": texts}.items():
        write_lines(tmp_path / f"{name}.jsonl", rows)
    run = train(
        "packed",
        f"data.max_lost=1 data.path={tmp_path}/*.jsonl",
        f"model.init_from={tmp_path / 'model'} tokenizer.path={both.folder}",
        f"batch.seq_len={SEQ_LEN} batch.rows={MOST_ROWS} batch.micro_rows=2",
        "train.epochs=1 precision=fp32 launch.timeout=60s",
        ranks=2,
        base=["model=auto"],
    )
    (line,) = run.metrics  # one step is the whole epoch, before the weights have changed
    documents = [document(both, row) for row in chats + texts]
    fitting = [one for one in documents if len(one[0]) <= SEQ_LEN]
    assert MOST_ROWS < len(fitting) < len(documents), (
        "rows must hold several documents, and some documents be too long"
    )
    losses = []
    with torch.no_grad():
        for ids, mask in fitting:
            logits = alone(torch.tensor([ids])).logits[0, :-1]
            each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
            losses += each[torch.tensor(mask[1:]) > 0].tolist()
    assert line["tokens"] == sum(len(ids) for ids, _ in fitting)
    assert line["supervised_tokens"] == len(losses)
    assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=0, abs=1e-6)
