"""Every assistant turn is learnt with its end, and nothing else."""

import re
from itertools import islice

import pytest
import transformers
from folders import table
from texts import (
    BYTES,
    CHAT,
    SHARED,
    assert_learnt_alike,
    in_transformers,
    make_tokenizer,
    read_row,
    samples_of,
    supervised_texts,
    talk,
    turn,
    write_tokenizer,
)
from tokenizers import AddedToken

from fsdp_trainer.data.files.built_in_templates import TEMPLATES
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.conversations import Conversation, Document
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.chat_template import BUILT_IN, Template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

WHERE = ("chats.jsonl", 1)
LONG_CHAT = [turn("system", "S"), *talk("U", "A", "V", "B")]
RENDERED, CHATS = table("data/rendered_templates.yaml"), table("data/mask_chats.yaml")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A byte tokenizer with the special tokens of every family."""
    markers = [marker for one in TEMPLATES.values() for marker in one.markers]
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), markers)


def learnt(tokenizer, messages, template=None, **options):
    """Return the samples of a conversation, and the builder with its counts."""
    return samples_of(tokenizer, Conversation(messages, None, WHERE), template, **options)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_named_template_writes_what_its_family_does_and_learns_the_answers(name, family):
    before, answer, after = re.split("[«»]", RENDERED[name])
    template = load_template(name, family)
    assert template.render(LONG_CHAT) == before + answer + after
    assert template.render(LONG_CHAT[:4], add_generation_prompt=True) == before
    samples, builder = learnt(family, LONG_CHAT, template)
    texts = [supervised_texts(family, sample) for sample in samples]
    assert texts[-1][-1] == answer
    assert sum(map(len, texts)) == 2
    assert len(samples) == (2 if name in ("mistral", "qwen3") else 1)  # which rewrite earlier turns
    counted = set(builder.counts) & set(KINDS)
    assert counted <= {"rewritten", "system_in_user", "empty_think"}
    assert ("empty_think" in counted) == (name == "qwen3")
    # no system turn of its own, but Qwen 2's
    without, whole = template.render(LONG_CHAT[1:]), before + answer + after
    if name == "qwen2":
        other = load_template(name, family, {"default_system": "S"})
        assert "created by Alibaba Cloud" in without
        assert other.render(LONG_CHAT[1:]) == whole
    else:
        assert len(without) < len(whole)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_mask_as_they_mark_generation(name, family):
    theirs = in_transformers(family, BUILT_IN[name])
    template = load_template(name, family)
    compared = 0
    for messages in [CHAT, CHAT[1:], *CHATS["compared"]]:
        if template.adapt(messages, None) != messages:
            continue
        samples, _ = learnt(family, messages, template)
        if len(samples) == 1:
            assert_learnt_alike(samples[0], theirs, messages)
            compared += 1
    assert compared == CHATS["counts"].get(name, 3)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_template_loses_reasoning_or_tools(name, family):
    template = load_template(name, family)
    noted = []
    text = template.render(template.adapt(CHATS["thought"], None, noted.append))
    for part in ("<think>\nwhy\n</think>\n\n", '"name": "add", "arguments": {"a": 1}}', "two"):
        assert part in text
    if name == "qwen3":
        assert not noted
        assert "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>" in text


def test_reasoning_is_learnt_in_every_turn_but_only_seen_in_the_last_as_at_inference(family):
    template = load_template("qwen3", family)
    chat = talk("U", "<think>\nr1\n</think>\n\nA", "V")
    chat.append(turn("assistant", "B", reasoning_content="r2"))
    samples, _ = learnt(family, chat, template)
    assert [supervised_texts(family, sample) for sample in samples] == [
        ["<think>\nr1\n</think>\n\nA<|im_end|>"],
        ["<think>\nr2\n</think>\n\nB<|im_end|>"],
    ]
    prompt = template.render(chat[:3], add_generation_prompt=True)
    assert family.decode(samples[1].tokens.tolist(), skip_special=False).startswith(prompt)
    assert "r1" not in prompt


def test_a_template_that_rewrites_gives_one_sample_where_nothing_is_rewritten(family):
    template = load_template("qwen3", family)
    for messages, loss_on, answer in ((CHAT[:3], "assistant", "Hello!"), (CHAT, "last", "4")):
        (sample,), _ = learnt(family, messages, template, loss_on=loss_on)
        assert supervised_texts(family, sample) == [f"<think>\n\n</think>\n\n{answer}<|im_end|>"]


def test_masks_equal_those_of_transformers_on_real_data():
    if not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    theirs = transformers.AutoTokenizer.from_pretrained(SHARED / "bpe4k")
    ours = load_tokenizer(SHARED / "bpe4k")
    template = load_template(None, ours)
    roles = {"human": "user", "observation": "tool"}
    rows = [*islice(read_records(f"{SHARED}/glaive_toolcall_en_demo.json"), 100)]
    for row in rows:
        (sample,), _ = samples_of(ours, read_row(row.columns), template, seq_len=100_000)
        turns = row.columns["conversations"]  # the model writes calls as their text
        messages = [turn(roles.get(t["from"], "assistant"), t["value"]) for t in turns]
        assert_learnt_alike(sample, theirs, messages)


def test_loss_on_last_and_all_and_weights_of_turns_are_honoured():
    (sample,), _ = learnt(BYTES, CHAT, loss_on="last")
    assert supervised_texts(BYTES, sample) == ["4<|im_end|>"]
    (sample,), _ = learnt(BYTES, CHAT, loss_on="all")
    assert sample.weights[1:].all()
    assert not sample.weights[0]
    chat = [
        turn("user", "a"),
        turn("assistant", "b", weight=0.0),
        turn("user", "c"),
        turn("assistant", "d", weight=0.5),
    ]
    (sample,), _ = learnt(BYTES, chat)
    assert supervised_texts(BYTES, sample) == ["d<|im_end|>"]
    assert set(sample.weights.tolist()) == {0.0, 0.5}
    (sample,), _ = learnt(BYTES, chat, loss_on="all")
    assert set(sample.weights.tolist()) == {0.0, 0.5, 1.0}
    assert "b<|im_end|>" not in "".join(supervised_texts(BYTES, sample))


def saved(folder, backend):
    backend.save(f"{folder}/tokenizer.json")
    return load_tokenizer(folder)


def test_a_token_across_the_edge_of_a_turn_is_not_learnt(tmp_path):
    """The prompt ends in a space, which this vocabulary may join with the answer's first letter."""
    tokenizer = saved(tmp_path, make_tokenizer())
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = talk("a", "Be brief.")
    (sample,), _ = learnt(tokenizer, chat, Template("t", source, {}))
    answer = supervised_texts(tokenizer, sample)[0]
    assert not answer.startswith(" ")
    assert answer.endswith("<|eot_id|>")


