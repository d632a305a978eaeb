"""Each chat template gets a conversation in the forms that it reads.

Every template here shows one habit of real ones. `transformers` renders what a person would hand to
the template; text, tokens and the beginning of what is learnt must be the same.
"""

import json
from collections import Counter

import inject
import pytest
from texts import SPECIAL, in_transformers, samples_of, supervised_texts, turn, write_tokenizer

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.records.prompts import question_of
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError

WHERE = ("chats.jsonl", 1)
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
PLAIN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"


def template_of(cases=(), prompt=PROMPT):
    """ChatML that treats some turns in its own way. cases: {condition: what it writes}."""
    lines = ["{%- for m in messages %}"]
    for i, (condition, text) in enumerate(dict(cases).items()):
        lines.append("{%- " + ("elif " if i else "if ") + condition + " %}" + text)
    plain = "{%- else %}" + PLAIN + "{%- endif %}" if cases else PLAIN
    return "\n".join([*lines, plain, "{%- endfor %}", prompt])


def written(calls, before=""):
    """A template's text for a turn with calls."""
    return (
        "{{- '<|im_start|>assistant\\n' }}"
        + before
        + "{%- for call in m.tool_calls %}"
        + calls
        + "{%- endfor %}{{- '<|im_end|>' }}"
    )


def calls_as(calls, before=""):
    """A template that writes calls in its own way."""
    return template_of({"m.tool_calls": written(calls, before)})


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, content="", **others):
    return turn("assistant", content, tool_calls=[*calls], **others)


CALL = "{{- '<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}"
JSON = '{"city": "Zürich"}'
CITY = {"city": "Zürich"}
WEATHER, TIME, AS_TEXT = call("weather", CITY), call("time", CITY), call("weather", JSON)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
ASK, ANSWER = turn("user", "How is it?"), turn("assistant", "Grey.")
CALLING, RESULT = calling(WEATHER), turn("tool", "grey")
WITH_RESULT = [ASK, CALLING, RESULT, ANSWER]
THINKING = turn("assistant", "Grey.", reasoning_content="Look up.")
GREY = "Grey.<|im_end|>"
CALLED = f"<call>weather{JSON}</call><|im_end|>"

