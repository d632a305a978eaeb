"""Tool calls in the text of an answer, in the formats of known families. Imports no torch."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.rl.environments.argument_types import Texts, refuse_constant, typed_arguments
from fsdp_trainer.rl.reasoning import split_reasoning

NO_JSON = "is not valid JSON"


class WrongCall(ValueError):
    """A tool call that cannot be read; its text is an answer to the model."""


@dataclass
class ParsedAnswer:
    """An answer in parts.

    content: the text outside of calls, with the reasoning. calls: tool calls in OpenAI's format,
    with arguments as objects. problem: the reason why the calls cannot be made; then there are
    none.
    """

    content: str
    calls: list[Json] = field(default_factory=list)
    problem: str | None = None

    @property
    def message(self) -> Json:
        turn: Json = {"role": "assistant", "content": self.content}
        return turn | ({"tool_calls": self.calls} if self.calls else {})


Named = tuple[str, Any]
"""Name and arguments of a call, the latter as an object or as its JSON."""
Found = tuple[str, list[Named]]
"""Text outside of calls, and the calls."""


class CallFormat(NamedTuple):
    """A format of tool calls. marks: texts of which a chat template with this format has one.

    parse: reads an answer without its reasoning. call: begin and end of a call.
    """

    marks: tuple[str, ...]
    parse: Callable[[str], Found]
    call: tuple[str, str] | None = None


def parse_answer(
    text: str,
    form: CallFormat,
    tools: Sequence[Json] | None,
    prompt: str = "",
) -> ParsedAnswer:
    """Return the parts of an answer. text: with special tokens, without the stop token.

    tools: descriptions of the tools there are; without any nothing is a call. prompt: the end of
    what the model read, which may begin its reasoning. What the reasoning says of calls makes none.
    Of several calls with one wrong none is returned.
    """
    thought, rest = split_reasoning(text, form.call, prompt)
    try:
        content, named = form.parse(rest)
        calls = [checked(i, *each, tools or []) for i, each in enumerate(named)]
    except WrongCall as error:
        return ParsedAnswer(text.strip(), problem=str(error) if tools else None)
    return ParsedAnswer((thought + content).strip(), calls)


def checked(i: int, name: Any, arguments: Any, tools: Sequence[Json]) -> Json:
    if not isinstance(name, str) or not name:
        raise WrongCall("a tool call needs a name")
    known = {each.get("function", each).get("name"): each.get("function", each) for each in tools}
    if name not in known:
        has = ", ".join(map(str, known)) or "none"
        raise WrongCall(f"there is no tool {name!r}. Tools: {has}")
    if isinstance(arguments, Texts):
        arguments = typed_arguments(arguments, known[name].get("parameters"))
    if isinstance(arguments, str):
        arguments = as_json(arguments.strip() or "{}", f"the arguments of {name}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise WrongCall(f"the arguments of {name} should be a JSON object")
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{i:05d}", "type": "function", "function": function}


def as_json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise WrongCall(f"{what} {NO_JSON}: {text.strip()[:100]}") from None


DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def of_object(value: Any) -> Named:
    """Return name and arguments of a call that is one JSON object. Raises WrongCall.

    Llama 3 calls the arguments parameters.
    """
    if not isinstance(value, dict):
        raise WrongCall("a tool call should be a JSON object")
    return value.get("name", ""), value.get("parameters", value.get("arguments", {}))


# --- formats --------------------------------------------------------------------------------------

CALL, CALL_END = "<tool_call>", "</tool_call>"
BARE_FUNCTION = re.compile(r"^[ \t]*<function=[^>\n]+>", re.MULTILINE)
FUNCTION = re.compile(r"<function=([^>\n]*)>\s*")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?")
PARAMETER_END = re.compile(
    r"\n?</parameter>\s*(?=<parameter=|</function>\s*(?:<function=|</tool_call>))"
)
FUNCTION_END = "</function>"
GLM_NAME = re.compile(r"([\w.-]+)\s*(?=<arg_key>|</tool_call>)")
GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)",
    re.DOTALL,
)
BETWEEN_CALLS = " ,\n\t\r"


def hermes(text: str) -> Found:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or XML of Qwen3-Coder or GLM.

    One <tool_call> may have several calls, one after the other or as a list.
    """
    content: list[str] = []
    calls: list[Named] = []
    while True:
        before, begins, text = text.partition(CALL)
        if CALL_END in before or BARE_FUNCTION.search(before):
            raise WrongCall(f"a {CALL_END} or <function=…> has no {CALL}")
        content.append(before)
        if not begins:
            return "".join(content).strip(), calls
        new, text = calls_in_tag(text)
        calls += new


