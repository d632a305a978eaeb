"""Environments: what their tools answer, which are refused, and how long they may take."""

import asyncio
import os
import re
import time

import pytest
import yaml
from folders import table
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refusal
from tables import rows
from texts import function, turn

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.rl.environments.bounded_calls import TookTooLong, call_all
from fsdp_trainer.rl.environments.calculator import Calculator
from fsdp_trainer.rl.environments.environment import row_of
from fsdp_trainer.rl.environments.known_environments import environment_problems, find_environment
from fsdp_trainer.rl.environments.tool_calls import FORMATS, format_of, parse_answer
from fsdp_trainer.rl.rollouts.episode_player import unread_call

QUESTION = {"row": {"turns": ["why?", "bye"]}, "tools": None, "reference": None}
QUESTION |= {"messages": [turn("user", "hi")]}


def called(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


def answer(*calls, content=""):
    return turn("assistant", content, tool_calls=[*calls])


def say(environment, name, **arguments):
    """Return what an environment's tool answers."""
    turns, is_over = environment.step([answer(called(name, **arguments))])
    assert not is_over
    return turns[0]["content"]


EXPRESSIONS = rows("""
(3 + 4) * 12 → 84
7 / 2 → 3.5
2^10 - -1 → 1025
8 / 4 → 2
10 // 3 % 2 → 1
1 / 0 → error: division by zero
9 ** 9 ** 9 → error: the power is too large
__import__('os') → error: only numbers, + - * / // % ** and parentheses are known
(-8) ** 0.5 → error: the power is no real number
1 + → error: invalid syntax (<unknown>, line 1)
""")
TOO_LONG = "1" * 300, "error: an expression has at most 200 characters"


@pytest.mark.parametrize("expression, value", [*EXPRESSIONS, TOO_LONG])
def test_the_calculator_computes_arithmetic_and_nothing_else(expression, value):
    assert say(Calculator(), "calculator", expression=expression) == value


def test_a_tool_without_its_argument_answers_with_an_error():
    assert "takes one argument" in say(Calculator(), "calculator", sum="1+1")
    assert Calculator().step([answer(content="84")]) == ([], True)


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


def test_python_that_takes_too_long_is_ended():
    environment = find_environment({"name": "python", "seconds": 0.5}).make()
    environment.reset(row_of(QUESTION))
    assert "was ended" in say(environment, "python", code="while True: pass")


def test_search_finds_the_passage_with_the_rarest_words(tmp_path):
    (tmp_path / "a.txt").write_text("The cat sat.\n\nThe dog ran to the harbour.\n\nThe end.")
    (tmp_path / "b.md").write_text("The harbour is old. The harbour is large.")
    (tmp_path / "c.txt").write_text("A lamp stands on a table in a hall.\n\nA lamp.")
    environment = find_environment({"name": "search", "folder": str(tmp_path), "results": 2}).make()
    environment.reset(row_of(QUESTION))
    passages = say(environment, "search", query="Dog at the harbour?").split("\n\n")
    assert passages == [
        "a.txt: The dog ran to the harbour.",
        "b.md: The harbour is old. The harbour is large.",
    ]
    assert say(environment, "search", query="lamp").startswith("c.txt: A lamp.\n"), "short first"
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


WRONG = rows("""
calculater → Did you mean  calculator
search → folder is required
own.py:Good → own.py is no file
{name: calculator, level: 3} → is no option of calculator
{name: python, seconds: soon} → seconds
{level: 3} → lacks a name
""")


@pytest.mark.parametrize("entry, part", WRONG)
def test_a_wrong_environment_is_refused_before_any_code_runs(entry, part):
    [problem] = environment_problems(yaml.safe_load(entry))
    assert part in problem


@pytest.mark.parametrize(
    "name, text",
    rows("""
None → has no None
Bare → no step
Good → ZeroDivisionError
"""),
)
def test_a_file_without_an_environment_says_what_it_lacks(tmp_path, name, text):
    file = tmp_path / "own.py"
    file.write_text(OWN if name != "Good" else OWN + "1 / 0")
    assert text in refusal(find_environment, f"{file}:{name}")


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
ARGUMENTS = '{"expression": "1+1"}'
CASES = table("rl/tool_calls.yaml")
RIGHT, BROKEN = CASES["right"], CASES["broken"]
MARKS = re.compile(r"<[^<>\n]+>|\[[A-Z_]+\]|[^<\[]+")
WHOLE = [text for texts in RIGHT.values() for text in texts]
PARTS = sorted({part for text in WHOLE for part in MARKS.findall(text)})
"""The marks of all formats, and the texts between them."""


@pytest.mark.parametrize("form", RIGHT)
def test_calls_of_each_format_are_read_in_order(form):
    two = CASES["two"][form]
    for text in [*RIGHT[form], two]:
        parsed = parse_answer(text, FORMATS[form], TOOLS)
        assert parsed.problem is None, text
        for number, call in enumerate(parsed.calls):
            assert call["id"] == f"call{number:05d}"
            assert call["function"] == {"name": "calculator", "arguments": {"expression": "1+1"}}
        assert len(parsed.calls) == 1 + (text == two), text
    parsed = parse_answer(" It is 2.", FORMATS[form], TOOLS)
    assert (parsed.content, parsed.calls, parsed.problem) == ("It is 2.", [], None)


@pytest.mark.parametrize("form", BROKEN)
def test_of_calls_that_cannot_be_read_none_is_made(form):
    for text in [*BROKEN[form], RIGHT[form][0].replace("calculator", "rocket")]:
        parsed = parse_answer(text, FORMATS[form], TOOLS)
        assert parsed.calls == [], text
        assert parsed.problem, text


PIECES = [*WHOLE, *PARTS, ARGUMENTS, *'{}[]",;5', "null", "name", "\n"]


@settings(max_examples=500)
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


@pytest.mark.parametrize("case", CASES["reasoned"])
def test_only_calls_outside_of_the_reasoning_are_made(case):
    assert values_of(case["text"], case["form"], prompt=case["prompt"]) == case["values"]


def xml_of(value, name="x"):
    return f"<function=probe>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n"


@pytest.mark.parametrize("name", CASES["typed"])
def test_arguments_in_xml_have_the_types_of_transformers(name):
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    schema, texts = CASES["typed"][name]
    properties = {"type": "object", "properties": {"x": schema}}
    tools = [function("probe", parameters=properties)]
    block = f"<tool_call>\n{''.join(map(xml_of, texts))}</tool_call>"
    parsed = parse_answer(block, FORMATS["hermes"], tools)
    values = [call["function"]["arguments"]["x"] for call in parsed.calls]
    expected = [chat_parsing._coerce(text, chat_parsing._schema_types(schema)) for text in texts]
    if name == "a":  # NaN is not JSON
        expected[2] = "[NaN]"
    assert [(value, type(value)) for value in values] == [(e, type(e)) for e in expected]


def test_types_that_a_schema_names_elsewhere_are_found():
    parameters = yaml.safe_load("""
    properties:
      x: {$ref: '#/$defs/Size'}
      e: {enum: ['1', '2']}
      f: {const: 1}
      h: {anyOf: 5, enum: 5}
    additionalProperties: {type: integer}
    $defs: {Size: {type: integer}}
    """)
    tools = [function("probe", parameters=parameters)]
    text = "<tool_call>" + "".join(xml_of("1", name) for name in "xefgh") + "</tool_call>"
    calls = parse_answer(text, FORMATS["hermes"], tools).calls
    values = [value for call in calls for value in call["function"]["arguments"].values()]
    assert values == [1, "1", 1, 1, "1"]


@pytest.mark.parametrize("case", CASES["in one block"])
def test_calls_in_one_block_and_marks_in_their_arguments_are_kept(case):
    assert values_of(case["text"]) == case["values"]


@pytest.mark.parametrize("text", CASES["json"])
def test_an_answer_in_json_is_no_call(text):
    parsed = parse_answer(text, FORMATS["llama3"], TOOLS)
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


@pytest.mark.parametrize("form", RIGHT)
def test_the_longest_answers_are_read_in_a_moment(form):
    """Time that grows with the square of the length would be minutes for each of them."""
    for begin in ("", "<tool_call><function=a>", "<｜tool▁calls▁begin｜>", "[TOOL_CALLS] {"):
        for piece in CASES["repeated"]:
            parse_answer(begin + piece * (LONG // len(piece)), FORMATS[form], TOOLS)


def test_the_format_is_that_of_the_chat_template():
    marks = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes", "<|python_tag|>": "llama3"}
    marks |= {"<|channel|>": "gpt_oss", "<｜tool▁calls▁begin｜>": "deepseek", "": "hermes"}
    for mark, name in marks.items():
        assert format_of("{{ x }}" + mark) is FORMATS[name]