@pytest.mark.parametrize("how", ["rstrip", "lstrip", "single_word"])
def test_an_end_that_swallows_spaces_is_learnt_and_one_that_is_no_token_is_reported(tmp_path, how):
    backend = make_tokenizer(["<|im_start|>"])
    end = AddedToken("<|im_end|>", special=True, normalized=False, **{how: True})
    backend.add_special_tokens([end])
    tokenizer = saved(tmp_path, backend)
    chat = talk("q", "word", "q", "spaced ")
    (sample,), builder = learnt(tokenizer, chat)
    if how == "single_word":  # "word<|im_end|>" is text to it, "spaced <|im_end|>" ends
        assert builder.counts["no_end"] == 1
        return
    ends = [text.endswith("<|im_end|>") for text in supervised_texts(tokenizer, sample)]
    assert ends == [True, True]
    assert not builder.counts
    assert_learnt_alike(sample, in_transformers(tokenizer, BUILT_IN["chatml"]), chat)


@pytest.mark.parametrize("policy, lengths", [("drop", []), ("truncate", [4]), ("split", [11])])
def test_a_long_document_is_dropped_cut_or_kept_whole(policy, lengths):
    samples, _ = samples_of(BYTES, Document("0123456789", WHERE), seq_len=4, too_long=policy)
    assert [len(sample.tokens) for sample in samples] == lengths
    if policy == "split":  # where it is cut, the order of rows decides
        text = BYTES.decode(samples[0].tokens.tolist(), skip_special=False)
        assert text == "0123456789<|im_end|>"


def test_a_document_has_one_bos_and_one_eos_and_all_else_is_learnt():
    tokenizer = load_tokenizer("demo:bytes")
    tokenizer.bos_id = tokenizer.special_tokens["<|endoftext|>"]
    for text in ("hi", "<|endoftext|>hi", "hi<|im_end|>"):
        (sample,), _ = samples_of(tokenizer, Document(text, WHERE))
        whole = tokenizer.decode(sample.tokens.tolist(), skip_special=False)
        assert whole == "<|endoftext|>hi<|im_end|>"
        assert sample.weights.tolist() == [0, 1, 1, 1]


def test_what_a_template_cannot_render_becomes_text_or_is_refused_in_its_words():
    source = """{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{- raise_exception('only user and assistant') }}
{%- endif %}
{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}"""
    template = Template("strict", source, {})
    noted = []
    assert template.render(template.adapt(CHATS["strict"], None, noted.append)) == (
        'user:S\n\nU<|im_end|>assistant:{"name": "add", "arguments": {"a": 1}}<|im_end|>'
        "user:1<|im_end|>assistant:A<|im_end|>"
    )
    assert noted == ["system_in_user", "calls_as_text", "results_as_user"]
    source = "{{ raise_exception('must start with user') if messages[0].role != 'user' }}"
    with pytest.raises(RecordError, match="must start with user"):
        learnt(BYTES, [turn("assistant", "A")], Template("strict", source, {}))
