"""Turns of a conversation in the form that templates read, from data in many formats."""

import json
from itertools import cycle
from typing import Any, NamedTuple

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.images import IMAGE_PARTS, MARK, Image, image_of, images_of
from fsdp_trainer.data.records.record_formats import (
    ROLE_KEYS,
    ROLES,
    TEXT_KEYS,
    media_of,
    only_role_key,
    pair_keys,
    parsed,
    role_key,
    turn_list,
)

Message = dict[str, Any]
TOOL_CALL_ROLES = ("function_call", "tool_call")
PLAIN_KEYS, PLAIN_ROLES = {"role", "content"}, ("system", "user", "assistant")
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = {"train": False, "training": False, "loss": False, "loss_scale": False, "masked": True}
"""Boolean keys of a turn, in data of Axolotl, ms-swift and torchtune, and the value that means that
the turn is not supervised."""
WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys of a turn's loss weight; the last one is ms-swift's."""
PARTS = {
    "text": "text", "output_text": "text", "input_text": "text",
    "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning",
    "tool_call": "tool_call", "tool_calls": "tool_call", "function_call": "tool_call",
    "tool_use": "tool_call",
    **dict.fromkeys(IMAGE_PARTS, "image"),
}  # fmt: skip
"""Types of content parts and their meanings; any other (sound, for example) is refused."""


def read_turns(value: Any, column: str = "messages") -> list[Message]:
    """Return the turns of a list: objects with a role, question-answer pairs, or plain texts."""
    value = turn_list(value)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RecordError(f"{column!r} should be a list of turns, it is {shown_value(value)}")
    if len(value) > 1 and all(isinstance(turn, str) and turn[:1] != "{" for turn in value):
        roles = cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, value, strict=False)]
    return [message for turn in value for message in _turn(parsed(turn), column)]


def _as_object(turn: Any, column: str) -> dict:
    """Return a turn, or a pair of question and answer, as an object."""
    if isinstance(turn, list) and len(turn) == 2:
        return {"user": turn[0], "assistant": turn[1]}
    if not isinstance(turn, dict):
        raise RecordError(f"{column!r} should be a list of turns, it holds {shown_value(turn)}")
    return turn


def _turn(turn: Any, column: str) -> list[Message]:
    """Return the message of an element in a list of turns, or two messages if it is a pair."""
    if _is_plain(turn):  # most are, and the code below takes ten times as long
        return [{"role": turn["role"], "content": turn["content"]}]
    turn = _as_object(turn, column)
    pair = pair_keys(turn)
    if role_key(turn) is None and pair:
        ask, reply = pair
        others = {key: value for key, value in turn.items() if key not in pair}
        return [
            {"role": "user", "content": text_of(turn[ask], ask)},
            _message(others, "assistant", turn[reply]),
        ]
    speaker = only_role_key(turn)
    if speaker:
        return [_message({}, speaker, turn[speaker])]
    role = next((turn[key] for key in ROLE_KEYS if turn.get(key) is not None), None)
    if role is None:
        keys = " ".join(map(str, turn)) or "none"
        raise RecordError(
            f"{column!r} has a turn without a role (role and content, or from and value); "
            f"its keys: {keys}"
        )
    content = next((turn[key] for key in TEXT_KEYS if turn.get(key) is not None), None)
    return [_message(turn, role, content)]


def _is_plain(turn: Any) -> bool:
    """Return True for a turn in template form that holds nothing but text."""
    return (
        isinstance(turn, dict)
        and turn.keys() == PLAIN_KEYS
        and turn["role"] in PLAIN_ROLES
        and isinstance(turn["content"], str)
    )


def turns_or_text(value: Any, role: str, name: str) -> list[Message]:
    """Return a list of turns, also from a single turn; or a text as one turn of `role`."""
    if isinstance(value, dict | list):
        return read_turns(value, name)
    return [{"role": role, "content": text_of(value, name)}]


def _message(turn: dict, role: Any, content: Any) -> Message:
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise RecordError(f"role {role!r} is not known; known are {' '.join(ROLES)}")
    role = role.strip().lower()
    others = _others(turn)
    beside = _images_beside(others)
    if media := media_of(others):
        raise RecordError(f"a turn holds {media}, which no model here reads")
    read = content_of(content, turn)
    text = MARK * len(beside) + read.text
    message: Message = {"role": ROLES[role], "content": text, **others}
    if images := [*beside, *read.images]:
        message["images"] = images
    reasoning, calls = read.reasoning, read.calls
    if turn.get("train_detail"):
        message["context_parts"] = text, _context_parts(turn["train_detail"], len(text))
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [tool_call(call) for call in [*calls, *_named_calls(turn)]]
    if calls:
        message["tool_calls"] = calls
    elif role in TOOL_CALL_ROLES:
        written = _calls_in(text)
        message |= {"content": "", "tool_calls": written, "text": text} if written else {}
    weight = _turn_weight(turn)
    return message if weight is None else message | {"weight": weight}


def _images_beside(others: Message) -> list[Image]:
    """Take the images out of the other keys of a turn, and return them."""
    pictures = [name for name in ("images", "image") if others.get(name)]
    return [image for name in pictures for image in images_of(others.pop(name))]


def _others(turn: dict) -> Message:
    """Return the keys of a turn that are not read here, since a template may read them."""
    flags = [name for name in FLAGS if isinstance(turn.get(name), bool)]
    read = {*ROLE_KEYS, *TEXT_KEYS, *WEIGHTS, *REASONING, *flags}
    read |= {"tool_calls", "function_call", "train_detail"}
    return {name: value for name, value in turn.items() if name not in read and value is not None}


def _context_parts(details: Any, length: int) -> list[tuple[int, int]]:
    """Return [start, stop) of `train_detail` parts with train: false; its ends are inclusive."""
    details = parsed(details)
    parts = []
    for detail in details if isinstance(details, list) else [details]:
        values = detail if isinstance(detail, dict) else {}
        start, end = values.get("begin_offset"), values.get("end_offset")
        train = values.get("train")
        if type(start) is not int or type(end) is not int or not isinstance(train, bool):
            raise RecordError(
                "train_detail should be a list of begin_offset, end_offset and train, "
                f"it holds {shown_value(detail)}"
            )
        if not 0 <= start <= end < length:
            raise RecordError(f"train_detail names characters {start} to {end} of {length}")
        if not train:
            parts.append((start, end + 1))
    return parts


def _named_calls(turn: dict) -> list:
    calls = parsed(turn.get("tool_calls"))
    if not calls:
        calls = [turn["function_call"]] if turn.get("function_call") else []
    if not isinstance(calls, list):
        raise RecordError(f"tool_calls should be a list, they are {shown_value(calls)}")
    return calls


def _turn_weight(turn: dict) -> float | None:
    """Return the loss weight of a turn; None if the turn does not specify it."""
    flags = [name for name in FLAGS if isinstance(turn.get(name), bool)]
    for name in WEIGHTS:
        if turn.get(name) is not None and name not in flags:
            return _weight(turn[name])
    return 0.0 if any(turn[name] == FLAGS[name] for name in flags) else None


class TurnContent(NamedTuple):
    """What a turn holds. The text has a MARK in the place of each image."""

    text: str
    reasoning: str
    calls: list
    images: list[Image]


def content_of(content: Any, turn: dict, what: str = "the content of a turn") -> TurnContent:
    """Return what a turn holds; its content is text or a list of parts."""
    parts: dict[str, list] = {"text": [], "reasoning": [], "tool_call": []}
    parts["reasoning"] = [turn[name] for name in REASONING if turn.get(name)][:1]
    images: list[Image] = []
    if content is None and (
        turn.get("tool_calls") or turn.get("function_call") or parts["reasoning"]
    ):
        content = ""
    for part in content if isinstance(content, list) else [content]:
        kind, value = ("text", part) if isinstance(part, str) else _part(part, what)
        if kind == "image":
            images.append(image_of(value))
            kind, value = "text", MARK
        parts[kind].append(value)
    text = _joined(parts["text"], what)
    reasoning = _joined(parts["reasoning"], "the reasoning of a turn")
    return TurnContent(text, reasoning, parts["tool_call"], images)


def _joined(texts: list, what: str) -> str:
    """Return the texts joined; RecordError if one is not a string. what: name for the message."""
    for text in texts:
        if not isinstance(text, str):
            raise RecordError(f"{what} should be text, it is {shown_value(text)}")
    return "".join(texts)


def _part(part: Any, what: str) -> tuple[str, Any]:
    """Return the kind and value of one part of a turn's content."""
    if not isinstance(part, dict):
        raise RecordError(f"{what} should be text, it is {shown_value(part)}")
    type = part.get("type", "text")
    if not isinstance(type, str) or type not in PARTS:
        raise RecordError(
            f"{what} has a part of type {type!r}: text, images, reasoning and tool calls are read"
        )
    if PARTS[type] == "image":
        return "image", part
    value = next(
        (part[name] for name in (type, "text", "value", "content") if part.get(name) is not None),
        None,
    )
    if PARTS[type] != "tool_call":
        return PARTS[type], value
    return "tool_call", part if value is None else parsed(value)


