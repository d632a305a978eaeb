"""Tool calls of a conversation in the form that templates read, from data in many formats."""

import json
import re
from typing import Any

from fsdp_trainer.data.files.json_values import DECODER
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.files.turns_and_rows import ROLES
from fsdp_trainer.data.records.flags import is_missing, parsed, shown_value
from fsdp_trainer.data.records.media import HELD

TOOL_CALL_ROLES = ("function_call", "tool_call")
ARGUMENTS = ("arguments", "input", "parameters", "args")
"""Keys of a tool call's arguments."""
CALL_KEYS = {"id", "type", "name", "index", "function"}
"""Keys of a tool call that are read, or that say no more than its place does."""
BROKEN_CALL = "Write an object of JSON, {} for none, or leave such rows out:  data.on_error=skip"
JSON_CALLS = re.compile(r"\s*(\{|\[\s*\{)")
"""Start of a text that is a call, or a list of them."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


STRICT = json.JSONDecoder(object_pairs_hook=DECODER.object_pairs_hook, parse_constant=_no_constant)
"""Reads the arguments of calls, which a model is to write just so."""


def own_calls(turn: dict, role: str, content: Any) -> list[dict]:
    calls = content if isinstance(content, list) else [content]
    if role in TOOL_CALL_ROLES and all(map(_is_named, calls)):
        return calls
    is_call = role in TOOL_CALL_ROLES or (ROLES[role] == "assistant" and bool(turn.get("name")))
    if not is_call or named_calls(turn) or not _has_arguments(turn, role, content):
        return []
    keys = ("id", "name", *arguments_of(role))
    return [{key: turn[key] for key in keys if turn.get(key) is not None}]


def arguments_of(role: str) -> tuple[str, ...]:
    return ARGUMENTS if role in TOOL_CALL_ROLES else ARGUMENTS[:1]


def _is_named(call: Any) -> bool:
    return isinstance(call, dict) and bool(call.keys() & {"name", "function"})


def _has_arguments(turn: dict, role: str, content: Any) -> bool:
    if any(turn.get(key) is not None for key in arguments_of(role)):
        return bool(turn.get("name")) or not content
    may_be_none = role in TOOL_CALL_ROLES or "arguments" in turn
    return bool(turn.get("name")) and may_be_none and not content


def named_calls(turn: dict) -> list:
    """Return the calls under the keys that OpenAI has for them."""
    calls = _strictly(turn.get("tool_calls"), "tool_calls")
    if not calls:
        calls = [turn["function_call"]] if turn.get("function_call") else []
    if not isinstance(calls, list):
        raise RecordError(f"tool_calls should be a list, they are {shown_value(calls)}")
    return calls


def tool_call(call: Any) -> dict:
    """Return a call in the form that templates read. RecordError for broken arguments."""
    call = _strictly(call, "a tool call")
    function: Any = (call.get("function") or call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RecordError(f"a tool call needs a name and arguments, it is {shown_value(call)}")
    others = {name: call[name] for name in ("id",) if call.get(name)}
    arguments = _arguments([function] if function is call else [function, call])
    return plain({**others, "type": "function", "function": {"name": name, "arguments": arguments}})


def unread_in(calls: list) -> dict[str, Any]:
    """Return what calls hold besides names and arguments, under names for a finding."""
    objects = [call for call in map(parsed, calls) if isinstance(call, dict)]
    return {
        f"tool_calls.{key}": value
        for part in [*objects, *(call.get("function") for call in objects)]
        if isinstance(part, dict)
        for key, value in part.items()
        if key not in CALL_KEYS and key not in ARGUMENTS
    }


def _arguments(parts: list[dict]) -> dict:
    call = parts[0]
    given = [part[name] for part in parts for name in ARGUMENTS if name in part]
    if not given and call.keys() - CALL_KEYS:
        raise RecordError(
            f"a tool call has no arguments ({', '.join(ARGUMENTS)}); its keys: "
            f"{' '.join(map(str, call))}"
        )
    values = [
        _strictly(one, "the arguments of a tool call") for one in given if not is_missing(one)
    ]
    values = [one for one in values if one not in (None, {}, [])]  # PHP writes [] for {}
    if not values:
        return {}
    if not isinstance(values[0], dict) or any(one != values[0] for one in values):
        raise RecordError(
            f"the arguments of a tool call are no object, or several: {shown_value(call)}\n"
            f"{BROKEN_CALL}"
        )
    return values[0]


def _strictly(value: Any, what: str) -> Any:
    """Return the value of a text of JSON, also of one that is JSON text again; None if missing.

    Raises RecordError for a text that is no JSON.
    """
    try:
        while isinstance(value, str):
            value = None if is_missing(value) else STRICT.decode(value.strip())
    except ValueError as error:
        raise RecordError(f"{what}: no JSON ({error}): {value[:60]}\n{BROKEN_CALL}") from None
    return value


def written_calls(text: str) -> dict:
    """Return the calls of a turn whose text is JSON, one call or a list; nothing of another text.

    Raises RecordError for JSON that holds something else.
    """
    if not JSON_CALLS.match(text):
        return {}
    calls = _strictly(text, "the text of a turn of calls")
    calls = calls if isinstance(calls, list) else [calls]
    read = [tool_call(call) for call in calls]
    # a text with empty arguments is not what the model is to write
    as_it_is = all(call["function"]["arguments"] or "{}" in text for call in read)
    content = {"content": "", "tool_calls": read, **unread_in(calls)}
    return content | ({"text": text} if as_it_is else {})


def plain(value: dict) -> dict:
    """Return a value with strings in place of types that JSON lacks (dates, decimals, bytes).

    Templates write it as JSON.
    """
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except ValueError:
        raise RecordError(f"holds NaN or Infinity, which JSON lacks: {str(value)[:60]}") from None


def is_continued(message: dict, call: dict) -> bool:
    """Return True if a turn with nothing but calls belongs to the answer before it."""
    own = call.keys() & {"reasoning_content", HELD}
    if "tool_calls" not in call or call["content"] or own or message["role"] != "assistant":
        return False
    return message.get("weight", 1.0) == call.get("weight", 1.0)


def one_answer(message: dict, call: dict) -> dict:
    calls = [*message.get("tool_calls", ()), *call["tool_calls"]]
    joined = {**call, **message, "tool_calls": calls}
    before = message.get("text", None if "tool_calls" in message else message["content"])
    if before is None or "text" not in call:
        return {key: value for key, value in joined.items() if key != "text"}
    return joined | {"text": "\n".join(filter(None, (before, call["text"])))}
