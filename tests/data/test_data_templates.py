"""Each chat template gets a conversation in the forms that it reads.

Every template here shows one habit of real ones. `transformers` renders what a person would hand to
the template; text, tokens and the beginning of what is learnt must be the same.
"""

import json
from collections import Counter

import inject
import pytest
import transformers
from folders import table
from texts import (
    SPECIAL,
    function,
    in_transformers,
    read_row,
    samples_of,
    supervised_texts,
    turn,
    write_tokenizer,
)

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.prompts import question_of
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError

CASES = table("data/template_cases.yaml")
FORMS, WRITTEN, LEFT_OUT = CASES["forms"], CASES["written"], CASES["left out"]
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
PLAIN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"


def template_of(case):
    """Return a template: a whole one, or ChatML that is different in some parts."""
    if isinstance(case, str):
        return case
    lines, mark = [case.get("before", "") + "{%- for m in messages %}"], "if"
    for condition, text in case.get("turns", {}).items():
        lines.append(f"{{%- {mark} {condition} %}}{text}")
        mark = "elif"
    lines.append(PLAIN if mark == "if" else "{%- else %}" + PLAIN + "{%- endif %}")
    return "\n".join([*lines, "{%- endfor %}", case.get("prompt", PROMPT)])


TEMPLATES = {name: template_of(case) for name, case in CASES["templates"].items()}
CITY = {"city": "Zürich"}
CALL = function("weather", arguments=CITY)
TOOLS = [function("weather", parameters={})]
ASK, ANSWER = turn("user", "How is it?"), turn("assistant", "Grey.")
CALLING, RESULT = turn("assistant", "", tool_calls=[CALL]), turn("tool", "grey")
WITH_RESULT = [ASK, CALLING, RESULT, ANSWER]
THINKING = turn("assistant", "Grey.", reasoning_content="Look up.")
GREETED = [turn("assistant", "Welcome"), ASK, ANSWER]
END = "<|im_end|>"
GREY = f"Grey.{END}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["<|im_start|>", END])


def row_of(messages, tools=None):
    return read_row({"messages": messages} | ({"tools": tools} if tools else {}))


def learnt(tokenizer, source, messages, tools=None, **options):
    """Return the samples of a conversation, and the notes on it with their counts."""
    template = source
    if isinstance(source, str):
        template = Template("of a test", source, tokenizer.special)
    samples, builder = samples_of(tokenizer, row_of(messages, tools), template, **options)
    return samples, {key: n for key, n in builder.counts.items() if key in KINDS}


def rendered(tokenizer, source, messages, tools=None, **options):
    """Text and tokens by transformers."""
    fast = in_transformers(tokenizer, source)
    options = {"tools": tools, "return_dict": False, **options}
    text = fast.apply_chat_template(messages, tokenize=False, **options)
    return text, fast.apply_chat_template(messages, tokenize=True, **options)


def prompt_of(tokenizer, source, messages, tools=None):
    return rendered(tokenizer, source, messages, tools, add_generation_prompt=True)[0]


