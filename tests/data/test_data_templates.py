"""Each chat template gets a conversation in the forms that it reads.

Every template here shows one habit of real ones. `transformers` renders what a person would hand to
the template; text, tokens and the beginning of what is learnt must be the same.
"""

import json

import inject
import pytest
from texts import make_tokenizer, samples_of, supervised_texts, turn

from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import Conversation, make_reader
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.chat_template import Template, load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WHERE = ("chats.jsonl", 1)
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
PLAIN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"


def template_of(*cases, prompt=PROMPT):
    """ChatML that treats some turns in its own way. cases: (condition, what it writes)."""
    lines = ["{%- for m in messages %}"]
    for i, (condition, text) in enumerate(cases):
        lines.append("{%- " + ("elif " if i else "if ") + condition + " %}" + text)
    return "\n".join([*lines, "{%- else %}" + PLAIN, "{%- endif %}", "{%- endfor %}", prompt])


def call(name, arguments, **others):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


def written(calls, before=""):
    """A template's text for a turn with calls."""
    return (
        "{{- '<|im_start|>assistant\\n' }}"
        + before
        + "{%- for call in m.tool_calls %}"
        + calls
        + "{%- endfor %}{{- '<|im_end|>' }}"
    )


CALL = "{{- '<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}"
JSON = '{"city": "Zürich"}'
CITY = {"city": "Zürich"}
WEATHER, TIME = call("weather", CITY), call("time", CITY)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
ASK, ANSWER = turn("user", "How is it?"), turn("assistant", "Grey.")
CALLING = turn("assistant", "", tool_calls=[WEATHER])
RESULT = turn("tool", "grey")
THINKING = turn("assistant", "Grey.", reasoning_content="Look up.")

