"""Tool calls in the text of an answer, in the formats of known families. Imports no torch."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NO_JSON = "is not valid JSON"


class WrongCall(ValueError):
    """A tool call that cannot be read; its text is an answer to the model."""


@dataclass
class ParsedAnswer:
    """An answer in parts.

    content: the text outside of calls. calls: tool calls in OpenAI's format, with arguments as
    objects. problem: the reason why the calls cannot be made; then there are none.
    """

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The turn in OpenAI's format."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        return turn | ({"tool_calls": self.calls} if self.calls else {})


Named = tuple[str, Any]
"""Name and arguments of a call, the latter as an object or as its JSON."""
Found = tuple[str, list[Named]]
"""Text outside of calls, and the calls."""


class CallFormat(NamedTuple):
    """A format of tool calls. marks: texts of which a chat template with this format has one."""

    marks: tuple[str, ...]
    parse: Callable[[str], Found]


def parse_answer(
    text: str, form: CallFormat, tools: Sequence[dict[str, Any]] | None
) -> ParsedAnswer:
    """Return the parts of an answer. text: with special tokens, without the stop token.

    tools: descriptions of the tools there are. Of several calls with one wrong none is returned.
    """
    try:
        content, named = form.parse(text)
        calls = [checked(i, *each, tools or []) for i, each in enumerate(named)]
    except WrongCall as error:
        return ParsedAnswer(text, problem=str(error))
    return ParsedAnswer(content, calls)


def checked(i: int, name: Any, arguments: Any, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a call in OpenAI's format. Raises WrongCall."""
    if not isinstance(name, str) or not name:
        raise WrongCall("a tool call needs a name")
    known = [each.get("function", each).get("name") for each in tools]
    if name not in known:
        has = ", ".join(map(str, known)) or "none"
        raise WrongCall(f"there is no tool {name!r}. Tools: {has}")
    if isinstance(arguments, str):
        arguments = as_json(arguments, f"the arguments of {name}")
    if not isinstance(arguments, dict):
        raise WrongCall(f"the arguments of {name} should be a JSON object")
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{i:05d}", "type": "function", "function": function}


def as_json(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises WrongCall."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise WrongCall(f"{what} {NO_JSON}: {text.strip()[:100]}") from None


def refuse_constant(name: str) -> Any:
    """Raise ValueError: NaN and Infinity are not JSON."""
    raise ValueError(name)


def of_object(value: Any) -> Named:
    """Return name and arguments of a call that is one JSON object. Raises WrongCall.

    Llama 3 calls the arguments parameters.
    """
    if not isinstance(value, dict):
        raise WrongCall("a tool call should be a JSON object")
    return value.get("name", ""), value.get("parameters", value.get("arguments", {}))


# --- formats --------------------------------------------------------------------------------------

HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
XML_NAME = re.compile(r"([^>\n]*)>")
XML_VALUE = re.compile(r"([^>\n]*)>\n?(.*)\Z", re.DOTALL)


def hermes(text: str) -> Found:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or Qwen3-Coder's XML in it."""
    calls = []
    for body, end in HERMES.findall(text):
        if not end:
            raise WrongCall("a <tool_call> has no </tool_call>")
        if "<function=" in body:
            calls.append(xml_call(body))
        else:
            calls.append(of_object(as_json(body, "the text in <tool_call>")))
    if not calls and "</tool_call>" in text:
        raise WrongCall("a </tool_call> has no <tool_call>")
    return HERMES.sub("", text).strip(), calls


def xml_call(text: str) -> Named:
    """Return the call of `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""
    inside, end, _ = text.partition("<function=")[2].partition("</function>")
    name = XML_NAME.match(inside)
    if not (end and name):
        raise WrongCall("a <function=…> has no </function>")
    values = {}
    rest = inside[name.end() :]
    while parameter := rest.partition("<parameter=")[2]:
        value, end, rest = parameter.partition("</parameter>")
        if end and (found := XML_VALUE.match(value)):
            values[found[1]] = loosely(found[2].removesuffix("\n"))
    return name[1].strip(), values


def loosely(text: str) -> Any:
    """Return the value of a JSON text; any other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


PYTHON_TAG = "<|python_tag|>"


def llama3(text: str) -> Found:
    """Read `{"name": …, "parameters": {…}}`, several of them divided by `;`."""
    body = text.removeprefix(PYTHON_TAG).strip()
    if PYTHON_TAG in body:
        before, _, body = body.partition(PYTHON_TAG)
        return before.strip(), [*llama3_calls(body.strip())]
    if not (body.startswith("{") and '"name"' in body):
        if text.startswith(PYTHON_TAG):
            raise WrongCall(f"what follows {PYTHON_TAG} should be a JSON object with a name")
        return text.strip(), []
    return "", [*llama3_calls(body)]


def llama3_calls(text: str) -> Iterator[Named]:
    """Yield the calls of JSON objects one after the other. Raises WrongCall."""
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            raise WrongCall(f"the tool call {NO_JSON}: {text[:100]}") from None
        yield of_object(value)
        text = text[end:].lstrip(" ;\n\t")


MISTRAL = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = re.compile(r"\[ARGS\]|(?=\{)")


def mistral(text: str) -> Found:
    """Read `[TOOL_CALLS] [{"name": …, "arguments": …}]`, or `[TOOL_CALLS]NAME[ARGS]{…}`."""
    content, *bodies = text.split(MISTRAL)
    calls: list[Named] = []
    for body in bodies:
        if body.strip().startswith("["):
            listed = as_json(body, f"what follows {MISTRAL}")
            calls += [of_object(each) for each in listed]
            continue
        name, *rest = MISTRAL_ARGUMENTS.split(body, maxsplit=1)
        if not rest:
            raise WrongCall(f"what follows {MISTRAL} should be a name and JSON arguments")
        calls.append((name.partition("[CALL_ID]")[0].strip(), rest[0]))
    return content.strip(), calls


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
    body = body.partition(DEEPSEEK_END)[0]
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
    return content.strip(), calls


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
        found = MESSAGE.match(text, at)
        if not found:
            begin = at + 1
            continue
        before = text[max(begin, text.rfind("<", begin, at) + 1) : at]
        end = END.search(text, found.end())
        last = end.start() if end else len(text)
        yield found["channel"], before + found["to"], text[found.end() : last]
        begin = end.end() if end else last


def gpt_oss(text: str) -> Found:
    """Read GPT-OSS's channels: calls are messages to functions, the answer is in `final`."""
    content, calls = [], []
    for channel, header, body in messages_of(text):
        recipient = RECIPIENT.search(header)
        if recipient:
            calls.append((recipient[1], body))
        elif channel == "final":
            content.append(body)
    if not calls and not content and "to=functions" in text:
        raise WrongCall("a tool call needs <|channel|>commentary and <|message|>")
    if not content and CHANNEL not in text:
        content.append(text)
    return "\n".join(content).strip(), calls


FORMATS = {
    "gpt_oss": CallFormat((CHANNEL,), gpt_oss),
    "deepseek": CallFormat((DEEPSEEK_CALLS,), deepseek),
    "mistral": CallFormat((MISTRAL,), mistral),
    "hermes": CallFormat(("<tool_call>",), hermes),
    "llama3": CallFormat((PYTHON_TAG, '"parameters": '), llama3),
}
"""By name, in the order in which a template's marks are looked for."""


def format_of(template: str) -> CallFormat:
    """Return the format of the calls that a chat template writes; Hermes' if it writes none."""
    named = (form for form in FORMATS.values() if any(mark in template for mark in form.marks))
    return next(named, FORMATS["hermes"])