def _weight(weight: Any) -> float:
    # 3.4e38: the maximum of float32
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 3.4e38:
        raise RecordError(
            f"the weight of a turn should be a number of 0 or more, it is {shown_value(weight)}"
        )
    return float(weight)


def tool_call(call: Any) -> dict:
    """Return a call in the form that templates read, with arguments parsed if they are JSON."""
    call = parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(f"a tool call needs a name and arguments, it is {shown_value(call)}")
    arguments = parsed(
        next(
            (function[name] for name in ("arguments", "input", "parameters") if name in function),
            {},
        )
    )
    others = {name: call[name] for name in ("id",) if call.get(name)}
    return _plain(
        {
            **others,
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
    )


def _calls_in(text: str) -> list[dict] | None:
    """Return the tool calls of a text that is JSON, one call or a list; None if it has none."""
    calls = parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    return (
        [tool_call(call) for call in calls]
        if calls and all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls)
        else None
    )


def tools_of(tools: Any, column: str = "tools") -> list[dict] | None:
    """Return the descriptions of the available tools in OpenAI's format; None without tools."""
    tools = parsed(tools.strip() if isinstance(tools, str) else tools)
    if not tools:
        return None
    tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"{column!r} should be a list of objects, it is {shown_value(tools)}")
    return [
        _plain(tool if "function" in tool else {"type": "function", "function": tool})
        for tool in tools
    ]


def _plain(value: dict) -> dict:
    """Return a value with strings in place of types that JSON lacks (dates, decimals, bytes).

    Templates write it as JSON.
    """
    return json.loads(json.dumps(value, default=str))


def text_of(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{column!r} should be text, it is {shown_value(value)}")
    return value


def shown_value(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"