def calls_in_tag(text: str) -> tuple[list[Named], str]:
    calls: list[Named] = []
    while True:
        text = text.lstrip(BETWEEN_CALLS)
        if text.startswith(CALL_END) and calls:
            return calls, text.removeprefix(CALL_END)
        if text.startswith("<function="):
            call, text = xml_call(text)
            calls.append(call)
            continue
        if name := GLM_NAME.match(text):
            call, text = glm_call(name, text)
            calls.append(call)
            continue
        if not text or (calls and CALL_END not in text):
            raise WrongCall(f"a {CALL} has no {CALL_END}")
        value, text = first_json(text, f"the text in {CALL}")
        calls += [of_object(each) for each in (value if isinstance(value, list) else [value])]


def first_json(text: str, what: str) -> tuple[Any, str]:
    """Return the value of the JSON at the begin of a text, and the rest. Raises WrongCall."""
    try:
        value, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        raise WrongCall(f"{what} {NO_JSON}: {text.partition(CALL_END)[0].strip()[:100]}") from None
    return value, text[end:]


def glm_call(name: re.Match[str], text: str) -> tuple[Named, str]:
    """Return the call of `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, and the rest."""
    values, place = Texts(), name.end()
    while argument := GLM_ARGUMENT.match(text, place):
        values[argument[1].strip()] = argument[2]
        place = argument.end()
    if not text.startswith(CALL_END, place):
        raise WrongCall(f"an argument of {name[1]} has no key, no value or no end")
    return (name[1], values), text[place:]


def xml_call(text: str) -> tuple[Named, str]:
    """Return the call of `<function=NAME><parameter=KEY>VALUE</parameter></function>` and the rest.

    A value may hold the marks, as code does: only an end before another mark ends it.
    """
    function = FUNCTION.match(text)
    if not function:
        raise WrongCall("a <function=…> has no >")
    values, place = Texts(), function.end()
    while parameter := PARAMETER.match(text, place):
        end = PARAMETER_END.search(text, parameter.end())
        if not end:
            raise WrongCall(f"a {parameter[0].strip()} has no </parameter> or no {FUNCTION_END}")
        values[parameter[1].strip()] = text[parameter.end() : end.start()]
        place = end.end()
    if not text.startswith(FUNCTION_END, place):
        raise WrongCall(f"a {function[0].strip()} has no {FUNCTION_END} after its parameters")
    return (function[1].strip(), values), text[place + len(FUNCTION_END) :]


PYTHON_TAG = "<|python_tag|>"


CALL_BEGIN = re.compile(r'[\[\s]*\{\s*"')
ARGUMENTS = "parameters", "arguments"


def llama3(text: str) -> Found:
    """Read `{"name": …, "parameters": {…}}`, several of them divided by `;`.

    Other JSON is an answer.
    """
    before, is_marked, body = text.partition(PYTHON_TAG)
    if not is_marked:
        before, body = "", text
    if not is_marked and not is_call_like(body.strip()):
        return text.strip(), []
    values: list[Any] = []
    while body := body.lstrip(" ;\n\t"):
        value, body = first_json(body, "the tool call")
        values += value if isinstance(value, list) else [value]
    if not (is_marked or all(is_call(value) for value in values)):
        return text.strip(), []
    return before.strip(), [of_object(value) for value in values]


