"""Rows to conversations and documents, whatever the columns are called."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.sources import Row, RowError
from fsdp_trainer.errors import Problem, UserError

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant", "ai": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool", "tool_result": "tool",
    "function": "tool", "ipython": "tool",
}  # fmt: skip
TOOL_CALL_ROLES = ("function_call", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = {"train": False, "training": False, "loss": False, "masked": True}
"""How other trainers' data says that a turn is not learnt: Axolotl, ms-swift, torchtune. Only as true or false."""
PARTS = {
    "text": "text", "output_text": "text", "input_text": "text",
    "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning",
    "tool_call": "tool_call", "tool_calls": "tool_call", "function_call": "tool_call", "tool_use": "tool_call",
}  # fmt: skip
"""Types of content parts, and what they are; any other (an image, say) is refused."""
COMPLETIONS = ("completion", "answer", "response", "output", "solution", "target")
PAIRS = [
    (prompt, completion)
    for prompt in ("prompt", "question", "instruction", "input", "query", "problem")
    for completion in COMPLETIONS
]
CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog")
FIELDS = {
    "messages": ("messages", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "system"),
    "text": ("text",),
    "preference": ("chosen", "rejected", "prompt", "input", "system", "tools"),
}
REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}


@dataclass
class Conversation:
    """Turns of a chat: `role` (system, user, assistant, tool) and `content`, perhaps `reasoning_content`, `tool_calls` and `weight`.

    A weight of 0 is not learnt. `text` of a turn is what its tool calls look like for a template that knows none.
    """

    messages: list[Message]
    tools: list[dict] | None
    where: tuple[str, int]


@dataclass
class Document:
    """Plain text, learnt from the first token to the last."""

    text: str
    where: tuple[str, int]


@dataclass
class Reader:
    """Reads the rows of one file, whose format and columns are known."""

    format: str
    columns: dict[str, str]
    """Which column has which meaning, e.g. {"prompt": "question", "completion": "answer"}."""

    def __str__(self) -> str:
        renamed = [
            f"{column} → {meaning}" for meaning, column in self.columns.items() if column != meaning
        ]
        return self.format + (f" ({', '.join(renamed)})" if renamed else "")

    def values(self, row: Row) -> dict[str, Any]:
        """By meaning. RowError if a column is missing."""
        values = {meaning: _column(row.columns, column) for meaning, column in self.columns.items()}
        for meaning in REQUIRED[self.format]:
            if values[meaning] is None:
                column = self.columns[meaning]
                raise RowError(
                    f"{column!r} is null"
                    if column in row.columns
                    else f"has no {column!r}; its columns: {' '.join(row.columns) or 'none'}"
                )
        return values

    def read(self, row: Row) -> Conversation | Document:
        """RowError if a column is missing or has the wrong type."""
        values = self.values(row)
        if self.format == "text":
            return Document(_string(values["text"], self.columns["text"]), row.where)
        return Conversation(
            with_system(READERS[self.format](values), values),
            tools_of(values.get("tools")),
            row.where,
        )


def _column(columns: dict[str, Any], name: str) -> Any:
    """A column's value, or what it holds under a dotted name: conversation.messages."""
    if name in columns or "." not in name:
        return columns.get(name)
    outer, _, inner = name.partition(".")
    return _column(value, inner) if isinstance(value := _parsed(columns.get(outer)), dict) else None


def with_system(messages: list[Message], values: dict[str, Any]) -> list[Message]:
    """The turns after the row's system text, if it has one."""
    return (
        [{"role": "system", "content": _string(values["system"], "system")}, *messages]
        if values.get("system")
        else messages
    )


PREFERENCE = """holds preference pairs (chosen, rejected): `preview` shows and checks them, no objective learns from them yet.
To train on the better answers alone:  'data.fields={%s}'"""


def make_reader(
    columns: dict[str, Any],
    format: str | None,
    fields: dict[str, str] | None,
    file: str,
    pairs: bool = False,
) -> Reader:
    """The reader for a file, from the columns of its first row; UserError if it cannot be found out. pairs: whether preferences are wanted."""
    fields = {meaning: str(column) for meaning, column in (fields or {}).items()}
    if format == "auto" and not fields:
        _refuse_judged(columns, file)
    if format == "auto":
        format = _format_of_fields(fields) if fields else _format_of_columns(columns)
    if not format:
        example = (
            "'data.fields={prompt: question, completion: answer}'  or  'data.fields={text: body}'"
        )
        raise _unusable(
            file,
            f"no known format has its columns: {' '.join(columns) or 'none'}\nSay what they mean:  {example}",
        )
    if format == "preference" and not pairs:
        prompt = _found(columns, "preference")["prompt"]
        raise _unusable(
            file,
            PREFERENCE
            % (
                f"prompt: {prompt}, completion: chosen" if prompt in columns else "messages: chosen"
            ),
        )
    if unknown := sorted(set(fields) - set(FIELDS[format])):
        raise _unusable(
            f"data.fields={{{unknown[0]}: {fields[unknown[0]]}}}",
            f"format {format} has only: {' '.join(FIELDS[format])}",
        )
    return Reader(
        format, {name: name for name in FIELDS[format]} | _found(columns, format) | fields
    )