CALLS_WITH_IDS = template_of(
    (
        "m.tool_calls",
        written(
            "{%- if call.id is not defined or call.id | length != 9 %}"
            "{{- raise_exception('an id has nine letters') }}{%- endif %}"
            "{{- '<call>' + call.id + ' ' + call.function | tojson + '</call>' }}"
        ),
    ),
    (
        "m.role == 'tool'",
        "{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{- raise_exception('a result has an id') }}{%- endif %}"
        "{{- '<|im_start|>tool\\n' + m.tool_call_id + ' ' + m.content + '<|im_end|>' }}",
    ),
)
CONCATENATES_ID = template_of(
    ("m.tool_calls", written("{{- '<call>' + call.id + call.function.name + '</call>' }}" + CALL))
)
CALLS_AS_TEXT = template_of(
    (
        "m.tool_calls",
        written("{{- '<call>' + call.function.name + call.function.arguments + '</call>' }}"),
    )
)
PRINTS_ARGUMENTS = template_of(
    (
        "m.tool_calls",
        written("{{- '<call>' }}{{ call.function.name }}{{ call.function.arguments }}"),
    )
)
CALLS_WITHOUT_CONTENT = template_of(("m.content is not string", written(CALL)))
NEEDS_TOOLS = "{%- if not tools %}{{ raise_exception('no tools') }}{%- endif %}" + (
    "{{- tools | tojson }}" + template_of(("m.tool_calls", written(CALL)))
)
PARTS_ONLY = template_of(
    (
        "true",
        "{{- '<|im_start|>' + m.role + '\\n' }}{%- for part in m.content %}"
        "{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{{- '<|im_end|>' }}",
    )
)
READS_THINKING = template_of(
    (
        "m.thinking",
        "{{- '<|im_start|>assistant\\n[' + m.thinking + ']' + m.content + '<|im_end|>' }}",
    )
)
THINKS_BESIDE_CALLS = template_of(
    ("m.tool_calls", written(CALL, "{%- if m.thinking %}{{- '[' + m.thinking + ']' }}{%- endif %}"))
)
READS_THINKING_PARTS = template_of(
    (
        "m.content is not string",
        "{{- '<|im_start|>assistant\\n' }}{%- for part in m.content %}"
        "{%- if part.type == 'thinking' %}{{- '[' + part.thinking + ']' }}"
        "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{{- '<|im_end|>' }}",
    )
)
CUTS_THINKING = template_of(
    (
        "m.role == 'assistant'",
        "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}",
    )
)
END = "<|im_end|>"
FORMS = {
    "ids of nine letters": (
        CALLS_WITH_IDS,
        [ASK, turn("assistant", "", tool_calls=[WEATHER, TIME]), RESULT, RESULT, ANSWER],
        [
            ASK,
            turn(
                "assistant",
                "",
                tool_calls=[WEATHER | {"id": "call00000"}, TIME | {"id": "call00001"}],
            ),
            RESULT | {"tool_call_id": "call00000"},
            RESULT | {"tool_call_id": "call00001"},
            ANSWER,
        ],
        None,
    ),
    "an id that is too long": (
        CALLS_WITH_IDS,
        [
            ASK,
            turn("assistant", "", tool_calls=[WEATHER | {"id": "call_of_openai"}]),
            RESULT | {"tool_call_id": "call_of_openai"},
            ANSWER,
        ],
        [
            ASK,
            turn("assistant", "", tool_calls=[WEATHER | {"id": "call00000"}]),
            RESULT | {"tool_call_id": "call00000"},
            ANSWER,
        ],
        None,
    ),
    "an id that fits": (
        CALLS_WITH_IDS,
        [
            ASK,
            turn("assistant", "", tool_calls=[WEATHER | {"id": "abcDEF123"}]),
            RESULT | {"tool_call_id": "abcDEF123"},
            ANSWER,
        ],
        None,
        None,
    ),
    "any id": (
        CONCATENATES_ID,
        [ASK, CALLING, RESULT, ANSWER],
        [ASK, turn("assistant", "", tool_calls=[WEATHER | {"id": "call_0"}]), RESULT, ANSWER],
        None,
    ),
    "arguments as text": (
        CALLS_AS_TEXT,
        [ASK, CALLING, RESULT, ANSWER],
        [ASK, turn("assistant", "", tool_calls=[call("weather", JSON)]), RESULT, ANSWER],
        None,
    ),
    "arguments that are printed": (
        PRINTS_ARGUMENTS,
        [ASK, CALLING],
        [ASK, turn("assistant", "", tool_calls=[call("weather", JSON)])],
        None,
    ),
    "calls without content": (
        CALLS_WITHOUT_CONTENT,
        [ASK, CALLING, RESULT, ANSWER],
        [ASK, turn("assistant", None, tool_calls=[WEATHER]), RESULT, ANSWER],
        None,
    ),
    "a template that needs tools": (NEEDS_TOOLS, [ASK, CALLING, RESULT, ANSWER], None, TOOLS),
    "content in parts": (
        PARTS_ONLY,
        [turn("system", "Be brief."), ASK, ANSWER],
        [
            turn("system", [{"type": "text", "text": "Be brief."}]),
            turn("user", [{"type": "text", "text": "How is it?"}]),
            turn("assistant", [{"type": "text", "text": "Grey."}]),
        ],
        None,
    ),
    "reasoning as thinking": (
        READS_THINKING,
        [ASK, THINKING],
        [ASK, turn("assistant", "Grey.", thinking="Look up.")],
        None,
    ),
    "reasoning beside a call": (
        THINKS_BESIDE_CALLS,
        [ASK, CALLING | {"reasoning_content": "Look up."}],
        [ASK, CALLING | {"thinking": "Look up."}],
        None,
    ),
    "reasoning as a part": (
        READS_THINKING_PARTS,
        [ASK, THINKING],
        [
            ASK,
            turn(
                "assistant",
                [{"type": "thinking", "thinking": "Look up."}, {"type": "text", "text": "Grey."}],
            ),
        ],
        None,
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(["<s>", "</s>", "<|im_start|>", END]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return load_tokenizer(str(folder))


def row_of(messages, tools=None):
    columns = {"messages": messages} | ({"tools": tools} if tools else {})
    return make_reader(columns, "auto", None, "f").read(Record(columns, WHERE))


def rendered(tokenizer, source, messages, tools=None, **options):
    """Text and tokens by transformers."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **SPECIAL, chat_template=source
    )
    options = {"tools": tools, "return_dict": False, **options}
    text = fast.apply_chat_template(messages, tokenize=False, **options)
    return text, fast.apply_chat_template(messages, tokenize=True, **options)


def text_of(tokenizer, sample):
    return tokenizer.decode(sample.tokens.tolist(), skip_special=False)


def notes_of(builder):
    return set(builder.counts) & set(KINDS)


@pytest.mark.parametrize("form", FORMS)
def test_a_template_gets_each_thing_in_the_form_it_reads(form, tokenizer):
    source, messages, as_handed, tools = FORMS[form]
    as_handed = as_handed or messages
    template = Template(form, source, tokenizer.special)
    (sample,), builder = samples_of(tokenizer, row_of(messages, tools), template)
    text, ids = rendered(tokenizer, source, as_handed, tools)
    assert sample.tokens.tolist() == ids
    prompts = [
        rendered(tokenizer, source, as_handed[:k], tools, add_generation_prompt=True)[0]
        for k, message in enumerate(as_handed)
        if message["role"] == "assistant"
    ]
    answers = [text[len(prompt) :].partition(END)[0] + END for prompt in prompts]
    assert all(text.startswith(prompt) for prompt in prompts)
    assert supervised_texts(tokenizer, sample) == answers
    assert notes_of(builder) <= {"tools_not_shown"}


SYSTEM_IN_LAST_QUESTION = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' }}
{%- if loop.last and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- endif %}{%- endfor %}"""


def test_a_system_text_that_only_prompts_show_stands_where_inference_has_it(tokenizer):
    template = Template("prompts", SYSTEM_IN_LAST_QUESTION, tokenizer.special)
    chat = [turn("system", "S"), turn("user", "a"), turn("assistant", "b")]
    longer = [*chat, turn("user", "c"), turn("assistant", "d")]
    first, second = samples_of(tokenizer, row_of(longer), template)[0]
    for sample, before, answer in ((first, chat[:2], " b</s>"), (second, longer[:4], " d</s>")):
        prompt, _ = rendered(tokenizer, SYSTEM_IN_LAST_QUESTION, before, add_generation_prompt=True)
        assert text_of(tokenizer, sample) == prompt + answer
        assert supervised_texts(tokenizer, sample) == [answer]
    assert "S\n\nc" in text_of(tokenizer, second)
    (sample,), _ = samples_of(tokenizer, row_of([turn("system", ""), *chat[1:]]), template)
    assert text_of(tokenizer, sample).startswith("[INST] ")


def test_an_empty_system_turn_leaves_no_line_ends_in_the_question(tokenizer):
    source = (
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    chat = [turn("system", ""), turn("user", "a"), turn("assistant", "b")]
    (sample,), builder = samples_of(tokenizer, row_of(chat), Template("t", source, {}))
    assert text_of(tokenizer, sample) == "a<|im_end|>b<|im_end|>"
    assert "system_in_user" not in builder.counts


def test_reasoning_that_a_template_cuts_out_leaves_no_line_ends(tokenizer):
    template = Template("cuts", CUTS_THINKING, tokenizer.special)
    for answer in (
        THINKING,
        turn("assistant", "<think>\nLook up.\n</think>\n\nGrey."),
        turn("assistant", "Look up.\n</think>\n\nGrey."),
    ):
        (sample,), builder = samples_of(tokenizer, row_of([ASK, answer]), template)
        assert sample.tokens.tolist() == rendered(tokenizer, CUTS_THINKING, [ASK, ANSWER])[1]
        assert supervised_texts(tokenizer, sample) == ["Grey.<|im_end|>"]
        assert builder.counts["reasoning_left_out"] == 1


def test_reasoning_within_the_answer_goes_where_the_template_reads_it(tokenizer):
    source = template_of(
        (
            "m.reasoning_content",
            "{{- '<|im_start|>assistant\\n[' + m.reasoning_content + ']' }}"
            "{{- m.content + '<|im_end|>' }}",
        ),
        (
            "m.role == 'assistant'",
            "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}",
        ),
    )
    inline = turn("assistant", "<think>\nLook up.\n</think>\n\nGrey.")
    template = Template("t", source, tokenizer.special)
    (sample,), builder = samples_of(tokenizer, row_of([ASK, inline]), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, [ASK, THINKING])[1]
    assert supervised_texts(tokenizer, sample) == ["[Look up.]Grey.<|im_end|>"]
    assert not notes_of(builder)


DROPS_TEXT = template_of(("m.tool_calls", written(CALL)))
ONE_CALL = template_of(
    (
        "m.tool_calls",
        "{%- set call = m.tool_calls[0] %}{{- '<|im_start|>assistant\\n' }}"
        + CALL
        + "{{- '<|im_end|>' }}",
    )
)
LEFT_OUT = {
    "text beside a call": (
        DROPS_TEXT,
        [ASK, turn("assistant", "I look.", tool_calls=[WEATHER])],
        "text_left_out",
    ),
    "a second call": (
        ONE_CALL,
        [ASK, turn("assistant", "", tool_calls=[WEATHER, TIME])],
        "calls_left_out",
    ),
    "a second call of one function": (
        ONE_CALL,
        [ASK, turn("assistant", "", tool_calls=[WEATHER, WEATHER])],
        "calls_left_out",
    ),
    "what the user says": (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' }}<|im_end|>{% endfor %}",
        [ASK, ANSWER],
        "text_left_out",
    ),
    "reasoning": (CUTS_THINKING, [ASK, THINKING], "reasoning_left_out"),
}


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_a_template_leaves_out_is_counted(what, loss_on, tokenizer):
    source, messages, key = LEFT_OUT[what]
    template = Template(what, source, tokenizer.special)
    _, builder = samples_of(tokenizer, row_of(messages), template, loss_on=loss_on)
    assert builder.counts[key] == 1
    assert builder.examples[key] == ["chats.jsonl:1"]
    assert KINDS[key].warns_from == 0


def test_text_that_a_template_writes_otherwise_is_not_missed(tokenizer):
    source = template_of(
        ("m.role == 'tool'", "{{- '<|im_start|>tool\\n' + m.content | tojson + '<|im_end|>' }}"),
        ("m.tool_calls", written(CALL)),
        ("true", "{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' }}"),
    )
    chat = [turn("user", " a\nb "), CALLING, turn("tool", '{"sky":\n"grey"}'), ANSWER]
    _, builder = samples_of(tokenizer, row_of(chat), Template("t", source, tokenizer.special))
    assert not notes_of(builder)


OPENS_THINKING = PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
TURNS_THAT_BEGIN_OTHERWISE = {
    # plain answers begin with an empty block, which one with reasoning does not have
    "reasoning": (
        template_of(
            (
                "m.role == 'assistant'",
                "{{- '<|im_start|>assistant\\n<think>' + (m.reasoning_content or '\\n\\n') }}"
                "{{- '</think>' + m.content + '<|im_end|>' }}",
            ),
            prompt=OPENS_THINKING,
        ),
        [ASK, THINKING],
        "Look up.</think>Grey.<|im_end|>",
    ),
    # the prompt and the call have the first two characters of a tag in common
    "a call": (
        template_of(
            ("m.tool_calls", written("{{- '<tool>' + call.function | tojson }}")),
            prompt=OPENS_THINKING,
        ),
        [ASK, CALLING],
        f'<tool>{{"name": "weather", "arguments": {JSON}}}<|im_end|>',
    ),
}


@pytest.mark.parametrize("what", TURNS_THAT_BEGIN_OTHERWISE)
def test_an_answer_begins_where_it_parts_from_the_prompt(what, tokenizer):
    source, messages, answer = TURNS_THAT_BEGIN_OTHERWISE[what]
    template = Template(what, source, tokenizer.special)
    (sample,), builder = samples_of(tokenizer, row_of(messages), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, messages)[1]
    assert supervised_texts(tokenizer, sample) == [answer]
    assert builder.counts["prompt_differs"] == 1


@pytest.mark.parametrize("question", ["think", "assistant", "a", "e", ""])
def test_a_question_that_stands_in_the_prompt_too_does_not_shift_the_mask(question, tokenizer):
    source, _, _ = TURNS_THAT_BEGIN_OTHERWISE["a call"]
    chat = [turn("user", "What does <think>\nmean?"), ANSWER, turn("user", question), ANSWER]
    template = Template("t", source, tokenizer.special)
    (sample,), _ = samples_of(tokenizer, row_of(chat), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, chat)[1]
    assert supervised_texts(tokenizer, sample) == ["Grey.<|im_end|>"] * 2


def test_reasoning_that_goes_once_the_answer_is_there_was_seen_by_the_model(tokenizer):
    source = template_of(
        (
            "m.tool_calls",
            written(
                CALL,
                "{%- if m.thinking and not (messages[-1].role == 'assistant' "
                "and not messages[-1].tool_calls) %}{{- '[' + m.thinking + ']' }}{%- endif %}",
            ),
        )
    )
    calling = CALLING | {"thinking": "Look up."}
    chat = [ASK, calling, RESULT, ANSWER]
    template = Template("drops", source, tokenizer.special)
    samples, _ = samples_of(tokenizer, row_of(chat), template)
    prompt, _ = rendered(tokenizer, source, chat[:3], add_generation_prompt=True)
    assert "[Look up.]" in prompt
    (sample,) = samples  # the first turn's text is the beginning of the second's
    assert text_of(tokenizer, sample) == prompt + "Grey.<|im_end|>"
    assert supervised_texts(tokenizer, sample)[0].startswith("[Look up.]<call>")
    assert supervised_texts(tokenizer, sample)[1] == "Grey.<|im_end|>"


def test_a_conversation_may_begin_with_an_answer_where_the_template_wants_a_question(tokenizer):
    source = (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{- raise_exception('no question') }}{%- endif %}" + template_of(("false", ""))
    )
    chat = [turn("assistant", "Welcome"), turn("user", "a"), turn("assistant", "b")]
    template = Template("asks", source, tokenizer.special)
    (sample,), _ = samples_of(tokenizer, row_of(chat), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, chat)[1]
    assert supervised_texts(tokenizer, sample) == ["Welcome<|im_end|>", "b<|im_end|>"]


def test_the_header_of_a_first_answer_is_not_learnt_where_only_a_last_turn_has_the_prompt(
    tokenizer,
):
    source = (
        "{{- bos_token }}{%- for m in messages %}"
        + PLAIN
        + "{%- if loop.last %}"
        + PROMPT
        + "{%- endif %}{%- endfor %}"
    )
    chat = [turn("assistant", "Welcome"), ASK, ANSWER]
    template = Template("OLMo's way", source, tokenizer.special)
    (sample,), _ = samples_of(tokenizer, row_of(chat), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, chat)[1]
    assert supervised_texts(tokenizer, sample) == ["Welcome<|im_end|>", "Grey.<|im_end|>"]


def test_a_header_behind_a_result_that_ends_otherwise_in_prompts_is_not_learnt(tokenizer):
    result = (
        "{{- '<|im_start|>tool\\n' + m.content }}"
        "{{- '' if loop.last else '\\n' }}{{- '<|im_end|>' }}"
    )
    source = template_of(("m.role == 'tool'", result), ("m.tool_calls", written(CALL)))
    chat = [ASK, CALLING, RESULT, ANSWER]
    template = Template("Hermes' way", source, tokenizer.special)
    (sample,), builder = samples_of(tokenizer, row_of(chat), template)
    assert sample.tokens.tolist() == rendered(tokenizer, source, chat)[1]
    assert supervised_texts(tokenizer, sample)[-1] == "Grey.<|im_end|>"
    assert builder.counts["prompt_differs"] == 1


def test_a_turn_whose_beginning_cannot_be_told_is_refused_with_a_remedy(tokenizer):
    source = (
        "{% if not add_generation_prompt %}{{ messages[-1].content | length }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    )
    row = Conversation([turn("user", "ab"), turn("assistant", "cd")], None, WHERE)
    with pytest.raises(RecordError, match=r"data\.template=chatml"):
        samples_of(tokenizer, row, Template("t", source, {}))


NAMED = {
    "default": template_of(("false", "")),
    "tool_use": "{{- '<tools>' + tools | tojson }}" + template_of(("m.tool_calls", written(CALL))),
}


def saved(tokenizer, folder, **config):
    tokenizer.save(folder)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("place", ["config", "files"])
def test_rows_with_tools_get_the_template_of_that_name(tokenizer, tmp_path, place):
    transformers = pytest.importorskip("transformers")
    config = {}
    if place == "config":
        config = {"chat_template": [{"name": k, "template": v} for k, v in NAMED.items()]}
    else:
        (tmp_path / "in" / "additional_chat_templates").mkdir(parents=True)
        (tmp_path / "in" / "chat_template.jinja").write_text(NAMED["default"])
        file = tmp_path / "in" / "additional_chat_templates" / "tool_use.jinja"
        file.write_text(NAMED["tool_use"])
    ours = saved(tokenizer, tmp_path / "in", **config)
    ours.save(tmp_path / "out")
    for folder in ("in", "out"):  # what is exported chooses alike
        again = load_tokenizer(str(tmp_path / folder))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        for messages, tools in (([ASK, ANSWER], None), ([ASK, CALLING, RESULT, ANSWER], TOOLS)):
            template = load_template(None, again)
            (sample,), builder = samples_of(again, row_of(messages, tools), template)
            expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
            assert sample.tokens.tolist() == expected
            assert not notes_of(builder)


def test_a_template_in_place_of_named_ones_is_the_only_one_saved(tokenizer, tmp_path):
    listed = [{"name": name, "template": text} for name, text in NAMED.items()]
    ours = saved(tokenizer, tmp_path / "in", chat_template=listed)
    ours.save(tmp_path / "out", {"default": "{{ messages }}"})
    assert load_tokenizer(str(tmp_path / "out")).chat_templates == {"default": "{{ messages }}"}


SWITCHED = template_of(
    (
        "m.role == 'assistant'",
        "{{- '<|im_start|>assistant\\n' + ('<think>' if enable_thinking else '') }}"
        "{{- m.content + '<|im_end|>' }}",
    ),
    prompt=PROMPT.replace("{%- endif %}", "{{ '<think>' if enable_thinking }}{%- endif %}"),
)


def test_a_template_is_given_its_arguments_and_exported_with_them(tokenizer, tmp_path):
    path = tmp_path / "switched.jinja"
    path.write_text(SWITCHED)
    args = {"enable_thinking": True}
    template = load_template(str(path), tokenizer, args)
    (sample,), builder = samples_of(tokenizer, row_of([ASK, ANSWER]), template)
    assert sample.tokens.tolist() == rendered(tokenizer, SWITCHED, [ASK, ANSWER], **args)[1]
    assert supervised_texts(tokenizer, sample) == ["Grey.<|im_end|>"]  # the prompt has the <think>
    assert not notes_of(builder)
    tokenizer.save(tmp_path / "out", template.exported)
    exported = load_tokenizer(str(tmp_path / "out"))
    again = load_template(None, exported)
    assert again.ask([ASK]) == template.ask([ASK])
    assert again.ask([ASK]).endswith("<think>")
    other = load_template(None, exported, {"enable_thinking": False})
    assert other.ask([ASK]) == load_template(str(path), tokenizer).ask([ASK])
    assert template.decides != load_template(str(path), tokenizer).decides


@pytest.mark.parametrize(
    ("args", "says"),
    [({"enable_thinkng": True}, "it has:  enable_thinking"), ({"messages": []}, "Leave it out")],
)
def test_an_argument_that_the_template_does_not_have_is_refused(args, says, tokenizer, tmp_path):
    path = tmp_path / "switched.jinja"
    path.write_text(SWITCHED)
    with pytest.raises(UserError, match=r"data\.template_args") as error:
        load_template(str(path), tokenizer, args)
    assert says in str(error.value)


def test_the_date_that_a_template_is_told_is_fixed_and_can_be_set(tokenizer, tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text("{{ strftime_now('%d %B %Y') }}")
    assert load_template(str(path), tokenizer).render([]) == "26 July 2024"
    dated = load_template(str(path), tokenizer, today="2025-01-31")
    assert dated.render([]) == "31 January 2025"
    assert dated.decides != load_template(str(path), tokenizer).decides
    with pytest.raises(UserError, match=r"data\.template_date=tomorrow"):
        load_template(str(path), tokenizer, today="tomorrow")


ONLY_LAST_THINKS = template_of(
    (
        "m.role == 'assistant' and m.reasoning_content and loop.last",
        "{{- '<|im_start|>assistant\\n[' + m.reasoning_content + ']' + m.content + '<|im_end|>' }}",
    )
)


def test_samples_that_begin_others_of_their_conversation_are_merged_with_them(tokenizer):
    template = Template("last", ONLY_LAST_THINKS, tokenizer.special)
    plain = turn("assistant", "a")
    chat = [ASK, plain, ASK, THINKING, ASK, plain, ASK, plain]
    samples, builder = samples_of(tokenizer, row_of(chat), template)
    assert [supervised_texts(tokenizer, sample) for sample in samples] == [
        ["a<|im_end|>", "[Look up.]Grey.<|im_end|>"],
        ["a<|im_end|>", "a<|im_end|>"],
    ]
    for sample, end in zip(samples, (4, 8), strict=True):
        assert sample.tokens.tolist() == rendered(tokenizer, ONLY_LAST_THINKS, chat[:end])[1]
    assert builder.counts["rewritten"] == 1


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("messages[0].content", "hello"),
        ("messages[0].content.upper()", "HELLO"),
        ("messages[0].content.split('l') | length", "3"),
        ("'{} there'.format(messages[0].content)", "hello there"),
        ("messages[0].absent is defined", "False"),
        ("messages[0].absent", ""),
        ("messages[0]['role']", "user"),
        ("messages[0].items() | length", "2"),
        ("namespace(a=1).a", "1"),
        ("namespace(a=1).b is defined", "False"),
    ],
)
def test_a_template_reads_turns_and_texts_as_in_jinja(expression, text):
    template = Template("t", "{{ " + expression + " }}", SPECIAL)
    assert template.render([{"role": "user", "content": "hello"}]) == text


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__.__mro__",
        "messages[0].content.__class__.__mro__",
        "messages[0].update(role='system')",
        "'{0.__class__.__mro__}'.format(messages)",
        "namespace.__init__.__globals__",
    ],
)
def test_a_template_cannot_leave_the_sandbox(expression):
    template = Template("t", "{{ " + expression + " }}", SPECIAL)
    with pytest.raises(RecordError):
        template.render([{"role": "user", "content": "hello"}])


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