def text_of(tokenizer, sample):
    return tokenizer.decode(sample.tokens.tolist(), skip_special=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_template_gets_each_thing_in_the_form_it_reads(form, tokenizer):
    source, messages = template_of(FORMS[form]["template"]), FORMS[form]["row"]
    as_handed = FORMS[form].get("handed over", messages)
    tools = TOOLS if "tools %}" in source else None
    (sample,), notes = learnt(tokenizer, source, messages, tools)
    text, ids = rendered(tokenizer, source, as_handed, tools)
    assert sample.tokens.tolist() == ids
    prompts = [
        prompt_of(tokenizer, source, as_handed[:k], tools)
        for k, message in enumerate(as_handed)
        if message["role"] == "assistant"
    ]
    answers = [text[len(prompt) :].partition(END)[0] + END for prompt in prompts]
    assert all(text.startswith(prompt) for prompt in prompts)
    assert supervised_texts(tokenizer, sample) == answers
    assert not notes


# --- what is learnt of what a template writes ---------------------------------------------------


@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_learnt_is_what_the_model_writes(what, tokenizer):
    source, messages = template_of(WRITTEN[what]["template"]), WRITTEN[what]["row"]
    (sample,), notes = learnt(tokenizer, source, messages)
    as_handed = WRITTEN[what].get("handed over", messages)
    assert sample.tokens.tolist() == rendered(tokenizer, source, as_handed)[1]
    assert supervised_texts(tokenizer, sample) == WRITTEN[what]["learnt"]
    assert notes == Counter(WRITTEN[what].get("notes"))


def test_a_turn_whose_beginning_cannot_be_told_is_refused_with_a_remedy(tokenizer):
    with pytest.raises(RecordError, match=r"data\.template=chatml"):
        learnt(tokenizer, TEMPLATES["without a beginning"], [ASK, ANSWER])


def test_tools_are_not_learnt_with_an_answer_that_nobody_asked_for(tokenizer):
    source = TEMPLATES["tools first"]
    (sample,), _ = learnt(tokenizer, source, GREETED, TOOLS)
    assert sample.tokens.tolist() == rendered(tokenizer, source, GREETED, TOOLS)[1]
    assert supervised_texts(tokenizer, sample) == ["Welcome<|im_end|>", GREY]


def test_tools_that_a_template_does_not_show_are_counted_for_chats_and_prompts(tokenizer):
    shows = TEMPLATES["tools with a system turn"]
    for messages, count in ([ASK], 1), ([turn("system", ""), ASK], 0):
        _, notes = learnt(tokenizer, shows, [*messages, ANSWER], TOOLS)
        assert notes.get("tools_not_shown", 0) == count
        row = row_of([*messages, ANSWER], TOOLS)
        template = Template("of a test", shows, tokenizer.special)
        builder = SampleBuilder(Data(), 1000, tokenizer, template)
        builder.render_prompt(question_of(row, {}))
        assert builder.counts["tools_not_shown"] == count


def test_a_system_text_that_only_prompts_show_stands_where_inference_has_it(tokenizer):
    source = TEMPLATES["system text in the last question"]
    chat = [turn("system", "S"), ASK, ANSWER, turn("user", "c"), ANSWER]
    samples, _ = learnt(tokenizer, source, chat)
    for sample, before in zip(samples, (chat[:2], chat[:4]), strict=True):
        assert text_of(tokenizer, sample) == prompt_of(tokenizer, source, before) + " Grey.</s>"
        assert supervised_texts(tokenizer, sample) == [" Grey.</s>"]
    assert "S\n\nc" in text_of(tokenizer, samples[1])
    (sample,), _ = learnt(tokenizer, source, [turn("system", ""), ASK, ANSWER])
    assert text_of(tokenizer, sample).startswith("[INST] ")


def test_reasoning_that_goes_once_the_answer_is_there_was_seen_by_the_model(tokenizer):
    source = TEMPLATES["reasoning until the answer"]
    chat = [ASK, CALLING | {"thinking": "Look up."}, RESULT, ANSWER]
    (sample,), _ = learnt(tokenizer, source, chat)  # the first turn's begins the second's
    prompt = prompt_of(tokenizer, source, chat[:3])
    assert "[Look up.]" in prompt
    assert text_of(tokenizer, sample) == prompt + GREY
    first, second = supervised_texts(tokenizer, sample)
    assert first.startswith("[Look up.]<call>")
    assert second == GREY


def test_samples_that_begin_others_of_their_conversation_are_merged_with_them(tokenizer):
    source = TEMPLATES["reasoning of a last turn"]
    chat = [ASK, ANSWER, ASK, THINKING, ASK, ANSWER, ASK, ANSWER]
    samples, notes = learnt(tokenizer, source, chat)
    expected = [([GREY, "[Look up.]Grey.<|im_end|>"], 4), ([GREY, GREY], 8)]
    for sample, (answers, end) in zip(samples, expected, strict=True):
        assert supervised_texts(tokenizer, sample) == answers
        assert sample.tokens.tolist() == rendered(tokenizer, source, chat[:end])[1]
    assert notes["rewritten"] == 1


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_a_template_leaves_out_is_counted(what, tokenizer):
    case = LEFT_OUT[what]
    for loss_on in ("assistant", "all"):
        source = template_of(case["template"])
        _, notes = learnt(tokenizer, source, [ASK, case["answer"]], loss_on=loss_on)
        assert notes[case["note"]] == 1


# --- which template, and with what --------------------------------------------------------------

NAMED = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["tool_use"]}


