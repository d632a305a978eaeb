"""Environments: what their tools answer, which are refused, and how long they may take."""

import asyncio
import json
import os
import re
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.environments.bounded_calls import TookTooLong, call_all
from fsdp_trainer.rl.environments.calculator import Calculator
from fsdp_trainer.rl.environments.environment import row_of
from fsdp_trainer.rl.environments.known_environments import environment_problems, find_environment
from fsdp_trainer.rl.environments.tool_calls import FORMATS, format_of, parse_answer
from fsdp_trainer.rl.rollouts.episode_player import unread_call

QUESTION = {"row": {"turns": ["why?", "bye"]}, "tools": None, "reference": None}
QUESTION |= {"messages": [{"role": "user", "content": "hi"}]}


def called(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


def answer(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def say(environment, name, **arguments):
    """Return what an environment's tool answers."""
    turns, is_over = environment.step([answer(called(name, **arguments))])
    assert not is_over
    return turns[0]["content"]


@pytest.mark.parametrize(
    "expression, value",
    [
        ("(3 + 4) * 12", "84"),
        ("7 / 2", "3.5"),
        ("2^10 - -1", "1025"),
        ("8 / 4", "2"),
        ("10 // 3 % 2", "1"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: the power is too large"),
        ("__import__('os')", "error: only numbers, + - * / // % ** and parentheses are known"),
        ("(-8) ** 0.5", "error: the power is no real number"),
        ("1 +", "error: invalid syntax (<unknown>, line 1)"),
        ("1" * 300, "error: an expression has at most 200 characters"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression, value):
    assert say(Calculator(), "calculator", expression=expression) == value


def test_a_tool_without_its_argument_answers_with_an_error():
    assert "takes one argument" in say(Calculator(), "calculator", sum="1+1")
    assert Calculator().step([answer(content="84")]) == ([], True)


@pytest.mark.slow
def test_python_keeps_names_between_calls_and_shows_values_prints_and_errors():
    environment = find_environment("python").make()
    environment.reset(row_of(QUESTION))
    for code, said in (
        ("import math\nx = 20\nprint('once')", "once"),
        ("x += 1; x", "21"),
        ("x += 1\n1 / 0", "ZeroDivisionError: division by zero"),
        ("math.sqrt(x + 4)", "5.0"),
        ("y = 1", "(no output)"),
    ):
        assert say(environment, "python", code=code) == said
    assert "Error" in say(environment, "python", code="open('/tmp/f', 'w')")
    assert len(say(environment, "python", code="print('a' * 10**5)")) < 1000
    environment.reset(row_of(QUESTION))
    assert say(environment, "python", code="x") == "NameError: name 'x' is not defined"


@pytest.mark.slow
def test_python_that_takes_too_long_is_ended():
    environment = find_environment({"name": "python", "seconds": 0.5}).make()
    environment.reset(row_of(QUESTION))
    assert "was ended" in say(environment, "python", code="while True: pass")


def test_search_finds_the_passage_with_the_rarest_words(tmp_path):
    (tmp_path / "a.txt").write_text("The cat sat.\n\nThe dog ran to the harbour.\n\nThe end.")
    (tmp_path / "b.md").write_text("The harbour is old. The harbour is large.")
    environment = find_environment({"name": "search", "folder": str(tmp_path), "results": 2}).make()
    environment.reset(row_of(QUESTION))
    passages = say(environment, "search", query="Dog at the harbour?").split("\n\n")
    assert passages == [
        "a.txt: The dog ran to the harbour.",
        "b.md: The harbour is old. The harbour is large.",
    ]
    assert say(environment, "search", query="zebra") == "nothing was found"


def test_the_user_answers_with_the_texts_of_the_row_and_then_leaves():
    environment = find_environment("user").make()
    row = row_of(QUESTION)
    with pytest.raises(ValueError, match="no list of texts in 'turns'"):
        environment.reset({**row, "turns": "why?"})
    assert environment.reset(row) == (QUESTION["messages"], None)
    replies = [environment.step([]) for _ in range(3)]
    assert [turns[0]["content"] for turns, _ in replies[:2]] == ["why?", "bye"]
    assert [is_over for _, is_over in replies] == [False, False, True]


OWN = """
class Good:
    def __init__(self, level=1): self.level = level
    def reset(self, row): return row["messages"], None
    def step(self, messages): return [], True
    def reward(self, messages): return self.level
class Bare:
    def reset(self, row): return row["messages"], None
"""


def test_an_environment_of_ones_own_is_a_class_in_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    spec = find_environment({"name": f"{file}:Good", "level": 3})
    assert spec.make().reward([]) == 3
    assert (spec.title, spec.rewards, spec.file) == ("Good", True, file)
    assert str(file) in spec.about


WRONG = {
    "calculater": "Did you mean  calculator",
    "search": "folder is required",
    "own.py:Good": "own.py is no file",
    "{name: calculator, level: 3}": "is no option of calculator",
    "{name: python, seconds: soon}": "seconds",
    "{level: 3}": "lacks a name",
}


@pytest.mark.parametrize("entry", WRONG)
def test_a_wrong_environment_is_refused_before_any_code_runs(entry):
    [problem] = environment_problems(yaml.safe_load(entry))
    assert WRONG[entry] in problem


@pytest.mark.parametrize(
    "name, text", [("None", "has no None"), ("Bare", "no step"), ("Good", "cannot be imported")]
)
def test_a_file_without_an_environment_says_what_it_lacks(tmp_path, name, text):
    file = tmp_path / "own.py"
    file.write_text(OWN if name != "Good" else "1 / 0")
    with pytest.raises(UserError) as error:
        find_environment(f"{file}:{name}")
    assert text in str(error.value)


# --- calls side by side ---------------------------------------------------------------------------


def test_calls_return_values_errors_and_awaited_values_in_order():
    async def later():
        await asyncio.sleep(0)
        return "later"

    def fails():
        raise KeyError("lost")

    results = call_all([lambda: 1, later, fails, lambda: None], 2, 60.0)
    assert results[:2] == [1, "later"]
    assert isinstance(results[2], KeyError)
    assert results[3] is None


def test_a_call_that_hangs_holds_up_no_other_and_is_given_up():
    async def never():
        await asyncio.Event().wait()

    async def quick():
        return "quick"

    reading, writing = os.pipe()  # nothing is ever written
    results = call_all([lambda: os.read(reading, 1), never, quick, lambda: 4], 2, 3.0)
    assert [type(each) for each in results] == [TookTooLong, TookTooLong, str, int]
    os.close(writing)


def test_no_more_calls_are_made_at_once_than_allowed():
    running, counts = [], []

    def call():
        running.append(1)
        counts.append(len(running))
        time.sleep(0.01)
        running.pop()

    call_all([call] * 12, 3, 60.0)
    assert len(counts) == 12
    assert max(counts) <= 3


# --- tool calls in answers ------------------------------------------------------------------------

TOOLS = [*Calculator.tools]
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n%s\n```"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>%s"
END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ARGUMENTS = '{"expression": "1+1"}'
CALL = '{"name": "calculator", "arguments": %s}'
RIGHT = {
    "hermes": [
        f"<tool_call>\n{CALL % ARGUMENTS}\n</tool_call>",
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "pythonic": ["<|tool_call_start|>[calculator(expression='1+1')]<|tool_call_end|>"],
    "llama3": [
        '{"name": "calculator", "parameters": {"expression": "1+1"}}',
        '<|python_tag|>{"name": "calculator", "parameters": {"expression": "1+1"}}',
        '{"parameters": {"expression": "1+1"}, "name": "calculator"}',
    ],
    "mistral": [
        f"[TOOL_CALLS] [{CALL % ARGUMENTS}]",
        f"[TOOL_CALLS]calculator[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS] {CALL % ARGUMENTS}",
        f"[TOOL_CALLS]calculator[CALL_ID]abc[ARGS]{ARGUMENTS}",
    ],
    "deepseek": [V3 % ARGUMENTS + END, V31 % ARGUMENTS + END],
    "gpt_oss": [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.calculator <|constrain|>json<|message|>{ARGUMENTS}",
        "<|start|>assistant to=functions.calculator<|channel|>commentary json"
        f"<|message|>{ARGUMENTS}",
    ],
}


MARKS = re.compile(r"<[^<>\n]+>|\[[A-Z_]+\]|[^<\[]+")
WHOLE = [text for texts in RIGHT.values() for text in texts]
PARTS = sorted({part for text in WHOLE for part in MARKS.findall(text)})
"""The marks of all formats, and the texts between them."""


TWO = {
    "hermes": RIGHT["hermes"][0] * 2,
    "kimi": RIGHT["kimi"][0].replace("<|tool_calls_section_end|>", "")
    + RIGHT["kimi"][0].removeprefix("<|tool_calls_section_begin|>"),
    "pythonic": "<|tool_call_start|>[{0}, {0}]<|tool_call_end|>".format(
        "calculator(expression='1+1')"
    ),
    "llama3": "; ".join([RIGHT["llama3"][0]] * 2),
    "mistral": f"[TOOL_CALLS] [{CALL % ARGUMENTS}, {CALL % ARGUMENTS}]",
    "deepseek": (V31 % ARGUMENTS) + "<｜tool▁call▁end｜>"
    + (V31 % ARGUMENTS).partition("begin｜>")[2] + END,
    "gpt_oss": "<|end|>".join([RIGHT["gpt_oss"][1]] * 2),
}  # fmt: skip


@pytest.mark.parametrize("form", RIGHT)
def test_calls_of_each_format_are_read_in_order(form):
    for text in [*RIGHT[form], TWO[form]]:
        parsed = parse_answer(text, FORMATS[form], TOOLS)
        assert parsed.problem is None, text
        for number, call in enumerate(parsed.calls):
            assert call["id"] == f"call{number:05d}"
            assert call["function"] == {"name": "calculator", "arguments": {"expression": "1+1"}}
        assert len(parsed.calls) == 1 + (text == TWO[form]), text
    parsed = parse_answer(" It is 2.", FORMATS[form], TOOLS)
    assert (parsed.content, parsed.calls, parsed.problem) == ("It is 2.", [], None)


ANALYSIS = f"<|channel|>analysis to=functions.calculator<|message|>{ARGUMENTS}<|end|>"
BROKEN = {
    "hermes": [
        f"<tool_call>{CALL % ARGUMENTS}",
        '<tool_call>{"name": "calculator"</tool_call>',
        "<tool_call>[1]</tool_call>",
        f"{CALL % ARGUMENTS}</tool_call>",
        f"<tool_call>{CALL % ARGUMENTS}</tool_call><tool_call>{CALL % '3'}</tool_call>",
    ],
    "kimi": [RIGHT["kimi"][0].replace("<|tool_call_end|>", ""), "<|tool_call_begin|>x"],
    "pythonic": [
        "<|tool_call_start|>[calculator(f())]<|tool_call_end|>",
        "<|tool_call_start|>[calculator()",
        "<|tool_call_start|>[calculator(expression=b'1')]<|tool_call_end|>",
        "<|tool_call_start|>[calculator(**{'expression': '1'})]<|tool_call_end|>",
        "<|tool_call_start|>[calculator(expression=1e999)]<|tool_call_end|>",
    ],
    "llama3": ['{"name": "calculator", "parameters": {"expression": ', "<|python_tag|>1+1"],
    "mistral": ["[TOOL_CALLS] [{", "[TOOL_CALLS]calculator", "[TOOL_CALLS]calculator[ARGS]{1}"],
    "deepseek": [V3 % ARGUMENTS, V31 % "{1}" + END, "<｜tool▁call▁begin｜>calculator"],
    "gpt_oss": [
        "<|channel|>commentary to=functions.calculator <|message|>1+",
        "<|channel|>analysis<|message|>hm<|end|><|channel|>commentary to=functions.calculator {}",
        ANALYSIS,
        "to=functions.calculator",
    ],
}


@pytest.mark.parametrize("form", BROKEN)
def test_of_calls_that_cannot_be_read_none_is_made(form):
    for text in [*BROKEN[form], RIGHT[form][0].replace("calculator", "rocket")]:
        parsed = parse_answer(text, FORMATS[form], TOOLS)
        assert parsed.calls == [], text
        assert parsed.problem, text


PIECES = [*WHOLE, *PARTS, ARGUMENTS, *'{}[]",;5', "null", "name", "\n"]


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*RIGHT]), st.lists(st.sampled_from(PIECES), max_size=6))
def test_any_text_is_an_answer_a_call_or_a_problem(form, pieces):
    parsed = parse_answer("".join(pieces), FORMATS[form], TOOLS)
    assert not (parsed.calls and parsed.problem)
    assert all(isinstance(call["function"]["arguments"], dict) for call in parsed.calls)


def values_of(text, form="hermes", tools=TOOLS, prompt=""):
    """The arguments `expression` of the calls in a text without a problem."""
    parsed = parse_answer(text, FORMATS[form], tools, prompt)
    assert parsed.problem is None, parsed
    return [call["function"]["arguments"].get("expression") for call in parsed.calls]


def test_calls_in_python_may_have_the_words_of_json():
    text = (
        "<|tool_call_start|>[calculator(expression=[true, {'a': null}, 'true'])]<|tool_call_end|>"
    )
    assert values_of(text, "pythonic") == [[True, {"a": None}, "true"]]


def calling(*values):
    return "".join(
        f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {json.dumps(value)}}}}}'
        "</tool_call>"
        for value in values
    )


REASONED = [
    ("hermes", f"<think>Perhaps {calling('1')}?</think>\n\n{calling('2')}", "", ["2"]),
    ("hermes", f"Perhaps {calling('1')}?</think>\n\n{calling('2')}", "", ["2"]),
    ("hermes", f"<think>{calling('1')}</think> <think>Or {calling('2')}</think> 4.", "", []),
    ("hermes", f"<think>Perhaps {calling('1')}", "", []),
    ("hermes", f"Perhaps {calling('1')}", "<|im_start|>assistant\n<think>\n", []),
    ("hermes", "<think>A <tool_call> is not needed.</think>\n\nThe answer is 4.", "", []),
    ("hermes", "A <tool_call> is not needed.</think>The answer is 4.", "", []),
    ("hermes", calling("</think>", "<think>", "</tool_call><tool_call>"), "",
     ["</think>", "<think>", "</tool_call><tool_call>"]),
    ("hermes", f"<think>a</think>{calling('</think>')}", "", ["</think>"]),
    ("mistral", f"[THINK]{RIGHT['mistral'][1]}[/THINK]{RIGHT['mistral'][0]}", "", ["1+1"]),
    ("llama3", f"<think>{RIGHT['llama3'][0]}</think>Done.", "", []),
    ("gpt_oss", f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>4", "", []),
]  # fmt: skip


@pytest.mark.parametrize("form, text, prompt, values", REASONED)
def test_only_calls_outside_of_the_reasoning_are_made(form, text, prompt, values):
    assert values_of(text, form, prompt=prompt) == values


TYPED = {
    "s": ({"type": "string"}, ["12345", "true", "null", "1e5", "NaN", "[1]", "", "  a  ", "a\nb"]),
    "i": ({"type": "integer"}, ["12", "-3", "3.0", "1.5", "NaN", "abc"]),
    "n": ({"type": "number"}, ["1.5", "3", "1e5", "NaN", "Infinity"]),
    "b": ({"type": "boolean"}, ["true", "False", "1", "maybe"]),
    "a": ({"type": "array"}, ["[1, 2]", '{"a": 1}', "[NaN]", "(1,)"]),
    "o": ({"type": "object"}, ['{"a": [1]}', "[1]"]),
    "z": ({"type": ["string", "null"]}, ["null", "None", "12"]),
    "y": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["null", "7"]),
    "u": ({}, ["12", "null"]),
}  # fmt: skip


def xml_of(value, name="x"):
    return f"<function=probe>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n"


@pytest.mark.parametrize("name", TYPED)
def test_arguments_in_xml_have_the_types_of_transformers(name):
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    schema, texts = TYPED[name]
    properties = {"type": "object", "properties": {"x": schema}}
    tools = [{"type": "function", "function": {"name": "probe", "parameters": properties}}]
    block = f"<tool_call>\n{''.join(map(xml_of, texts))}</tool_call>"
    parsed = parse_answer(block, FORMATS["hermes"], tools)
    values = [call["function"]["arguments"]["x"] for call in parsed.calls]
    expected = [chat_parsing._coerce(text, chat_parsing._schema_types(schema)) for text in texts]
    if name == "a":  # NaN is not JSON
        expected[2] = "[NaN]"
    assert [(value, type(value)) for value in values] == [(e, type(e)) for e in expected]


def test_types_that_a_schema_names_elsewhere_are_found():
    parameters = {
        "properties": {
            "x": {"$ref": "#/$defs/Size"},
            "e": {"enum": ["1", "2"]},
            "f": {"const": 1},
            "h": {"anyOf": 5, "enum": 5},
        },
        "additionalProperties": {"type": "integer"},
        "$defs": {"Size": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "probe", "parameters": parameters}}]
    text = "<tool_call>" + "".join(xml_of("1", name) for name in "xefgh") + "</tool_call>"
    calls = parse_answer(text, FORMATS["hermes"], tools).calls
    values = [value for call in calls for value in call["function"]["arguments"].values()]
    assert values == [1, "1", 1, 1, "1"]


CODE = 'print("</parameter>")\n</parameter>\n</function> <parameter=x> <tool_call>'


@pytest.mark.parametrize(
    "text, values",
    [
        (calling("1", "2").replace("</tool_call><tool_call>", "\n"), "12"),
        (f"<tool_call>[{CALL % ARGUMENTS}, {CALL % ARGUMENTS}]</tool_call>", ["1+1"] * 2),
        (RIGHT["hermes"][1].replace("1+1", CODE), [CODE]),
        (f"So: {calling('1')} and {calling('2')}", "12"),
        ('<tool_call>{"name": "calculator", "arguments": null}</tool_call>', [None]),
        (f"<tool_call>{CALL % json.dumps(ARGUMENTS)}</tool_call>", ["1+1"]),
    ],
)
def test_calls_in_one_block_and_marks_in_their_arguments_are_kept(text, values):
    assert values_of(text) == [*values]


@pytest.mark.parametrize(
    "text, tools",
    [
        ('{"name": "Ada", "age": 36}', TOOLS),
        ('{"name": "Ada", "parameters": "tall"}', TOOLS),
        ('{"people": [{"name": "Ada", "parameters": {}}], "n": 1}', TOOLS),
        ('[{"name": "calculator"}]', TOOLS),
        ('{"name": "Ada", "parameters": "tall"} is hers.', TOOLS),
        (RIGHT["llama3"][0], None),
    ],
)
def test_an_answer_in_json_is_no_call(text, tools):
    parsed = parse_answer(text, FORMATS["llama3"], tools)
    assert (parsed.content, parsed.calls, parsed.problem) == (text, [], None)


@pytest.mark.parametrize("form", RIGHT)
def test_without_tools_nothing_is_a_call_or_a_problem(form):
    for text in [*RIGHT[form], *BROKEN[form]]:
        parsed = parse_answer(text, FORMATS[form], None)
        assert (parsed.calls, parsed.problem) == ([], None), text


SHOWS_CALLS = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "call, unread",
    [
        ("<tool_call>{{ c.function | tojson }}</tool_call>", ""),
        (
            "<|call>{{ c.function.name }}:{{ c.function.arguments | tojson }}<call|>",
            '<|call>probed_call:{"probed_key": "probed_value"}<call|></s>',
        ),
    ],
)
def test_a_template_whose_calls_are_not_read_is_noticed(tmp_path, call, unread):
    file = tmp_path / "template.jinja"
    file.write_text(SHOWS_CALLS.replace("CALL", call))
    tokenizer = load_tokenizer("demo:bytes")
    turn_tokens = TurnTokens(load_template(str(file), tokenizer), tokenizer)
    form = format_of(file.read_text())
    assert unread_call(turn_tokens, form) == unread


def test_what_an_analysis_says_of_a_tool_is_no_call():
    text = "<|channel|>analysis<|message|>to=functions.calculator helps<|end|>"
    parsed = parse_answer(f"{text}<|channel|>final<|message|>2<|end|>", FORMATS["gpt_oss"], TOOLS)
    assert (parsed.content, parsed.calls, parsed.problem) == ("2", [], None)


LONG = 60_000
REPEATED = [
    "</think>", "<think>", "</parameter>", "<arg_key>", "<|tool_call_begin|>",
    "so on. ", "\n", "<", "<|channel|>", "<|channel|>a", "<|channel|>a<|message|>", "[TOOL_CALLS]",
    "<tool_call>", "<function=a>", "<parameter=a>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    '{"name" ',
]  # fmt: skip


@pytest.mark.parametrize("form", RIGHT)
def test_the_longest_answers_are_read_in_a_moment(form):
    """Time that grows with the square of the length would be minutes for each of them."""
    for begin in ("", "<tool_call><function=a>", "<｜tool▁calls▁begin｜>", "[TOOL_CALLS] {"):
        for piece in REPEATED:
            parse_answer(begin + piece * (LONG // len(piece)), FORMATS[form], TOOLS)


def test_the_format_is_that_of_the_chat_template():
    marks = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes", "<|python_tag|>": "llama3"}
    marks |= {"<|channel|>": "gpt_oss", "<｜tool▁calls▁begin｜>": "deepseek", "": "hermes"}
    for mark, name in marks.items():
        assert format_of("{{ x }}" + mark) is FORMATS[name]