READS_CALLS = calls_as(CALL)
READS_IDS = template_of(
    {
        "m.tool_calls": written(
            "{%- if call.id is not defined or call.id | length != 9 %}"
            "{{- raise_exception('an id has nine letters') }}{%- endif %}"
            "{{- '<call>' + call.id + ' ' + call.function | tojson + '</call>' }}"
        ),
        "m.role == 'tool'": (
            "{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
            "{{- raise_exception('a result has an id') }}{%- endif %}"
            "{{- '<|im_start|>tool\\n' + m.tool_call_id + ' ' + m.content + '<|im_end|>' }}"
        ),
    }
)
CUTS_THINKING = template_of(
    {
        "m.role == 'assistant'": (
            "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        )
    }
)
END = "<|im_end|>"


def with_ids(*ids):
    """A call and a result for each id."""
    results = [RESULT | {"tool_call_id": id} for id in ids]
    calls = [each | {"id": id} for each, id in zip((WEATHER, TIME), ids, strict=False)]
    return [ASK, calling(*calls), *results, ANSWER]


def in_parts(message):
    return message | {"content": [{"type": "text", "text": message["content"]}]}


# name: the template, the conversation of a row, and as a person would hand it over
FORMS = {
    "ids of nine letters": (
        READS_IDS,
        [ASK, calling(WEATHER, TIME), RESULT, RESULT, ANSWER],
        with_ids("call00000", "call00001"),
    ),
    "an id that is too long": (READS_IDS, with_ids("call_of_openai"), with_ids("call00000")),
    "an id that fits": (READS_IDS, with_ids("abcDEF123"), with_ids("abcDEF123")),
    "any id": (
        calls_as("{{- '<call>' + call.id + call.function.name + '</call>' }}" + CALL),
        WITH_RESULT,
        [ASK, calling(WEATHER | {"id": "call_0"}), RESULT, ANSWER],
    ),
    "arguments as text": (
        calls_as("{{- '<call>' + call.function.name + call.function.arguments + '</call>' }}"),
        WITH_RESULT,
        [ASK, calling(AS_TEXT), RESULT, ANSWER],
    ),
    "arguments that are printed": (
        calls_as("{{- '<call>' }}{{ call.function.name }}{{ call.function.arguments }}"),
        [ASK, CALLING],
        [ASK, calling(AS_TEXT)],
    ),
    "calls without content": (
        template_of({"m.content is not string": written(CALL)}),
        WITH_RESULT,
        [ASK, calling(WEATHER, content=None), RESULT, ANSWER],
    ),
    "a template that needs tools": (
        "{%- if not tools %}{{ raise_exception('no tools') }}{%- endif %}{{- tools | tojson }}"
        + READS_CALLS,
        WITH_RESULT,
        WITH_RESULT,
    ),
    "content in parts": (
        template_of(
            {
                "true": "{{- '<|im_start|>' + m.role + '\\n' }}{%- for part in m.content %}"
                "{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}"
                "{{- '<|im_end|>' }}"
            }
        ),
        [turn("system", "Be brief."), ASK, ANSWER],
        [*map(in_parts, [turn("system", "Be brief."), ASK, ANSWER])],
    ),
    "reasoning as thinking": (
        template_of(
            {
                "m.thinking": "{{- '<|im_start|>assistant\\n[' + m.thinking + ']' }}"
                "{{- m.content + '<|im_end|>' }}"
            }
        ),
        [ASK, THINKING],
        [ASK, ANSWER | {"thinking": "Look up."}],
    ),
    "reasoning beside a call": (
        calls_as(CALL, "{%- if m.thinking %}{{- '[' + m.thinking + ']' }}{%- endif %}"),
        [ASK, CALLING | {"reasoning_content": "Look up."}],
        [ASK, CALLING | {"thinking": "Look up."}],
    ),
    "reasoning as a part": (
        template_of(
            {
                "m.content is not string": (
                    "{{- '<|im_start|>assistant\\n' }}{%- for part in m.content %}"
                    "{%- if part.type == 'thinking' %}{{- '[' + part.thinking + ']' }}"
                    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{{- '<|im_end|>' }}"
                )
            }
        ),
        [ASK, THINKING],
        [
            ASK,
            turn(
                "assistant",
                [{"type": "thinking", "thinking": "Look up."}, {"type": "text", "text": "Grey."}],
            ),
        ],
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["<|im_start|>", END])


def row_of(messages, tools=None):
    columns = {"messages": messages} | ({"tools": tools} if tools else {})
    return make_reader(columns, "auto", None, "f").read(Record(columns, WHERE))


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
    source, messages, as_handed = FORMS[form]
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

OPENS_THINKING = PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
# the prompt and the call have the first two characters of a tag in common
CALLS_WITH_A_TAG = template_of(
    {"m.tool_calls": written("{{- '<tool>' + call.function | tojson }}")}, OPENS_THINKING
)
READS_THINKING = template_of(
    {
        "m.reasoning_content": "{{- '<|im_start|>assistant\\n[' + m.reasoning_content + ']' }}"
        "{{- m.content + '<|im_end|>' }}",
        "m.role == 'assistant'": (
            "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        ),
    }
)
INLINE = turn("assistant", "<think>\nLook up.\n</think>\n\nGrey.")
GREETED = [turn("assistant", "Welcome"), ASK, ANSWER]
TWICE = [ASK, ANSWER, ASK, ANSWER]
HEADER, DEFAULT = "<|im_start|>assistant\\n", "<|im_start|>system\\nA default.<|im_end|>"
IN_WORDS = "{%- for m in messages %}{{- m.role + ': ' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
WELCOMED = ["Welcome<|im_end|>", GREY]
# name: the template, the conversation, what is learnt, the notes on it; and, where it is not the
# row's conversation, the one that transformers gives the same tokens for
WRITTEN = {
    "no line ends where reasoning is cut out": (
        CUTS_THINKING, [ASK, THINKING], [GREY], ["reasoning_left_out"], [ASK, ANSWER],
    ),
    "nor where it stood within the answer": (
        CUTS_THINKING, [ASK, INLINE], [GREY], ["reasoning_left_out"], [ASK, ANSWER],
    ),
    "nor where the prompt had opened it": (
        CUTS_THINKING,
        [ASK, turn("assistant", "Look up.\n</think>\n\nGrey.")],
        [GREY],
        ["reasoning_left_out"],
        [ASK, ANSWER],
    ),
    "reasoning within the answer goes where the template reads it": (
        READS_THINKING, [ASK, INLINE], ["[Look up.]Grey.<|im_end|>"], [], [ASK, THINKING],
    ),
    "an empty system turn leaves no line ends in the question": (
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}"
        "{{ m.content }}<|im_end|>{% endfor %}",
        [turn("system", ""), ASK, ANSWER],
        [GREY],
        [],
        [ASK, ANSWER],
    ),
    "text that is written otherwise is not missed": (
        template_of(
            {
                "m.role == 'tool'": (
                    "{{- '<|im_start|>tool\\n' + m.content | tojson + '<|im_end|>' }}"
                ),
                "m.tool_calls": written(CALL),
                "true": "{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' }}",
            }
        ),
        [turn("user", " a\nb "), CALLING, turn("tool", '{"sky":\n"grey"}'), ANSWER],
        [CALLED, GREY],
        [],
    ),
    # plain answers begin with an empty block, which one with reasoning does not have
    "an answer begins where it parts from the prompt": (
        template_of(
            {
                "m.role == 'assistant'": "{{- '<|im_start|>assistant\\n<think>' }}"
                "{{- (m.reasoning_content or '\\n\\n') + '</think>' + m.content + '<|im_end|>' }}",
            },
            OPENS_THINKING,
        ),
        [ASK, THINKING],
        ["Look up.</think>Grey.<|im_end|>"],
        ["prompt_differs"],
    ),
    "a call begins where it parts from the prompt": (
        CALLS_WITH_A_TAG,
        [ASK, CALLING],
        [f'<tool>{{"name": "weather", "arguments": {JSON}}}<|im_end|>'],
        ["prompt_differs"],
    ),
    **{
        f"a question that stands in the prompt too does not shift the mask: {question}": (
            CALLS_WITH_A_TAG,
            [turn("user", "What does <think>\nmean?"), ANSWER, turn("user", question), ANSWER],
            [GREY, GREY],
            ["prompt_differs"] * 2,
        )
        for question in ("think", "assistant", "a", "e", "")
    },
    "an answer comes first where the template wants a question": (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{- raise_exception('no question') }}{%- endif %}" + template_of(),
        GREETED,
        ["Welcome<|im_end|>", GREY],
        ["prompt_differs"],
    ),
    "no header of a first answer, where only a last turn has the prompt, as in OLMo": (
        "{{- bos_token }}{%- for m in messages %}"
        + PLAIN
        + "{%- if loop.last %}"
        + PROMPT
        + "{%- endif %}{%- endfor %}",
        GREETED,
        ["Welcome<|im_end|>", GREY],
        [],
    ),
    "no header behind a result that ends otherwise in prompts, as in Hermes": (
        template_of(
            {
                "m.role == 'tool'": "{{- '<|im_start|>tool\\n' + m.content }}"
                "{{- '' if loop.last else '\\n' }}{{- '<|im_end|>' }}",
                "m.tool_calls": written(CALL),
            }
        ),
        WITH_RESULT,
        [CALLED, GREY],
        ["prompt_differs"],
    ),
    # text that follows the last turn of any conversation
    **{
        f"no text after the last turn: {what}": (source, TWICE, [GREY, GREY], noted)
        for what, source, noted in (
            ("a header", template_of(prompt="{{- '" + HEADER + "' }}"), []),
            (
                "a header where the text begins with a default, as in Command R7B",
                "{{- '<s>" + DEFAULT + "' }}" + template_of(prompt="{{- '" + HEADER + "' }}"),
                [],
            ),
            ("a header in words", IN_WORDS + "{{- 'assistant: ' }}", []),
            (
                "an instruction, as in Command R+",
                template_of(prompt="{{- '" + DEFAULT + "' }}" + PROMPT),
                ["prompt_differs"] * 2,
            ),
            (
                "an instruction that tells of the conversation",
                template_of(
                    prompt="{{- '<|im_start|>system\\nTurns: ' + messages | length | string }}"
                    + PROMPT
                ),
                ["prompt_differs"] * 2,
            ),
            (
                "the header of the next question",
                template_of(
                    prompt="{%- if not add_generation_prompt %}{{- '<|im_start|>user\\n' }}"
                    "{%- endif %}" + PROMPT
                ),
                [],
            ),
        )
    },
    "no default system text, which an empty conversation lacks, before a first answer": (
        "{%- if messages %}{{- '" + DEFAULT + "' }}{%- endif %}" + template_of(),
        GREETED,
        WELCOMED,
        ["prompt_differs"],
    ),
    "nor where an empty conversation is empty": (
        "{%- if messages %}{{- '" + DEFAULT + "' }}" + template_of() + "{%- endif %}",
        GREETED,
        WELCOMED,
        ["prompt_differs"],
    ),
    "no header after a system turn, where only turns after it have the prompt, as in Granite": (
        "{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{{- messages[0].content + '<|im_end|>' if turns != messages }}{%- for m in turns %}"
        + PLAIN
        + "{%- if loop.last %}"
        + PROMPT
        + "{%- endif %}{%- endfor %}",
        [turn("system", "Be brief."), ANSWER],
        [GREY],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_learnt_is_what_the_model_writes(what, tokenizer):
    source, messages, answers, noted, *as_handed = WRITTEN[what]
    (sample,), notes = learnt(tokenizer, source, messages)
    assert sample.tokens.tolist() == rendered(tokenizer, source, *(as_handed or [messages]))[1]
    assert supervised_texts(tokenizer, sample) == answers
    assert notes == Counter(noted)


def test_a_turn_whose_beginning_cannot_be_told_is_refused_with_a_remedy(tokenizer):
    source = (
        "{% if not add_generation_prompt %}{{ messages[-1].content | length }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    )
    with pytest.raises(RecordError, match=r"data\.template=chatml"):
        learnt(tokenizer, source, [ASK, ANSWER])


def test_tools_are_not_learnt_with_an_answer_that_nobody_asked_for(tokenizer):
    source = "{%- if messages %}{{- tools | tojson }}{%- endif %}" + template_of()
    (sample,), _ = learnt(tokenizer, source, GREETED, TOOLS)
    assert sample.tokens.tolist() == rendered(tokenizer, source, GREETED, TOOLS)[1]
    assert supervised_texts(tokenizer, sample) == WELCOMED


def test_tools_that_a_template_does_not_show_are_counted_for_chats_and_prompts(tokenizer):
    shows = (
        "{%- if messages[0].role == 'system' %}{{- tools | tojson }}{%- endif %}" + template_of()
    )
    for messages, count in ([ASK], 1), ([turn("system", ""), ASK], 0):
        _, notes = learnt(tokenizer, shows, [*messages, ANSWER], TOOLS)
        assert notes.get("tools_not_shown", 0) == count
        row = row_of([*messages, ANSWER], TOOLS)
        template = Template("of a test", shows, tokenizer.special)
        builder = SampleBuilder(Data(), 1000, tokenizer, template)
        builder.render_prompt(question_of(row, {}))
        assert builder.counts["tools_not_shown"] == count


SYSTEM_IN_LAST_QUESTION = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' }}
{%- if loop.last and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- endif %}{%- endfor %}"""


def test_a_system_text_that_only_prompts_show_stands_where_inference_has_it(tokenizer):
    source = SYSTEM_IN_LAST_QUESTION
    chat = [turn("system", "S"), ASK, ANSWER, turn("user", "c"), ANSWER]
    samples, _ = learnt(tokenizer, source, chat)
    for sample, before in zip(samples, (chat[:2], chat[:4]), strict=True):
        assert text_of(tokenizer, sample) == prompt_of(tokenizer, source, before) + " Grey.</s>"
        assert supervised_texts(tokenizer, sample) == [" Grey.</s>"]
    assert "S\n\nc" in text_of(tokenizer, samples[1])
    (sample,), _ = learnt(tokenizer, source, [turn("system", ""), ASK, ANSWER])
    assert text_of(tokenizer, sample).startswith("[INST] ")


def test_reasoning_that_goes_once_the_answer_is_there_was_seen_by_the_model(tokenizer):
    source = calls_as(
        CALL,
        "{%- if m.thinking and not (messages[-1].role == 'assistant' "
        "and not messages[-1].tool_calls) %}{{- '[' + m.thinking + ']' }}{%- endif %}",
    )
    chat = [ASK, CALLING | {"thinking": "Look up."}, RESULT, ANSWER]
    (sample,), _ = learnt(tokenizer, source, chat)  # the first turn's begins the second's
    prompt = prompt_of(tokenizer, source, chat[:3])
    assert "[Look up.]" in prompt
    assert text_of(tokenizer, sample) == prompt + GREY
    first, second = supervised_texts(tokenizer, sample)
    assert first.startswith("[Look up.]<call>")
    assert second == GREY


def test_samples_that_begin_others_of_their_conversation_are_merged_with_them(tokenizer):
    source = template_of(
        {
            "m.role == 'assistant' and m.reasoning_content and loop.last": (
                "{{- '<|im_start|>assistant\\n[' + m.reasoning_content + ']' }}"
                "{{- m.content + '<|im_end|>' }}"
            )
        }
    )
    chat = [ASK, ANSWER, ASK, THINKING, ASK, ANSWER, ASK, ANSWER]
    samples, notes = learnt(tokenizer, source, chat)
    expected = [([GREY, "[Look up.]Grey.<|im_end|>"], 4), ([GREY, GREY], 8)]
    for sample, (answers, end) in zip(samples, expected, strict=True):
        assert supervised_texts(tokenizer, sample) == answers
        assert sample.tokens.tolist() == rendered(tokenizer, source, chat[:end])[1]
    assert notes["rewritten"] == 1


ONE_CALL = template_of(
    {
        "m.tool_calls": "{%- set call = m.tool_calls[0] %}{{- '<|im_start|>assistant\\n' }}"
        + CALL
        + "{{- '<|im_end|>' }}"
    }
)
LEFT_OUT = {
    "text beside a call": (READS_CALLS, calling(WEATHER, content="I look."), "text_left_out"),
    "a second call": (ONE_CALL, calling(WEATHER, TIME), "calls_left_out"),
    "a second call of one function": (ONE_CALL, calling(WEATHER, WEATHER), "calls_left_out"),
    "what the user says": (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' }}<|im_end|>{% endfor %}",
        ANSWER,
        "text_left_out",
    ),
    "reasoning": (CUTS_THINKING, THINKING, "reasoning_left_out"),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_a_template_leaves_out_is_counted(what, tokenizer):
    source, answer, key = LEFT_OUT[what]
    for loss_on in ("assistant", "all"):
        _, notes = learnt(tokenizer, source, [ASK, answer], loss_on=loss_on)
        assert notes[key] == 1


# --- which template, and with what --------------------------------------------------------------

NAMED = {"default": template_of(), "tool_use": "{{- '<tools>' + tools | tojson }}" + READS_CALLS}


def test_rows_with_tools_get_the_template_of_that_name(tokenizer, tmp_path):
    """A description lists the templates, or files hold them, or an export of either."""
    transformers = pytest.importorskip("transformers")
    listed, files, exported = (tmp_path / name for name in ("listed", "files", "exported"))
    tokenizer.save(files, NAMED)
    assert (files / "additional_chat_templates" / "tool_use.jinja").read_text() == NAMED["tool_use"]
    tokenizer.save(listed)
    named = [{"name": name, "template": text} for name, text in NAMED.items()]
    config = json.dumps(SPECIAL | {"chat_template": named})
    (listed / "tokenizer_config.json").write_text(config)
    load_tokenizer(str(listed)).save(exported)
    for folder in (files, listed, exported):
        again = load_tokenizer(str(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for messages, tools in (([ASK, ANSWER], None), (WITH_RESULT, TOOLS)):
            (sample,), notes = learnt(again, load_template(None, again), messages, tools)
            expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
            assert sample.tokens.tolist() == expected
            assert not notes
    again.save(tmp_path / "other", {"default": "{{ messages }}"})  # in place of all
    assert load_tokenizer(str(tmp_path / "other")).chat_templates == {"default": "{{ messages }}"}
    assert "chat_template" not in (tmp_path / "other" / "tokenizer_config.json").read_text()


SWITCHED = template_of(
    {
        "m.role == 'assistant'": (
            "{{- '<|im_start|>assistant\\n' + ('<think>' if enable_thinking else '') }}"
            "{{- m.content + '<|im_end|>' }}"
        )
    },
    PROMPT.replace("{%- endif %}", "{{ '<think>' if enable_thinking }}{%- endif %}"),
)


@pytest.fixture
def switched(tokenizer, tmp_path):
    """Return a function: the template of a file, with arguments."""
    path = tmp_path / "switched.jinja"
    path.write_text(SWITCHED)
    return lambda args=None: load_template(str(path), tokenizer, args)


def test_a_template_is_given_its_arguments_and_exported_with_them(tokenizer, switched, tmp_path):
    args = {"enable_thinking": True}
    template, plain = switched(args), switched()
    (sample,), notes = learnt(tokenizer, template, [ASK, ANSWER])
    assert sample.tokens.tolist() == rendered(tokenizer, SWITCHED, [ASK, ANSWER], **args)[1]
    assert supervised_texts(tokenizer, sample) == [GREY]  # the prompt has the <think>
    assert not notes
    tokenizer.save(tmp_path / "out", template.exported)
    exported = load_tokenizer(str(tmp_path / "out"))
    again = load_template(None, exported)
    assert again.ask([ASK]) == template.ask([ASK])
    assert again.ask([ASK]).endswith("<think>")
    other = load_template(None, exported, {"enable_thinking": False})
    assert other.ask([ASK]) == plain.ask([ASK])
    assert template.decides != plain.decides


@pytest.mark.parametrize(
    ("args", "says"),
    [({"enable_thinkng": True}, "it has:  enable_thinking"), ({"messages": []}, "Leave it out")],
)
def test_an_argument_that_the_template_does_not_have_is_refused(args, says, switched):
    with pytest.raises(UserError, match=r"data\.template_args") as error:
        switched(args)
    assert says in str(error.value)


def test_the_date_that_a_template_is_told_is_fixed_and_can_be_set(tokenizer, tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text("{{ strftime_now('%d %B %Y') }}")
    usual = load_template(str(path), tokenizer)
    dated = load_template(str(path), tokenizer, today="2025-01-31")
    assert usual.render([]) == "26 July 2024"
    assert dated.render([]) == "31 January 2025"
    assert dated.decides != usual.decides
    with pytest.raises(UserError, match=r"data\.template_date=tomorrow"):
        load_template(str(path), tokenizer, today="tomorrow")


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
    stripping = template_of({"m.role == 'assistant'": "{{- m.role + ': ' + m.content | trim }}"})
    parts = "{%- for m in messages %}{{ m.role + ': ' + m.content[0].text + ';' }}{%- endfor %}"
    for source in (template_of(), stripping, parts):
        template = Template("of a test", source, tokenizer.special)
        for last in ("The answer is", "The answer is ", "```python\n", "abc"):
            messages = [turn("user", "abc"), turn("assistant", last)]
            theirs = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            shown = theirs if source is parts else messages
            text, _ = rendered(tokenizer, source, shown, continue_final_message=True)
            assert template.continued(messages) == text
    hiding = template_of({"m.role == 'assistant'": "{{- m.role }}"})
    with pytest.raises(RecordError, match="does not show the last turn"):
        Template("of a test", hiding, tokenizer.special).continued(messages)