def _refuse_judged(columns: dict[str, Any], file: str) -> None:
    """Answers with a verdict are not all to be learnt."""
    if isinstance(
        label := columns.get("label", columns.get("kto_tag")), bool
    ) and _format_of_columns(columns) not in (None, "text"):
        why = f"has a label of true or false ({str(label).lower()} in its first row): unpaired preferences, and false ones would be learnt as well.\n"
        raise _unusable(
            file,
            why
            + "Keep the rows that are true, or say that the label means something else with  data.format=…",
        )


def _format_of_fields(fields: dict[str, str]) -> str:
    for name, required in REQUIRED.items():
        if set(required) <= set(fields) <= set(FIELDS[name]):
            return name
    known = [
        f"{name}: {' '.join(m if m in REQUIRED[name] else f'({m})' for m in meanings)}"
        for name, meanings in FIELDS.items()
    ]
    shown = ", ".join(f"{meaning}: {column}" for meaning, column in fields.items())
    raise _unusable(
        f"data.fields={{{shown}}}",
        "\n".join(
            [
                "no format has these meanings. Each format's own (those in brackets may be left out):",
                *known,
            ]
        ),
    )


def _format_of_columns(columns: dict[str, Any]) -> str | None:
    if is_preference(columns):
        return "preference"
    if name := _chat_column(columns):
        first: Any = next(
            iter(_parsed(_column(columns, name))),
            {"role": ""} if name == "messages" else {"from": ""},
        )
        return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "instruction" in columns and any(c in columns for c in COMPLETIONS):
        return "alpaca"
    if any(p in columns and c in columns for p, c in PAIRS):
        return "prompt_completion"
    return "text" if "text" in columns or "content" in columns else None


def is_preference(columns: dict[str, Any]) -> bool:
    """Whether a row holds a better and a worse answer."""
    return "chosen" in columns and "rejected" in columns


def _chat_column(columns: dict[str, Any]) -> str | None:
    """The column with a list of turns, or the dotted name of one within another."""
    names = [
        *CHATS,
        *(
            f"{outer}.{inner}"
            for outer, value in columns.items()
            if isinstance(value, dict)
            for inner in CHATS
        ),
    ]
    return next((name for name in names if isinstance(_parsed(_column(columns, name)), list)), None)


def _found(columns: dict[str, Any], format: str) -> dict[str, str]:
    """Columns that mean something under another name."""
    if format in ("messages", "sharegpt"):
        name = "messages" if format == "messages" else "conversations"
        found = name if name in columns else _chat_column(columns)
        return {name: found} if found else {}
    if format == "alpaca":
        output = next((c for c in ("output", *COMPLETIONS) if c in columns), "output")
        return {
            "output": output,
            "input": "context" if "context" in columns and "input" not in columns else "input",
        }
    if format == "preference":
        return {
            "prompt": next((c for c in (*CHATS, *(p for p, _ in PAIRS)) if c in columns), "prompt")
        }
    if format == "prompt_completion":
        return next(
            ({"prompt": p, "completion": c} for p, c in PAIRS if p in columns and c in columns), {}
        )
    return (
        {"text": "content"}
        if format == "text" and "text" not in columns and "content" in columns
        else {}
    )


def read_turns(value: Any) -> list[Message]:
    """Turns of `role` and `content`, or of `from` and `value`."""
    value = _parsed(value)
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(turn, dict) for turn in value)
    ):
        raise RowError(f"its turns should be a list of objects, they are {_shown(value)}")
    return [
        _message(turn, turn.get("role", turn.get("from")), turn.get("content", turn.get("value")))
        for turn in value
    ]


def _read_alpaca(values: dict[str, Any]) -> list[Message]:
    question = _string(values["instruction"], "instruction")
    if values["input"]:
        question += "\n" + _string(values["input"], "input")
    history = values["history"] or []  # LLaMA-Factory keeps earlier turns there
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise RowError(f"history should be a list of [question, answer], it is {_shown(history)}")
    pairs = [*history, [question, values["output"]]]
    turns = [
        (role, text)
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [
        {"role": role, "content": _string(text, "output" if role == "assistant" else "instruction")}
        for role, text in turns
    ]


def _read_prompt_completion(values: dict[str, Any]) -> list[Message]:
    prompt = turns_or_text(values["prompt"], "user", "prompt")
    earlier = [
        turn | {"weight": 0.0} if turn["role"] == "assistant" else turn for turn in prompt
    ]  # answers, but not the one to learn
    return earlier + turns_or_text(values["completion"], "assistant", "completion")


def turns_or_text(value: Any, role: str, name: str) -> list[Message]:
    """Turns, of which one alone may stand without a list, or a text that is a turn of `role`."""
    if isinstance(value, dict):
        value = [value]
    return (
        read_turns(value)
        if isinstance(value, list)
        else [{"role": role, "content": _string(value, name)}]
    )


READERS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": lambda values: read_turns(values["messages"]), "sharegpt": lambda values: read_turns(values["conversations"]),
    "alpaca": _read_alpaca, "prompt_completion": _read_prompt_completion,
}  # fmt: skip


