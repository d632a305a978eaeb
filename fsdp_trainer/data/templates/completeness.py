"""Checks for parts of a conversation that are missing in the text its template produced."""

import json
from collections.abc import Iterator

from fsdp_trainer.base.json_files import strings_in
from fsdp_trainer.data.records.media import MARK
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.template_forms import split_thinking

TEXT, REASONING, CALLS = "text_left_out", "reasoning_left_out", "calls_left_out"
TOOLS = "tools_not_shown"


def left_out_of_answer(message: Message, text: str) -> Iterator[str]:
    """Yield the keys of `findings.KINDS` for parts of an assistant turn that its text lacks.

    text: the text that the turn adds to the conversation.
    """
    thought, answer = split_thinking(message["content"])
    reasoning = message.get("reasoning_content") or thought
    if reasoning and not shows(text, reasoning):
        yield REASONING
    if answer and not shows(text, answer):
        yield TEXT
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    if any(text.count(name) < names.count(name) for name in set(names)) or not all(
        shows(text, value) for value in strings_in(arguments)
    ):
        yield CALLS


def left_out_of_context(messages: list[Message], text: str) -> bool:
    """Return whether a text lacks the content of any turn that is not the assistant's.

    The turns are searched for in order, so that a long text is scanned only once.
    """
    place = 0
    for message in messages:
        if message["role"] == "assistant":
            continue
        for content in filter(None, map(str.strip, message["content"].split(MARK))):
            start = text.find(content, place)
            if start >= 0:
                place = start + len(content)
            elif not shows(text, content):
                return True
    return False


def left_out_tools(tools: list[dict] | None, text: str) -> bool:
    described = (tool.get("function") for tool in tools or ())
    names = (each.get("name") for each in described if isinstance(each, dict))
    return any(isinstance(name, str) and name not in text for name in names)


def shows(text: str, part: str) -> bool:
    """Return whether a text contains a part, also JSON-escaped or with different white space."""
    part = part.strip()
    if part in text:
        return True
    written = (json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    if any(form in text for form in written):
        return True
    return "".join(part.split()) in "".join(text.split())