def test_rows_with_tools_get_the_template_of_that_name(tokenizer, tmp_path):
    """A description lists the templates, or files hold them, or an export of either."""
    listed, files, exported = (tmp_path / name for name in ("listed", "files", "exported"))
    tokenizer.save(files, NAMED)
    assert (files / "additional_chat_templates/tool_use.jinja").read_text() == NAMED["tool_use"]
    tokenizer.save(listed)
    named = [{"name": name, "template": text} for name, text in NAMED.items()]
    config = json.dumps(SPECIAL | {"chat_template": named})
    (listed / "tokenizer_config.json").write_text(config)
    load_tokenizer(listed).save(exported)
    for folder in (files, listed, exported):
        again = load_tokenizer(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for messages, tools in (([ASK, ANSWER], None), (WITH_RESULT, TOOLS)):
            (sample,), notes = learnt(again, load_template(None, again), messages, tools)
            expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
            assert sample.tokens.tolist() == expected
            assert not notes
    again.save(tmp_path / "other", {"default": "{{ messages }}"})  # in place of all
    assert load_tokenizer(tmp_path / "other").chat_templates == {"default": "{{ messages }}"}
    assert "chat_template" not in (tmp_path / "other/tokenizer_config.json").read_text()


@pytest.fixture
def switched(tokenizer, tmp_path):
    """Return a function: the template of a file, with arguments."""
    path = tmp_path / "switched.jinja"
    path.write_text(TEMPLATES["switched"])
    return lambda args=None: load_template(str(path), tokenizer, args)


def test_a_template_is_given_its_arguments_and_exported_with_them(tokenizer, switched, tmp_path):
    args = {"enable_thinking": True}
    template, plain = switched(args), switched()
    (sample,), notes = learnt(tokenizer, template, [ASK, ANSWER])
    source = TEMPLATES["switched"]
    assert sample.tokens.tolist() == rendered(tokenizer, source, [ASK, ANSWER], **args)[1]
    assert supervised_texts(tokenizer, sample) == [GREY]  # the prompt has the <think>
    assert not notes
    tokenizer.save(tmp_path / "out", template.exported)
    exported = load_tokenizer(tmp_path / "out")
    again = load_template(None, exported)
    assert again.ask([ASK]) == template.ask([ASK])
    assert again.ask([ASK]).endswith("<think>")
    other = load_template(None, exported, {"enable_thinking": False})
    assert other.ask([ASK]) == plain.ask([ASK])
    assert template.decides != plain.decides


def test_the_date_that_a_template_is_told_is_fixed_and_can_be_set(tokenizer, tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text("{{ strftime_now('%d %B %Y') }}")
    usual = load_template(str(path), tokenizer)
    dated = load_template(str(path), tokenizer, today="2025-01-31")
    assert usual.render([]) == "26 July 2024"
    assert dated.render([]) == "31 January 2025"
    assert dated.decides != usual.decides


READ = """
messages[0].content.split('l') | length → 3
'{} there'.format(messages[0].content) → hello there
messages[0].absent is defined → False
messages[0].absent →
messages[0].items() | length → 2
namespace(a=1).a → 1
namespace(a=1).b is defined → False
{'a': '<'} | tojson → {"a": "<"}
"""
OUTSIDE = """
messages.__class__.__mro__
messages[0].content.__class__.__mro__
messages[0].update(role='system')
'{0.__class__.__mro__}'.format(messages)
namespace.__init__.__globals__
"""


def test_a_template_reads_turns_and_texts_as_in_jinja_and_cannot_reach_python():
    def rendered(expression):
        return Template("t", "{{ " + expression + " }}", SPECIAL).render([turn("user", "hello")])

    for line in READ.strip().splitlines():
        expression, text = line.split("→")
        assert rendered(expression) == text.strip(), expression
    for expression in OUTSIDE.strip().splitlines():
        with pytest.raises(RecordError):
            rendered(expression)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ABSURD = {
    "takes more than": ENDLESS,
    "nested too deeply": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "characters": "a" * 300_000,
}


@pytest.mark.parametrize("says", ABSURD)
def test_a_template_that_takes_too_long_or_is_too_deep_is_refused(says, tokenizer, tmp_path, enter):
    enter(inject.setting("template_seconds", 0.5))
    file = tmp_path / "template.jinja"
    file.write_text(ABSURD[says])
    with pytest.raises(UserError, match=says):
        load_template(str(file), tokenizer).render([turn("user", "Hi")])


def test_a_last_turn_goes_on_as_in_transformers(tokenizer):
    for name in ("chatml", "stripping", "parts"):
        source = TEMPLATES[name]
        template = Template("of a test", source, tokenizer.special)
        for last in ("The answer is", "The answer is ", "```python\n", "abc"):
            messages = [turn("user", "abc"), turn("assistant", last)]
            theirs = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            shown = theirs if name == "parts" else messages
            text, _ = rendered(tokenizer, source, shown, continue_final_message=True)
            assert template.continued(messages) == text
    with pytest.raises(RecordError, match="does not show the last turn"):
        Template("of a test", TEMPLATES["hiding"], tokenizer.special).continued(messages)
