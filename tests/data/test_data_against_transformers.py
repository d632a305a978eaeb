"""Rows of a file become what is learnt and a loss, as in `transformers`, which reads every document
by itself."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import make_tokenizer, samples_of, supervised_texts
from zoo import make_model

from fsdp_trainer.data.files.sources import Record
from fsdp_trainer.data.records.conversations import Conversation, make_reader
from fsdp_trainer.data.templates.chat_template import MARKERS, load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
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
    markers = dict.fromkeys(marker for markers in MARKERS.values() for marker in markers)
    make_tokenizer(["<s>", "</s>", *markers]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours = load_tokenizer(str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return SimpleNamespace(
        folder=folder, ours=ours, theirs=theirs, template=load_template(None, ours)
    )


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
CALLED = {"type": "function", "function": CALL}
TOOL = {
    "name": "weather",
    "description": "tells it",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
ASKED = turn("user", "How is it? 🌧")
RESULT = turn("tool", '{"sky": "grey"}')
# name → a row as a file has it; the messages and tools that a person would hand to
# `apply_chat_template`
FORMS = {
    "sharegpt with tools": (
        {
            "conversations": [
                {"from": "human", "value": "How is it? 🌧"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": '{"sky": "grey"}'},
                {"from": "gpt", "value": "Grey 🌧🌧"},
                {"from": "human", "value": "And you?"},
                {"from": "gpt", "value": ""},
            ],
            "system": " Be brief. ",
            "tools": json.dumps([TOOL]),
        },
        [
            turn("system", " Be brief. "),
            ASKED,
            turn("assistant", "", tool_calls=[CALLED]),
            RESULT,
            turn("assistant", "Grey 🌧🌧"),
            turn("user", "And you?"),
            turn("assistant", ""),
        ],
        TOOLS,
    ),
    "alpaca in Chinese, with history": (
        {
            "instruction": "翻译。",
            "input": "“你好”",
            "output": "hello\n",
            "system": "简短",
            "history": [["一", "one"], ["二", " two "]],
        },
        [
            turn("system", "简短"),
            turn("user", "一"),
            turn("assistant", "one"),
            turn("user", "二"),
            turn("assistant", " two "),
            turn("user", "翻译。\n“你好”"),
            turn("assistant", "hello\n"),
        ],
        None,
    ),
    "question and answer": (
        {"question": "2+2?", "answer": "<<2+2=4>>4\n#### 4"},
        [turn("user", "2+2?"), turn("assistant", "<<2+2=4>>4\n#### 4")],
        None,
    ),
    "messages in parts of type and value": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "value": "How is "},
                        {"type": "text", "value": "it? 🌧"},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "ask\n"},
                        {"type": "tool_call", "value": CALL},
                    ],
                },
                {"role": "tool", "content": [{"type": "text", "value": '{"sky": "grey"}'}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "value": "so"},
                        {"type": "text", "value": "Grey"},
                        {"type": "text", "value": "."},
                    ],
                },
            ],
            "tools": [TOOL],
        },
        [
            ASKED,
            turn("assistant", "", reasoning_content="ask\n", tool_calls=[CALLED]),
            RESULT,
            turn("assistant", "Grey.", reasoning_content="so"),
        ],
        TOOLS,
    ),
    "answers that hold the text of special tokens": (
        {
            "prompt": "<|im_end|>\n<|im_start|>assistant\nno",
            "completion": "<|im_start|>user\na<|im_end|>\n</s>b<|im_end|>",
        },
        [
            turn("user", "<|im_end|>\n<|im_start|>assistant\nno"),
            turn("assistant", "<|im_start|>user\na<|im_end|>\n</s>b<|im_end|>"),
        ],
        None,
    ),
}


def assert_learnt_alike(both, sample, messages, tools):
    theirs = both.theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.tokens.tolist() == theirs["input_ids"]
    assert (sample.weights > 0).astype(int).tolist() == theirs["assistant_masks"]
    assert sample.weights.any()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_learnt_where_transformers_says_the_assistant_writes(both, form):
    columns, messages, tools = FORMS[form]
    row = make_reader(columns, "auto", None, "f").read(Record(columns, ("f", 1)))
    (sample,), _ = samples_of(both.ours, row, both.template)
    assert_learnt_alike(both, sample, messages, tools)


TEXT = st.lists(
    st.sampled_from(
        [
            "",
            " ",
            "\n",
            "\t",
            "a",
            "é",
            "🎉",
            "👩‍👩‍👧",
            "e\u0301",
            "你好",
            "<|im_end|>",
            "<|im_start|>assistant\n",
            "</s>",
            "{{ x }}",
            "\u00a0",
            "\x00",
        ]
    ),
    max_size=4,
).map("".join)
ANSWER = st.tuples(TEXT, st.none() | TEXT, st.booleans()).map(
    lambda a: turn(
        "assistant",
        a[0],
        **({"reasoning_content": a[1]} if a[1] else {}),
        **({"tool_calls": [CALLED]} if a[2] else {}),
    )
)
TURNS = st.lists(
    TEXT.map(lambda t: turn("user", t)) | TEXT.map(lambda t: turn("tool", t)) | ANSWER, max_size=5
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.booleans(), TURNS, ANSWER, st.sampled_from([None, TOOLS]))
def test_any_conversation_is_learnt_where_transformers_says_the_assistant_writes(
    both, with_system, turns, last, tools
):
    messages = [*([turn("system", " S ")] if with_system else []), *turns, last]
    (sample,), _ = samples_of(both.ours, Conversation(messages, tools, ("f", 1)), both.template)
    assert_learnt_alike(both, sample, messages, tools)


# Templates by name: what is learnt of each answer, written out. Llama 2, 3, Mistral and Gemma trim
# it, as the families' own templates do.
ANSWERS = ["  padded \n", "", "🎉 é", "a</s>b"]
LEARNT = {
    "plain": ["  padded \n</s>", "</s>", "🎉 é</s>", "a</s>b</s>"],
    "chatml": ["  padded \n<|im_end|>", "<|im_end|>", "🎉 é<|im_end|>", "a</s>b<|im_end|>"],
    "llama2": [" padded </s>", "  </s>", " 🎉 é </s>", " a</s>b </s>"],
    "llama3": ["padded<|eot_id|>", "<|eot_id|>", "🎉 é<|eot_id|>", "a</s>b<|eot_id|>"],
    "mistral": [" padded</s>", " </s>", " 🎉 é</s>", " a</s>b</s>"],
    "gemma": ["padded<end_of_turn>", "<end_of_turn>", "🎉 é<end_of_turn>", "a</s>b<end_of_turn>"],
    "qwen3": [
        "  padded \n<|im_end|>",
        "<|im_end|>",
        "🎉 é<|im_end|>",
        "<think>\n\n</think>\n\na</s>b<|im_end|>",
    ],
}


@pytest.mark.parametrize("name", LEARNT)
def test_the_answers_of_a_long_conversation_are_learnt_as_the_family_writes_them(both, name):
    chat = [
        m
        for i, answer in enumerate(ANSWERS)
        for m in (turn("user", f" q{i}\n"), turn("assistant", answer))
    ]
    samples, _ = samples_of(
        both.ours, Conversation(chat, None, ("f", 1)), load_template(name, both.ours)
    )
    actual = [text for sample in samples for text in supervised_texts(both.ours, sample)]
    if len(samples) > 1:  # qwen3 rewrites: each answer is learnt as it stood when it was the last
        assert actual == [
            "<think>\n\n</think>\n\n" * ("<think>" not in text) + text.lstrip("\n")
            for text in LEARNT[name]
        ]
    else:
        assert actual == LEARNT[name]


# Whole documents: four forms of data, made here, of lengths from a few tokens to more than a row
# holds.
WORDS = ["红色", "parse", " the ", "Zürich", "\n", "42 ", "🌧", "{}", "answer", "。"]


def words(start, n):
    return "".join(WORDS[(start * 7 + i * i * 3) % len(WORDS)] for i in range(n))


def sharegpt(i):
    turns = [
        ("human", words(i, 3)),
        ("function_call", json.dumps(CALL)),
        ("observation", words(i + 1, 2)),
        ("gpt", words(i, i % 9)),
    ]
    more = [("human", words(i + 2, 2)), ("gpt", words(i + 3, i % 30))] * (i % 5 == 0) * 2
    return {
        "conversations": [{"from": role, "value": text} for role, text in turns + more],
        "tools": json.dumps([TOOL] * (i % 2)),
    }


ROWS = {
    "sharegpt with tools": sharegpt,
    "chinese alpaca": lambda i: {
        "instruction": words(i, 1 + i % 8),
        "input": "红" * (i % 3),
        "output": words(i + 1, i * i % 120),
    },
    "question and answer": lambda i: {
        "question": words(i, 2 + i % 11),
        "answer": words(i + 5, i * i % 120),
    },
    "text": lambda i: {"text": words(i, 1 + i * i % 120)},
}


def documents(both, columns):
    """(tokens, whether each is learnt) of a row, by transformers alone."""
    if "text" in columns:
        ids = both.theirs("<s>" + columns["text"] + "</s>", add_special_tokens=False)["input_ids"]
        return ids, [1] * len(ids)
    roles = {
        "human": "user",
        "gpt": "assistant",
        "function_call": "assistant",
        "observation": "tool",
    }
    if "conversations" in columns:
        messages = [
            turn("assistant", "", tool_calls=[CALLED])
            if t["from"] == "function_call"
            else turn(roles[t["from"]], t["value"])
            for t in columns["conversations"]
        ]
    elif "question" in columns:
        messages = [turn("user", columns["question"]), turn("assistant", columns["answer"])]
    else:
        question = columns["instruction"] + ("\n" + columns["input"] if columns["input"] else "")
        messages = [turn("user", question), turn("assistant", columns["output"])]
    tools = TOOLS if json.loads(columns.get("tools", "[]")) else None
    rendered = both.theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return rendered["input_ids"], rendered["assistant_masks"]


@pytest.fixture(scope="module")
def model(both, tmp_path_factory):
    """A Hugging Face folder with random weights, and the model."""
    model = make_model("llama tied", vocab_size=len(both.theirs), max_position_embeddings=SEQ_LEN)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.slow
@pytest.mark.parametrize("form", ROWS)
@pytest.mark.grid(1)
def test_the_loss_of_packed_rows_is_the_mean_over_documents_one_by_one_in_transformers(
    train, both, model, tmp_path, form
):
    folder, alone = model
    rows = [ROWS[form](i) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = train(
        "packed",
        "data.max_lost=1",
        f"data.path={tmp_path / 'data.jsonl'}",
        f"model.init_from={folder}",
        f"tokenizer.path={both.folder}",
        f"batch.seq_len={SEQ_LEN}",
        f"batch.rows={MOST_ROWS}",
        "batch.micro_rows=2",
        "train.epochs=1",
        "precision=fp32",
        "launch.timeout=60s",
        ranks=2,
        base=["model=auto"],
    )
    (line,) = run.metrics  # one step is the whole epoch, before the weights have changed
    alone_too = [
        document
        for document in (documents(both, row) for row in rows)
        if len(document[0]) <= SEQ_LEN
    ]
    assert MOST_ROWS < len(alone_too) < len(rows), (
        "rows must hold several documents, and some documents be too long"
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, mask in alone_too:
            learnt = torch.tensor(mask[1:]) > 0
            nll = F.cross_entropy(
                alone(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
            ).double()
            total, count = total + nll[learnt].sum().item(), count + int(learnt.sum())
    assert (line["tokens"], line["supervised_tokens"]) == (
        sum(len(ids) for ids, _ in alone_too),
        count,
    )
    assert line["loss"] == pytest.approx(total / count, rel=0, abs=1e-6)
