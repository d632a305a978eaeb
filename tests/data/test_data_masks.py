"""Every assistant turn is learnt with its end, and nothing else."""

import json

import pytest
from texts import CHAT, SHARED, make_tokenizer, samples_of, supervised_texts, turn
from tokenizers import AddedToken

from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import Conversation, Document, make_reader
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.chat_template import BUILT_IN, MARKERS, Template, load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

WHERE = ("chats.jsonl", 1)

# As Qwen3's own: earlier turns lose their thinking, the last one always has a <think> block.
REWRITING = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
    if '</think>' in m.content else '' %}
{%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{- m.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# As DeepSeek-R1's: the prompt opens a <think> that finished turns do not have.
OPENED_THINK = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo:bytes")


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LONG_CHAT = [
    turn("system", "S"),
    turn("user", "U"),
    turn("assistant", "A"),
    turn("user", "V"),
    turn("assistant", "B"),
]
# the families' own formats, written out: before the last answer, the answer as it is learnt, what
# follows it
RENDERED = {
    "chatml": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
        "B<|im_end|>",
        "\n",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
        " B </s>",
        "",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "B<|eot_id|>",
        "",
    ),
    "mistral": ("<s>[INST] U[/INST] A</s>[INST] S\n\nV[/INST]", " B</s>", ""),
    "gemma": (
        "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nV<end_of_turn>\n"
        "<start_of_turn>model\n",
        "B<end_of_turn>",
        "\n",
    ),
    "olmo2": (
        "<s><|system|>\nS\n<|user|>\nU\n<|assistant|>\nA</s>\n<|user|>\nV\n<|assistant|>\n",
        "B</s>",
        "",
    ),
    "phi3": (
        "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
        "B<|end|>",
        "\n</s>",
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|><|im_start|>assistant<|im_sep|>A<|im_end|>"
        "<|im_start|>user<|im_sep|>V<|im_end|><|im_start|>assistant<|im_sep|>",
        "B<|im_end|>",
        "",
    ),
    "plain": (
        "<s>System:\nS\n\nUser:\nU\n\nAssistant:\nA</s>\n\nUser:\nV\n\nAssistant:\n",
        "B</s>",
        "",
    ),
    "qwen3": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nB<|im_end|>",
        "\n",
    ),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A byte tokenizer with the special tokens of every family."""
    backend = make_tokenizer(
        ["<s>", "</s>", *(marker for markers in MARKERS.values() for marker in markers)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_named_template_writes_what_its_family_does_and_learns_the_answers(name, family):
    before, answer, after = RENDERED[name]
    template = load_template(name, family)
    assert template.render(LONG_CHAT) == before + answer + after
    assert template.render(LONG_CHAT[:4], add_generation_prompt=True) == before
    samples, builder = samples_of(family, Conversation(LONG_CHAT, None, WHERE), template)
    assert supervised_texts(family, samples[-1])[-1] == answer
    assert (
        sum(len(supervised_texts(family, sample)) for sample in samples) == 2
    )  # mistral and qwen3 rewrite earlier turns
    assert len(samples) == (2 if name in ("mistral", "qwen3") else 1)
    counted = set(builder.counts) & set(KINDS)
    assert counted <= {"rewritten", "system_in_user", "empty_think"}
    assert ("empty_think" in builder.counts) == (name == "qwen3")
    assert len(template.render(LONG_CHAT[1:])) < len(
        before + answer + after
    )  # no system turn of its own


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_mask_as_they_mark_generation(name, family):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=family.backend, **SPECIAL, chat_template=BUILT_IN[name]
    )
    template = load_template(name, family)
    for messages in (
        CHAT,
        CHAT[1:],
        [*CHAT[:3], turn("tool", "ok"), turn("assistant", ""), turn("user", "end")],
    ):
        if (
            template.adapt(messages, None) == messages
            and len(samples := samples_of(family, Conversation(messages, None, WHERE), template)[0])
            == 1
        ):
            assert_same_as_transformers(samples[0], fast, messages)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_template_loses_reasoning_or_tools(name, family):
    template = load_template(name, family)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        turn("user", "U"),
        turn("assistant", "", tool_calls=[call], reasoning_content="why"),
        turn("tool", "two"),
        turn("assistant", "B"),
    ]
    noted: list[str] = []
    text = template.render(template.adapt(chat, None, noted.append))
    assert all(
        part in text
        for part in ("<think>\nwhy\n</think>\n\n", '"name": "add", "arguments": {"a": 1}}', "two")
    )
    if name == "qwen3":
        assert not noted
        assert "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>" in text


def test_reasoning_is_learnt_in_every_turn_but_only_seen_in_the_last(family):
    template = load_template("qwen3", family)
    chat = [
        turn("user", "U"),
        turn("assistant", "A", reasoning_content="r1"),
        turn("user", "V"),
        turn("assistant", "B", reasoning_content="r2"),
    ]
    samples, _ = samples_of(family, Conversation(chat, None, WHERE), template)
    assert [supervised_texts(family, s) for s in samples] == [
        ["<think>\nr1\n</think>\n\nA<|im_end|>"],
        ["<think>\nr2\n</think>\n\nB<|im_end|>"],
    ]
    assert "r1" not in family.decode(samples[1].tokens.tolist(), skip_special=False)


def test_a_template_without_its_special_tokens_is_refused(tokenizer):
    for name in ("gemma", "llama2", "phi4"):
        with pytest.raises(UserError, match=r"data\.template=" + name):
            load_template(name, tokenizer)


def assert_same_as_transformers(sample, tokenizer, messages, tools=None):
    theirs = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.tokens.tolist() == theirs["input_ids"]
    assert (sample.weights > 0).astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "gsm8k_train.jsonl",
        "alpaca_en_demo.json",
        "alpaca_zh_demo.json",
        "glaive_toolcall_en_demo.json",
    ],
)
@pytest.mark.grid(2)
def test_masks_equal_those_of_transformers_on_real_data(file):
    transformers = pytest.importorskip("transformers")
    if not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    theirs = transformers.AutoTokenizer.from_pretrained(SHARED / "bpe4k")
    ours = load_tokenizer(str(SHARED / "bpe4k"))
    template = load_template(None, ours)
    rows = [row for _, row in zip(range(300), read_records(str(SHARED / file)), strict=False)]
    reader = make_reader(rows[0].columns, "auto", None, file)
    for row in rows:
        (sample,), _ = samples_of(ours, reader.read(row), template, seq_len=100_000)
        assert_same_as_transformers(sample, theirs, as_messages(row.columns))


def as_messages(columns):
    """A row of shared/data as a person would write it for `apply_chat_template`."""
    roles = {
        "human": "user",
        "gpt": "assistant",
        "function_call": "assistant",
        "observation": "tool",
    }
    if "conversations" in columns:
        return [turn(roles[t["from"]], t["value"]) for t in columns["conversations"]]
    if "question" in columns:
        return [turn("user", columns["question"]), turn("assistant", columns["answer"])]
    question = columns["instruction"] + ("\n" + columns["input"] if columns["input"] else "")
    return [turn("user", question), turn("assistant", columns["output"])]


def test_a_template_that_rewrites_earlier_turns_gives_one_sample_per_turn_as_at_inference(
    tokenizer,
):
    template = Template("rewriting", REWRITING, tokenizer.special)
    chat = [
        turn("user", "a"),
        turn("assistant", "<think>\nwhy\n</think>\n\nb"),
        turn("user", "c"),
        turn("assistant", "d"),
    ]
    first, second = samples_of(tokenizer, Conversation(chat, None, WHERE), template)[0]
    assert supervised_texts(tokenizer, first) == ["<think>\nwhy\n</think>\n\nb<|im_end|>"]
    assert supervised_texts(tokenizer, second) == ["<think>\n\n</think>\n\nd<|im_end|>"]
    prompt = template.render(chat[:3], add_generation_prompt=True)
    assert tokenizer.decode(second.tokens.tolist(), skip_special=False).startswith(prompt)
    assert "why" not in prompt


def test_a_template_that_rewrites_gives_one_sample_where_nothing_is_rewritten(tokenizer):
    template = Template("rewriting", REWRITING, tokenizer.special)
    samples, _ = samples_of(tokenizer, Conversation(CHAT[:3], None, WHERE), template)
    assert [supervised_texts(tokenizer, s) for s in samples] == [
        ["<think>\n\n</think>\n\nHello!<|im_end|>"]
    ]
    samples, _ = samples_of(tokenizer, Conversation(CHAT, None, WHERE), template, loss_on="last")
    assert [supervised_texts(tokenizer, s) for s in samples] == [
        ["<think>\n\n</think>\n\n4<|im_end|>"]
    ]


@pytest.mark.parametrize("answer", ["Hello", "<th", "<think>\nwhy\n</think>Hello", "1", "A"])
def test_a_prompt_that_opens_a_think_block_does_not_shift_the_mask(tokenizer, answer):
    template = Template("opened", OPENED_THINK, tokenizer.special)
    (sample,), builder = samples_of(
        tokenizer,
        Conversation([turn("user", "a"), turn("assistant", answer)], None, WHERE),
        template,
    )
    assert supervised_texts(tokenizer, sample) == [answer.split("</think>")[-1] + "<|im_end|>"]
    assert builder.counts["prompt_differs"] == 1


def test_an_assistant_that_speaks_first_is_learnt(tokenizer):
    (sample,), _ = samples_of(
        tokenizer,
        Conversation(
            [turn("assistant", "Welcome"), turn("user", "a"), turn("assistant", "b")], None, WHERE
        ),
    )
    assert supervised_texts(tokenizer, sample) == ["Welcome<|im_end|>", "b<|im_end|>"]


def test_loss_on_last_and_all(tokenizer):
    (sample,), _ = samples_of(tokenizer, Conversation(CHAT, None, WHERE), loss_on="last")
    assert supervised_texts(tokenizer, sample) == ["4<|im_end|>"]
    (sample,), _ = samples_of(tokenizer, Conversation(CHAT, None, WHERE), loss_on="all")
    assert sample.weights[1:].all()
    assert not sample.weights[0]


def test_weights_of_turns_are_honoured(tokenizer):
    chat = [
        turn("user", "a"),
        turn("assistant", "b", weight=0.0),
        turn("user", "c"),
        turn("assistant", "d", weight=0.5),
    ]
    (sample,), _ = samples_of(tokenizer, Conversation(chat, None, WHERE))
    assert supervised_texts(tokenizer, sample) == ["d<|im_end|>"]
    assert set(sample.weights.tolist()) == {0.0, 0.5}
    (sample,), _ = samples_of(tokenizer, Conversation(chat, None, WHERE), loss_on="all")
    assert set(sample.weights.tolist()) == {0.0, 0.5, 1.0}
    assert "b<|im_end|>" not in "".join(supervised_texts(tokenizer, sample))


def test_a_token_across_the_edge_of_a_turn_is_not_learnt(tmp_path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    # The prompt ends in a space, which this vocabulary may join with the first letter of the
    # answer.
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}{% "
        "if add_generation_prompt %}assistant: {% endif %}"
    )
    (sample,), _ = samples_of(
        tokenizer,
        Conversation([turn("user", "a"), turn("assistant", "Be brief.")], None, WHERE),
        Template("t", source, {}),
    )
    assert " " not in supervised_texts(tokenizer, sample)[0][:1]
    assert supervised_texts(tokenizer, sample)[0].endswith("<|eot_id|>")


def test_a_template_without_end_tokens_is_reported(tokenizer):
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    _, builder = samples_of(
        tokenizer, Conversation(CHAT[1:3], None, WHERE), Template("t", source, {})
    )
    assert builder.counts == {"no_end": 1}
    assert builder.examples == {"no_end": ["chats.jsonl:1"]}


@pytest.mark.parametrize("how", ["rstrip", "lstrip", "single_word"])
def test_an_end_that_swallows_spaces_is_learnt_and_one_that_is_no_token_is_reported(tmp_path, how):
    transformers = pytest.importorskip("transformers")
    backend = make_tokenizer(["<|im_start|>"])
    backend.add_special_tokens(
        [AddedToken("<|im_end|>", special=True, normalized=False, **{how: True})]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    chat = [
        turn("user", "q"),
        turn("assistant", "word"),
        turn("user", "q"),
        turn("assistant", "spaced "),
    ]
    (sample,), builder = samples_of(tokenizer, Conversation(chat, None, WHERE))
    if how == "single_word":  # "word<|im_end|>" is text to it, "spaced <|im_end|>" ends
        assert builder.counts["no_end"] == 1
        return
    assert [text.endswith("<|im_end|>") for text in supervised_texts(tokenizer, sample)] == [
        True,
        True,
    ]
    assert not builder.counts
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, chat_template=BUILT_IN["chatml"]
    )
    assert_same_as_transformers(sample, fast, chat)


@pytest.mark.parametrize(("policy", "lengths"), [("drop", []), ("truncate", [4]), ("split", [11])])
def test_a_long_document_is_dropped_cut_or_kept_whole(tokenizer, policy, lengths):
    samples, _ = samples_of(tokenizer, Document("0123456789", WHERE), seq_len=4, too_long=policy)
    assert [len(s.tokens) for s in samples] == lengths
    if policy == "split":  # where it is cut, the order of rows decides
        assert (
            tokenizer.decode(samples[0].tokens.tolist(), skip_special=False)
            == "0123456789<|im_end|>"
        )


def test_a_document_has_one_bos_and_one_eos_and_all_else_is_learnt():
    tokenizer = load_tokenizer("demo:bytes")
    tokenizer.bos_id = tokenizer.special_tokens["<|endoftext|>"]
    for text in ("hi", "<|endoftext|>hi", "hi<|im_end|>"):
        (sample,), _ = samples_of(tokenizer, Document(text, WHERE))
        assert (
            tokenizer.decode(sample.tokens.tolist(), skip_special=False)
            == "<|endoftext|>hi<|im_end|>"
        )
        assert sample.weights.tolist() == [0, 1, 1, 1]


def test_a_conversation_without_an_answer_is_dropped_and_counted(tokenizer):
    samples, builder = samples_of(tokenizer, Conversation(CHAT[:2], None, WHERE))
    assert samples == []
    assert builder.counts == {"unsupervised": 1}


def test_what_a_template_cannot_render_becomes_text(tokenizer):
    source = """{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{- raise_exception('only user and assistant') }}
{%- endif %}
{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}"""
    template = Template("strict", source, {})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        turn("system", "S"),
        turn("user", "U"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "1"),
        turn("assistant", "A"),
    ]
    noted: list[str] = []
    text = template.render(template.adapt(chat, None, noted.append))
    assert (
        text
        == "user:S\n\nU<|im_end|>assistant:"
        + json.dumps(call["function"])
        + "<|im_end|>user:1<|im_end|>assistant:A<|im_end|>"
    )
    assert noted == ["system_in_user", "calls_as_text", "results_as_user"]


def test_tool_calls_and_descriptions_are_rendered_where_the_template_knows_them(tokenizer):
    source = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name + call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    template = Template("tools", source, tokenizer.special)
    call = '{"name": "add", "arguments": {"a": 1}}'
    chat = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    columns = {"conversations": chat, "tools": '[{"name": "add"}]'}
    row = make_reader(columns, "auto", None, "f").read(Record(columns, WHERE))
    (sample,), builder = samples_of(tokenizer, row, template)
    assert supervised_texts(tokenizer, sample) == ['<call>add{"a": 1}<|im_end|>', "a<|im_end|>"]
    assert not builder.counts
    assert '"name": "add"}}]<|im_start|>' in tokenizer.decode(
        sample.tokens.tolist(), skip_special=False
    )


def test_a_template_that_refuses_a_conversation_says_so_in_its_own_words(tokenizer):
    source = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% "
        "endif %}"
    )
    with pytest.raises(RecordError, match="must start with user"):
        samples_of(
            tokenizer,
            Conversation([turn("assistant", "A")], None, WHERE),
            Template("strict", source, {}),
        )


def test_reasoning_and_tool_calls_are_masked_as_the_template_marks_generation(family):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=family.backend, **SPECIAL, chat_template=BUILT_IN["qwen3"]
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        turn("user", "U"),
        turn("assistant", "pre", tool_calls=[call, call], reasoning_content="why"),
        turn("tool", "2"),
        turn("tool", "3"),
        turn("assistant", "B", reasoning_content="so"),
    ]
    row = make_reader({"messages": chat}, "auto", None, "f").read(Record({"messages": chat}, WHERE))
    (sample,), builder = samples_of(family, row, load_template("qwen3", family))
    assert_same_as_transformers(sample, fast, chat)
    assert not builder.counts
    assert "why" in supervised_texts(family, sample)[0]
    assert supervised_texts(family, sample)[0].count("<tool_call>") == 2