def is_call_like(text: str) -> bool:
    """Return True for a text that begins with a call, or is JSON like one that is cut or wrong."""
    if not CALL_BEGIN.match(text):
        return False
    try:
        value = DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return '"name"' in text and any(f'"{name}"' in text for name in ARGUMENTS)
    return all(map(is_call, value if isinstance(value, list) else [value]))


def is_call(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    arguments = [value[name] for name in ARGUMENTS if name in value]
    return any(
        each.lstrip().startswith("{")
        if isinstance(each, str)
        else each is None or isinstance(each, dict)
        for each in arguments
    )


MISTRAL = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = re.compile(r"\[ARGS\]|(?=\{)")


def mistral(text: str) -> Found:
    """Read `[TOOL_CALLS] [{"name": …, "arguments": …}]`, or `[TOOL_CALLS]NAME[ARGS]{…}`."""
    content, begins, body = text.partition(MISTRAL)
    calls: list[Named] = []
    while begins:
        body = body.strip()
        if body.startswith(("[", "{")):
            value, body = first_json(body, f"what follows {MISTRAL}")
            calls += [of_object(each) for each in (value if isinstance(value, list) else [value])]
        else:
            arguments = MISTRAL_ARGUMENTS.search(body)
            if not arguments:
                raise WrongCall(f"what follows {MISTRAL} should be a name and JSON arguments")
            name = body[: arguments.start()].partition("[CALL_ID]")[0].strip()
            values, body = first_json(body[arguments.end() :].lstrip(), f"the arguments of {name}")
            calls.append((name, values))
        after, begins, body = body.partition(MISTRAL)
        content += after
    return content.strip(), calls


PYTHONIC, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"


def pythonic(text: str) -> Found:
    """Read LFM2's `<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>`."""
    content, *parts = text.split(PYTHONIC)
    calls: list[Named] = []
    for part in parts:
        body, is_whole, after = part.partition(PYTHONIC_END)
        if not is_whole:
            raise WrongCall(f"a {PYTHONIC} has no {PYTHONIC_END}")
        calls += python_calls(body.strip())
        content += after
    return content.strip(), calls


def python_calls(text: str) -> Iterator[Named]:
    """Yield the calls in a Python list of calls with constants by name. Raises WrongCall."""
    try:
        listed = ast.parse(text, mode="eval").body
        for call in listed.elts if isinstance(listed, ast.List) else [listed]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError
            words = JsonWords()
            values = {k.arg: ast.literal_eval(words.visit(k.value)) for k in call.keywords}
            if None in values:  # **{…}
                raise ValueError
            # bytes, sets and infinity are no arguments
            yield ast.unparse(call.func), json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
        raise WrongCall(
            f"the text in {PYTHONIC} is no list of calls such as [NAME(KEY=VALUE)]: {text[:100]}"
        ) from None


JSON_WORDS = {"true": True, "false": False, "null": None}


class JsonWords(ast.NodeTransformer):
    """Replaces JSON's words in Python's syntax, which models mix, by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node


KIMI_CALLS, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*")


def kimi(text: str) -> Found:
    """Read Kimi K2's `functions.NAME:0<|tool_call_argument_begin|>{…}`."""
    content, begins, body = text.partition(KIMI_CALLS)
    if not begins:
        if KIMI_CALL in text:
            raise WrongCall(f"a tool call needs {KIMI_CALLS} before it")
        return content.strip(), []
    body, _, after = body.partition(KIMI_END)
    calls: list[Named] = []
    for part in body.split(KIMI_CALL)[1:]:
        header, has_arguments, rest = part.partition(KIMI_ARGUMENTS)
        arguments, is_whole, _ = rest.partition(KIMI_CALL_END)
        name = KIMI_NAME.fullmatch(header)
        if not (has_arguments and is_whole and name):
            raise WrongCall("a tool call is not complete")
        calls.append((name[1], arguments))
    if not calls:
        raise WrongCall("a tool call is not complete")
    return (content + after).strip(), calls


DEEPSEEK_CALLS, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*(\S+)\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def deepseek(text: str) -> Found:
    """Read V3's `function<sep>NAME`, with arguments in a block, or V3.1's `NAME<sep>{…}`."""
    content, begins, body = text.partition(DEEPSEEK_CALLS)
    if not begins:
        if "<｜tool▁" in text:
            raise WrongCall(f"a tool call needs {DEEPSEEK_CALLS} before it")
        return content.strip(), []
    body, _, after = body.partition(DEEPSEEK_END)
    before, *parts = body.split(DEEPSEEK_CALL)
    rests = [before]
    calls: list[Named] = []
    for part in parts:
        call, is_whole, rest = part.partition(DEEPSEEK_CALL_END)
        first, separator, second = call.partition(DEEPSEEK_SEPARATOR)
        if not (is_whole and separator):
            raise WrongCall("a tool call is not complete")
        rests.append(rest)
        fenced = FENCED.fullmatch(second)
        calls.append((fenced[1], fenced[2]) if fenced else (first.strip(), second))
    if not calls or any("<｜tool▁" in rest for rest in rests):
        raise WrongCall("a tool call is not complete")
    return (content + after).strip(), calls


CHANNEL = "<|channel|>"
MESSAGE = re.compile(
    r"<\|channel\|>(?P<channel>\w+)(?P<to>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
END = re.compile(r"<\|(?:end|call|return)\|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def messages_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the channel of each message of GPT-OSS, what may name its recipient, and its text.

    Takes time in proportion to the text, whatever the text is.
    """
    begin = 0
    while (at := text.find(CHANNEL, begin)) >= 0:
        message = MESSAGE.match(text, at)
        if not message:
            begin = at + 1
            continue
        before = text[max(begin, text.rfind("<", begin, at) + 1) : at]
        end = END.search(text, message.end())
        last = end.start() if end else len(text)
        yield message["channel"], before + message["to"], text[message.end() : last]
        begin = end.end() if end else last


def gpt_oss(text: str) -> Found:
    """Read GPT-OSS's channels: calls are messages to functions, the answer is in `final`.

    A message of the analysis is none, whomever it names.
    """
    content, calls, outside = [], [], text
    for channel, header, body in messages_of(text):
        outside = outside.replace(body, "", 1)
        recipient = RECIPIENT.search(header)
        if recipient and channel != "analysis":
            calls.append((recipient[1], body))
        elif channel == "final":
            content.append(body)
    if not calls and not content and "to=functions" in outside:
        raise WrongCall("a tool call needs <|channel|>commentary and <|message|>")
    if CHANNEL not in text:
        content.append(text)
    return "\n".join(content).strip(), calls


FORMATS = {
    "gpt_oss": CallFormat((CHANNEL,), gpt_oss),
    "deepseek": CallFormat((DEEPSEEK_CALLS,), deepseek, (DEEPSEEK_CALL, DEEPSEEK_CALL_END)),
    "pythonic": CallFormat((PYTHONIC,), pythonic, (PYTHONIC, PYTHONIC_END)),
    "kimi": CallFormat((KIMI_CALLS,), kimi, (KIMI_CALL, KIMI_CALL_END)),
    "mistral": CallFormat((MISTRAL,), mistral),
    "hermes": CallFormat((CALL,), hermes, (CALL, CALL_END)),
    "llama3": CallFormat((PYTHON_TAG, '"parameters": '), llama3),
}
"""By name, in the order in which a template's marks are looked for."""


def format_of(template: str) -> CallFormat:
    """Return the format of the calls that a chat template writes; Hermes' if it writes none."""
    named = (form for form in FORMATS.values() if any(mark in template for mark in form.marks))
    return next(named, FORMATS["hermes"])
