"""Turns of a conversation in the form that templates read, from data in many formats."""

from decimal import Decimal
from itertools import cycle
from typing import Any, NamedTuple

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.files.turns_and_rows import ROLE_KEYS, ROLES, TEXT_KEYS, role_key
from fsdp_trainer.data.records.flags import flag_of, leaves_out, shown_value, weight_of
from fsdp_trainer.data.records.media import HELD, MARK
from fsdp_trainer.data.records.record_formats import (
    is_column,
    media_of,
    only_role_key,
    pair_keys,
    parsed,
    turn_list,
)
from fsdp_trainer.data.records.recorded_calls import (
    TOOL_CALL_ROLES,
    arguments_of,
    is_continued,
    named_calls,
    one_answer,
    own_calls,
    plain,
    tool_call,
    unread_in,
    written_calls,
)
from fsdp_trainer.data.records.row_kinds import PART_KINDS, ROW_KINDS

Message = dict[str, Any]
PLAIN_KEYS, PLAIN_ROLES = {"role", "content"}, ("system", "user", "assistant")
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = {
    **dict.fromkeys(("train", "training", "trainable", "loss", "supervised"), False),
    **dict.fromkeys(("loss_mask", "train_mask"), False),
    **dict.fromkeys(("masked", "is_masked"), True),
}
"""Keys of a turn that are flags, in data of Axolotl, ms-swift, torchtune and others, and the value
that means that the turn is not supervised."""
WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys of a turn's loss weight; the last one is ms-swift's."""
MARKS = {*FLAGS, *WEIGHTS}
READ_KEYS = {*ROLE_KEYS, *TEXT_KEYS, *MARKS, *REASONING}
READ_KEYS |= {"tool_calls", "function_call", "train_detail"}
"""Keys of a turn that are read, whatever the template is."""
MESSAGE_KEYS = {
    "role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id", "id",
    HELD, "weight", "text", "context_parts",
}  # fmt: skip
"""Keys of a Message that are read, or that say no more than its place does."""
UNREAD_KEY = "unread_key_"
"""Prefix of keys that count conversations with a key of turns that is not read; it follows."""
BAD_KEY = "bad_key_"
"""The same, for a key that says that a turn is bad."""
PARTS = {
    "text": "text", "output_text": "text", "input_text": "text",
    "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning",
    "tool_call": "tool_call", "tool_calls": "tool_call", "function_call": "tool_call",
    "tool_use": "tool_call",
}  # fmt: skip
"""Types of content parts and their meanings, beside media; any other is refused."""


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
    messages: list[Message] = []
    for number, turn in enumerate(value, 1):
        try:
            read = _turn(parsed(turn), column)
        except RecordError as error:
            raise RecordError(f"turn {number} of {column!r}: {error}") from None
        # one answer may be written as several turns: its text, and each of its calls
        if messages and is_continued(messages[-1], read[0]):
            messages[-1] = one_answer(messages[-1], read[0])
        else:
            messages += read
    return messages


def _as_object(turn: Any, column: str) -> dict:
    if isinstance(turn, list) and turn and isinstance(turn[0], dict):
        raise RecordError(
            f"{column!r} holds lists of turns, and a row holds one of them.\nInto rows:  {LISTS}"
        )
    if isinstance(turn, list) and len(turn) == 2:
        return {"user": turn[0], "assistant": turn[1]}
    if isinstance(turn, dict):
        return turn
    reason = f"{column!r} should be a list of turns, it holds {shown_value(turn)}"
    if isinstance(turn, str):
        reason += ". A text is written without a list around it"
    raise RecordError(reason)


def _turn(turn: Any, column: str) -> list[Message]:
    if _isplain(turn):  # most are, and the code below takes ten times as long
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


def _isplain(turn: Any) -> bool:
    """Return True for a turn in template form that holds nothing but text."""
    return (
        isinstance(turn, dict)
        and turn.keys() == PLAIN_KEYS
        and turn["role"] in PLAIN_ROLES
        and isinstance(turn["content"], str)
    )


def turns_or_text(value: Any, role: str, name: str) -> list[Message]:
    if isinstance(value, dict | list):
        return read_turns(value, name)
    return [{"role": role, "content": text_of(value, name)}]


def _message(turn: dict, role: Any, content: Any) -> Message:
    role = _known_role(role)
    own = own_calls(turn, role, content)
    others = _others(turn, role, bool(own))
    beside = _media_beside(others)
    if media := media_of(others):
        raise RecordError(f"a turn holds {media}, which no model here reads")
    if content is None or (own and not isinstance(content, str)):
        _require_content(turn, role, bool(own or beside))
        content = ""
    read = content_of(content, turn)
    text = MARK * len(beside) + read.text
    message: Message = {"role": ROLES[role], "content": text, **others}
    further = {HELD: [*beside, *read.media], "reasoning_content": read.reasoning}
    message |= {key: value for key, value in further.items() if value}
    if turn.get("train_detail"):
        message["context_parts"] = text, _context_parts(turn["train_detail"], len(text))
    if calls := [*read.calls, *own, *named_calls(turn)]:
        message |= {"tool_calls": [*map(tool_call, calls)], **unread_in(calls)}
    elif role in TOOL_CALL_ROLES:
        message |= written_calls(text)
    weight = _turn_weight(turn, ROLES[role])
    return message if weight is None else message | {"weight": weight}


def _known_role(role: Any) -> str:
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise RecordError(f"role {role!r} is not known; known are {' '.join(ROLES)}")
    return role.strip().lower()


def _require_content(turn: dict, role: str, has_content: bool) -> None:
    """Raise RecordError for a turn without text, unless it has calls, reasoning or media."""
    if not (has_content or named_calls(turn) or any(turn.get(name) for name in REASONING)):
        raise RecordError(
            f"a turn of {role!r} has no text ({', '.join(TEXT_KEYS)}); its keys: "
            f"{' '.join(map(str, turn))}\nName its text content, or leave such rows out:  "
            "data.on_error=skip"
        )


def _media_beside(others: Message) -> list[Any]:
    named = [(kind, key) for kind in ROW_KINDS.values() for key in kind.keys if others.get(key)]
    return [item for kind, key in named for item in kind.read_all(others.pop(key))]


def _others(turn: dict, role: str, is_call: bool) -> Message:
    """Return the keys of a turn that are not read here, since a template may read them.

    is_call: whether its name and arguments are those of a call. Raises RecordError for one that
    may be a mask or a weight.
    """
    read = ("name", *arguments_of(role)) if is_call else ()
    others = {
        name: value
        for name, value in turn.items()
        if name not in READ_KEYS and name not in read and value is not None
    }
    for name, value in others.items():
        if leaves_out(str(name), value):
            raise RecordError(
                f"a turn has {name!r} of {str(value)[:60]}, which may say what is not learnt, and "
                "is not read.\nName it train (false: not learnt), masked or weight, or remove it"
            )
    return others


def _context_parts(details: Any, length: int) -> list[tuple[int, int]]:
    """Return [start, stop) of `train_detail` parts with train: false; its ends are inclusive."""
    details = parsed(details)
    parts = []
    for detail in details if isinstance(details, list) else [details]:
        values = detail if isinstance(detail, dict) else {}
        start, end = values.get("begin_offset"), values.get("end_offset")
        train = flag_of(values.get("train"), "'train' of a train_detail")
        if type(start) is not int or type(end) is not int or train is None:
            raise RecordError(
                "train_detail should be a list of begin_offset, end_offset and train, "
                f"it holds {shown_value(detail)}"
            )
        if not 0 <= start <= end < length:
            raise RecordError(f"train_detail names characters {start} to {end} of {length}")
        if not train:
            parts.append((start, end + 1))
    return parts


def _turn_weight(turn: dict, role: str) -> float | None:
    """Return the loss weight of a turn; None if the turn does not specify it.

    role: the flag of one that is not the assistant's counts too if it is to be learnt.
    """
    weights, flags = _marks_of(turn)
    if len(weights) > 1:
        raise RecordError(f"a turn has several weights: {' '.join(map(str, sorted(weights)))}")
    if False in flags:
        return 0.0
    if weights and (role == "assistant" or weights != {1.0}):  # ShareGPT has 1 in all turns
        return weights.pop()
    return 1.0 if flags and role != "assistant" else None


def _marks_of(turn: dict) -> tuple[set[float], set[bool]]:
    weights, flags = set[float](), set[bool]()
    for name in turn.keys() & MARKS:
        value, what = turn[name], f"{name!r} of a turn"
        if name in FLAGS:
            flag = flag_of(value, what)
            flags |= set() if flag is None else {flag != FLAGS[name]}
        elif (weight := weight_of(value, what)) is not None:
            weights.add(weight)
    return weights, flags


class HeldPart(NamedTuple):
    """A part of a turn that is of some kind of media."""

    item: Any


class TurnContent(NamedTuple):
    """What a turn holds. The text has a MARK in the place of each of its media."""

    text: str
    reasoning: str
    calls: list
    media: list[Any]


def content_of(content: Any, turn: dict, what: str = "the content of a turn") -> TurnContent:
    parts: dict[str, list] = {"text": [], "reasoning": [], "tool_call": []}
    parts["reasoning"] = [turn[name] for name in REASONING if turn.get(name)][:1]
    media: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        kind, value = ("text", part) if isinstance(part, str) else _part(part, what)
        if isinstance(value, HeldPart):
            media.append(value.item)
            kind, value = "text", MARK
        parts[kind].append(value)
    text = _joined(parts["text"], what)
    reasoning = _joined(parts["reasoning"], "the reasoning of a turn")
    return TurnContent(text, reasoning, parts["tool_call"], media)


def _joined(texts: list, what: str) -> str:
    for text in texts:
        if not isinstance(text, str):
            raise RecordError(f"{what} should be text, it is {shown_value(text)}{advice(text)}")
    return "".join(texts)


def _part(part: Any, what: str) -> tuple[str, Any]:
    if not isinstance(part, dict):
        raise RecordError(f"{what} should be text, it is {shown_value(part)}{advice(part)}")
    type = part.get("type", "text")
    if isinstance(type, str) and type in PART_KINDS:
        item = PART_KINDS[type].read(part)
        return "text", item if isinstance(item, str) else HeldPart(item)
    if not isinstance(type, str) or type not in PARTS:
        known = ", ".join(f"{kind}s" for kind in ROW_KINDS)
        raise RecordError(
            f"{what} has a part of type {type!r}: text, {known}, reasoning and tool calls are read"
        )
    value = next(
        (part[name] for name in (type, "text", "value", "content") if part.get(name) is not None),
        None,
    )
    if PARTS[type] != "tool_call":
        return PARTS[type], value
    return "tool_call", part if value is None else parsed(value)


def tools_of(tools: Any, column: str = "tools") -> list[dict] | None:
    """Return the descriptions of the available tools in OpenAI's format; None without tools."""
    tools = parsed(tools.strip() if isinstance(tools, str) else tools)
    if not tools:
        return None
    tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"{column!r} should be a list of objects, it is {shown_value(tools)}")
    return [
        plain(tool if "function" in tool else {"type": "function", "function": tool})
        for tool in tools
    ]


def text_of(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{column!r} should be text, it is {shown_value(value)}{advice(value)}")
    return value


LISTS = (
    'python -c "import pandas as pd; '
    "pd.read_json('FILE').to_json('rows.jsonl', orient='records', lines=True)\""
)
"""The command that turns a file with columns of lists into one of rows."""


def advice(value: Any) -> str:
    """Return what to do about a value that should be text; may be empty."""
    if isinstance(value, bytes):
        return ".\nOnly UTF-8 is read: decode the column, and write it as text"
    if isinstance(value, int | float | Decimal):
        return f'.\nWrite it as text, "{value}"; in pandas:  df[COLUMN] = df[COLUMN].astype(str)'
    if isinstance(value, list) or is_column(value):
        return f".\nA row holds one text. To turn columns of lists into rows:  {LISTS}"
    return ""
