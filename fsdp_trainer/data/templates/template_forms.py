"""The forms in which chat templates read turns, and conversion of turns to them."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from fsdp_trainer.data.records.media import HELD, MARK
from fsdp_trainer.data.records.messages import Message

INLINE, PART = "inline", "part"
"""Reasoning in `<think>` tags within the content, or as a part of the content."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning", "tool_plan")
THINK_END = "</think>"
ID_FORMS: dict[str, tuple[str, re.Pattern[str]]] = {
    "any": ("call_{number}", re.compile(".+", re.DOTALL)),
    "nine letters": ("call{number:05}", re.compile("[a-zA-Z0-9]{9}")),
    "name and number": ("functions.{name}:{number}", re.compile(r"functions\.[^:]+:\d+")),
}
"""Formats of tool call ids that templates require: how to make one, and the pattern to match."""


@dataclass(frozen=True)
class Forms:
    """The forms in which one chat template reads the content of turns."""

    parts: bool = False
    """Content is a list of parts instead of a string."""
    system: str = "turn"
    """`turn`: shown; `prompt`: shown only if the last turn is the user's; `user`: not shown."""
    tools: bool = True
    """Descriptions of tools are shown."""
    arguments: str | None = "object"
    """Arguments of tool calls: `object`, or `text` with JSON; None: calls are not shown."""
    call_ids: str | None = None
    """A key of ID_FORMS; None: calls need no id."""
    empty_content: str | None = ""
    """Content of a turn with calls and no text."""
    results: str | None = "plain"
    """Tool results: `plain`; `ids`: with tool_call_id; `names`: with name too; None: not shown."""
    reasoning: str | None = "reasoning_content"
    """Key of an answer's reasoning, or INLINE, or PART; None: it is not shown."""
    call_reasoning: str | None = "reasoning_content"
    """The same for a turn with tool calls."""
    inline_thinking: bool = True
    """`<think>` within the content is shown."""

    @property
    def needs_ids(self) -> bool:
        return bool(self.call_ids) or self.results in ("ids", "names")


def convert_turns(
    messages: list[Message], forms: Forms, note: Callable[[str], Any] = lambda key: None
) -> list[Message]:
    """Return the conversation in the forms that a template reads.

    Content that the template has no form for becomes text. note: called with a key of
    `findings.KINDS` for each such kind of content.
    """
    if forms.needs_ids:
        messages = list(_with_ids(messages, forms))
    converted: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            message = _answer(message, forms, note)
        elif role == "tool" and not forms.results:
            note("results_as_user")
            message = {**message, "role": "user"}
        follows_system = bool(converted) and converted[-1]["role"] == "system"
        if role == "user" and forms.system == "user" and follows_system:
            message = _after_system(converted.pop(), message, note)
        converted.append(message)
    if forms.parts:
        converted = list(map(_in_parts, converted))
    return converted


def _after_system(system: Message, message: Message, note: Callable[[str], Any]) -> Message:
    if not system["content"]:
        return message
    note("system_in_user")
    return {**message, "content": system["content"] + "\n\n" + message["content"]}


def _with_empty_content(message: Message, forms: Forms) -> Message:
    """Return a turn with calls; content that is empty gets the form that the template reads."""
    if message["content"] or forms.empty_content is not None:
        return message
    return {**message, "content": None}


def _answer(message: Message, forms: Forms, note: Callable[[str], Any]) -> Message:
    calls = message.get("tool_calls")
    if calls:
        message = _calling(message, calls, forms, note)
    if not forms.inline_thinking and THINK_END in message["content"]:
        message = _without_inline_thinking(message)
    reasoning = message.get("reasoning_content")
    if not reasoning:
        is_call = calls and forms.arguments
        return _with_empty_content(message, forms) if is_call else message
    key = forms.call_reasoning if "tool_calls" in message else forms.reasoning
    if key == "reasoning_content" and (message["content"] or forms.empty_content == ""):
        return message
    return _reasoning(message, reasoning, key, forms, note)


def _reasoning(
    message: Message, reasoning: str, key: str | None, forms: Forms, note: Callable[[str], Any]
) -> Message:
    """Return the turn with its reasoning under the template's key, or within its content."""
    content = message["content"]
    message = {name: value for name, value in message.items() if name != "reasoning_content"}
    if key is None:
        note("reasoning_left_out")
    elif key == INLINE:
        note("reasoning_as_text")
        answer = f"\n\n{content}" if content else ""
        return {**message, "content": f"<think>\n{reasoning}\n</think>{answer}"}
    elif key == PART:
        text = [{"type": "text", "text": content}] if content else []
        return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *text]}
    else:
        message[key] = reasoning
    if not content and "tool_calls" in message:
        message["content"] = forms.empty_content
    return message