def _message(turn: dict, role: Any, content: Any) -> Message:
    if not isinstance(role, str) or (role := role.strip().lower()) not in ROLES:
        raise RowError(f"role {role!r} is not known; known are {' '.join(ROLES)}")
    flags = [name for name in FLAGS if isinstance(turn.get(name), bool)]
    read = (
        "role",
        "content",
        "from",
        "value",
        "weight",
        "loss_weight",
        "tool_calls",
        "function_call",
        "text",
        *REASONING,
        *flags,
    )
    others = {name: value for name, value in turn.items() if name not in read and value is not None}
    text, reasoning, calls = _content(content, turn)
    message: Message = {"role": ROLES[role], "content": text, **others}
    if reasoning:
        message["reasoning_content"] = reasoning
    named = _parsed(turn.get("tool_calls")) or [
        turn[name] for name in ("function_call",) if turn.get(name)
    ]
    if not isinstance(named, list):
        raise RowError(f"tool_calls should be a list, they are {_shown(named)}")
    if calls := [_tool_call(call) for call in [*calls, *named]]:
        message["tool_calls"] = calls
    elif role in TOOL_CALL_ROLES and (written := _calls_in(text)):
        message |= {"content": "", "tool_calls": written, "text": text}
    weight = turn.get("weight") if turn.get("weight") is not None else turn.get("loss_weight")
    if weight is not None:
        message["weight"] = _weight(weight)
    elif any(turn[name] == FLAGS[name] for name in flags):
        message["weight"] = 0.0
    return message


def _content(content: Any, turn: dict) -> tuple[str, str, list]:
    """(text, reasoning, tool calls) of a turn, whose content is text or a list of parts."""
    found: dict[str, list] = {"text": [], "reasoning": [], "tool_call": []}
    found["reasoning"] = [turn[name] for name in REASONING if turn.get(name)][:1]
    if content is None and (
        turn.get("tool_calls") or turn.get("function_call") or found["reasoning"]
    ):
        content = ""
    for part in content if isinstance(content, list) else [content]:
        kind, value = ("text", part) if isinstance(part, str) else _part(part)
        found[kind].append(value)
    for name in ("text", "reasoning"):
        if wrong := [value for value in found[name] if not isinstance(value, str)]:
            raise RowError(
                f"the {'content' if name == 'text' else name} of a turn should be text, it is {_shown(wrong[0])}"
            )
    return "".join(found["text"]), "".join(found["reasoning"]), found["tool_call"]


def _part(part: Any) -> tuple[str, Any]:
    """What a part of a turn's content is, and its value."""
    if not isinstance(part, dict):
        raise RowError(f"the content of a turn should be text, it is {_shown(part)}")
    type = part.get("type", "text")
    if not isinstance(type, str) or type not in PARTS:
        raise RowError(
            f"the content of a turn has a part of type {type!r}: only text, reasoning and tool calls are read"
        )
    value = next(
        (part[name] for name in (type, "text", "value", "content") if part.get(name) is not None),
        None,
    )
    if PARTS[type] != "tool_call":
        return PARTS[type], value
    return "tool_call", part if value is None else _parsed(value)


def _weight(weight: Any) -> float:
    if (
        isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 3.4e38
    ):  # what a float32 holds
        raise RowError(
            f"the weight of a turn should be a number of 0 or more, it is {_shown(weight)}"
        )
    return float(weight)


def _tool_call(call: Any) -> dict:
    """In the form that templates read: {"type": "function", "function": {"name": …, "arguments": {…}}}."""
    call = _parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call needs a name and arguments, it is {_shown(call)}")
    arguments = _parsed(
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
    """Tool calls written as JSON text: one or a list of them."""
    calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    return (
        [_tool_call(call) for call in calls]
        if calls and all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls)
        else None
    )


def tools_of(tools: Any) -> list[dict] | None:
    """Descriptions of the tools that the model may call, in OpenAI's form."""
    tools = _parsed(tools.strip() if isinstance(tools, str) else tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools should be a list of objects, they are {_shown(tools)}")
    return [
        _plain(tool if "function" in tool else {"type": "function", "function": tool})
        for tool in tools
    ]


def _plain(value: dict) -> dict:
    """With text for what JSON cannot hold and a table can (dates, decimals, bytes): templates write it as JSON."""
    return json.loads(json.dumps(value, default=str))


def _parsed(value: Any) -> Any:
    """What JSON text stands for, in columns and fields that are no text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column!r} should be text, it is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"


def _unusable(what: str, why: str) -> UserError:
    return UserError("the data cannot be used", [Problem(what, why)])
