"""Detects the capabilities of a chat template by rendering small conversations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.template_forms import (
    ID_FORMS,
    INLINE,
    PART,
    REASONING_KEYS,
    Forms,
    convert_turns,
)

Render = Callable[[list[Message], list[dict] | None, bool], str]
"""(messages, tools, add_generation_prompt) to text; RecordError if the template refuses them."""

SYSTEM: Message = {"role": "system", "content": "probed system"}
ASK: Message = {"role": "user", "content": "probed question"}
ANSWER: Message = {"role": "assistant", "content": "probed answer"}
THOUGHT = "probed thought"
FUNCTION = {"name": "probed_call", "arguments": {"probed_key": "probed_value"}}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
RESULT: Message = {"role": "tool", "content": "probed result"}
TOOL = {
    "type": "function",
    "function": {
        "name": "probed_call",
        "description": "probed tool",
        "parameters": {
            "type": "object",
            "properties": {"probed_key": {"type": "string", "description": "probed parameter"}},
            "required": ["probed_key"],
        },
    },
}
UNLIKE_JSON = ("{'probed_key'", '\\"probed_key')
"""Signs of wrong arguments: an object printed by Python, or JSON text encoded as JSON again."""

PRINTED_PARTS = ("'type': 'thinking'", '"type": "thinking"')
"""Signs of content parts that were printed as if they were text."""


@dataclass(frozen=True)
class Probe:
    """A conversation, the forms to render it in, and texts that must and must not appear."""

    forms: dict[str, Any]
    messages: list[Message]
    shows: tuple[str, ...]
    hides: tuple[str, ...] = ()
    is_prompt: bool = False
    """True if it is rendered with the generation prompt."""


@dataclass(frozen=True)
class Question:
    """A question about a template: the first probe that succeeds answers it, else `otherwise`."""

    probes: tuple[Probe, ...]
    otherwise: dict[str, Any]


def _call_probes() -> Iterator[Probe]:
    """Yield probes for tool calls: first those that require JSON arguments, then any."""
    shows = ("probed_call", "probed_key", "probed_value")
    ways = list(product((None, *ID_FORMS), ("", None), ("object", "text")))
    for hides in (UNLIKE_JSON, ()):
        for messages in ([ASK, CALL], [ASK, CALL, RESULT]):
            for ids, empty, arguments in ways:
                forms = {"call_ids": ids, "empty_content": empty, "arguments": arguments}
                yield Probe(forms, messages, shows, hides)


def _result_probes() -> Iterator[Probe]:
    """Yield probes for tool results: first those that end in an answer, then in the result."""
    shows = ("probed result",)
    for messages, is_prompt in (([ASK, CALL, RESULT, ANSWER], False), ([ASK, CALL, RESULT], True)):
        for form in ("plain", "ids", "names"):
            yield Probe({"results": form}, messages, shows, is_prompt=is_prompt)


def _reasoning_probes(form: str, turn: Message) -> tuple[Probe, ...]:
    messages = [ASK, {**turn, "reasoning_content": THOUGHT}]
    keys = (*REASONING_KEYS, PART, INLINE)
    return tuple(Probe({form: key}, messages, (THOUGHT,), PRINTED_PARTS) for key in keys)


INLINE_THOUGHT = f"<think>\n{THOUGHT}\n</think>\n\nprobed answer"
THINKING: Message = {"role": "assistant", "content": INLINE_THOUGHT}
QUESTIONS = (
    Question(
        tuple(
            Probe({"parts": parts}, [ASK, ANSWER], ("probed question", "probed answer"))
            for parts in (False, True)
        ),
        {"parts": False},
    ),
    Question(
        (
            Probe({"system": "turn"}, [SYSTEM, ASK, ANSWER], ("probed system",)),
            Probe({"system": "prompt"}, [SYSTEM, ASK], ("probed system",), is_prompt=True),
        ),
        {"system": "user"},
    ),
    Question(
        (
            Probe({"tools": True}, [ASK, ANSWER], ("probed_call",)),
            Probe({"tools": True}, [ASK], ("probed_call",), is_prompt=True),
            Probe({"tools": True}, [SYSTEM, ASK, ANSWER], ("probed_call",)),
        ),
        {"tools": False},
    ),
    Question(tuple(_call_probes()), {"arguments": None, "call_ids": None, "empty_content": ""}),
    Question(tuple(_result_probes()), {"results": None}),
    Question(_reasoning_probes("reasoning", ANSWER), {"reasoning": None}),
    Question(_reasoning_probes("call_reasoning", CALL), {"call_reasoning": None}),
    Question(
        (Probe({"inline_thinking": True}, [ASK, THINKING], (THOUGHT, "probed answer")),),
        {"inline_thinking": False},
    ),
)
"""Questions in the order in which they are asked; each uses the forms found by earlier ones."""


def find_forms(render: Render, with_tools: bool) -> Forms:
    """Return the forms that a template reads. with_tools: whether tools are passed to it."""
    tools = [TOOL] if with_tools else None
    forms = Forms()
    for question in QUESTIONS:
        answers = (p.forms for p in question.probes if _succeeds(p, forms, render, tools))
        forms = replace(forms, **next(answers, question.otherwise))
    return forms


def _succeeds(probe: Probe, forms: Forms, render: Render, tools: list[dict] | None) -> bool:
    messages = convert_turns(probe.messages, replace(forms, **probe.forms))
    try:
        text = render(messages, tools, probe.is_prompt)
    except RecordError:
        return False
    return all(part in text for part in probe.shows) and not any(
        part in text for part in probe.hides
    )