def split_thinking(content: str) -> tuple[str, str]:
    """Return the reasoning in `<think>` tags at the start of a content, and the text after it."""
    if THINK_END not in content:
        return "", content
    before, _, answer = content.partition(THINK_END)
    return before.strip().removeprefix("<think>").strip(), answer.lstrip("\n")


def _without_inline_thinking(message: Message) -> Message:
    """Return the turn with reasoning from its content moved to `reasoning_content`.

    A template that cuts `<think>` out of the content would leave the line ends after it.
    """
    reasoning, answer = split_thinking(message["content"])
    message = {**message, "content": answer}
    if reasoning and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    return message


def _calling(
    message: Message, calls: list[dict], forms: Forms, note: Callable[[str], Any]
) -> Message:
    if forms.arguments is None:
        note("calls_as_text")
        message = {**message, "content": call_text(message)}
        del message["tool_calls"]
    elif forms.arguments == "text":
        message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
    return message


def _with_text_arguments(call: dict) -> dict:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def call_text(message: Message) -> str:
    """Return the text of a turn with calls as JSON, one per line, for templates without calls."""
    if "text" in message:
        return message["text"]
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return "\n".join([message["content"]] * bool(message["content"]) + calls)


def _with_ids(messages: list[Message], forms: Forms) -> Iterator[Message]:
    """Yield the turns with valid ids of calls and results, and with the names of results."""
    id_form, fits = ID_FORMS[forms.call_ids or "any"]
    number = 0
    given: dict[str, tuple[str, str]] = {}  # id in the data → new id, name
    waiting: list[tuple[str, str]] = []  # id and name of calls that have no result yet
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            waiting, calls = [], []
            for call in message["tool_calls"]:
                name, own = call["function"]["name"], call.get("id")
                new = str(own) if own else ""
                if not fits.fullmatch(new):
                    new = id_form.format(number=number, name=name)
                number += 1
                if own:
                    given[str(own)] = new, name
                waiting.append((new, name))
                calls.append({**call, "id": new})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = _answering(message, given, waiting, forms)
        yield message


def _answering(
    message: Message,
    given: dict[str, tuple[str, str]],
    waiting: list[tuple[str, str]],
    forms: Forms,
) -> Message:
    answered = given.get(str(message.get("tool_call_id")))
    if answered is None and waiting:
        answered = waiting[0]
    if answered is None:
        return message
    if answered in waiting:
        waiting.remove(answered)
    message = {**message, "tool_call_id": answered[0]}
    if forms.results == "names" and not message.get("name"):
        message["name"] = answered[1]
    return message


def place_media(messages: list[Message], shown: set[str], mark: str) -> list[Message]:
    """Return the turns with their media in the form that a template reads.

    shown: the kinds that are parts of the content; otherwise `mark` stands for each in the text.
    """
    return [_with_media(one, shown, mark) if one.get(HELD) else one for one in messages]


def _with_media(message: Message, shown: set[str], mark: str) -> Message:
    content, kinds = message["content"], [one.part for one in message[HELD]]
    as_parts, own = shown.issuperset(kinds), chain(kinds, repeat(kinds[-1]))
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    placed: list[dict[str, Any]] = []
    for part in parts:
        pieces = part["text"].split(MARK) if part.get("type") == "text" else None
        if pieces is None:
            placed.append(part)
        elif not as_parts:
            placed.append({**part, "text": mark.join(pieces)})
        else:
            placed += _around_media(pieces, own)
    rest = {name: value for name, value in message.items() if name != HELD}
    if not as_parts and not isinstance(content, list):
        return {**rest, "content": placed[0]["text"]}
    return {**rest, "content": placed}


def _around_media(texts: list[str], kinds: Iterator[str]) -> Iterator[dict[str, Any]]:
    for i, text in enumerate(texts):
        if i:
            yield {"type": next(kinds)}
        if text:
            yield {"type": "text", "text": text}


def _in_parts(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        return message
    empty = not content and "tool_calls" in message
    return {**message, "content": [] if empty else [{"type": "text", "text": content}]}
