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
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
TOOL_CALL_ROLES = ("function_call", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
PARTS = {
    "text": "text", "output_text": "text", "input_text": "text",
    "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning",
    "tool_call": "tool_call", "tool_calls": "tool_call", "function_call": "tool_call", "tool_use": "tool_call",
}  # fmt: skip
"""Types of content parts, and what they are; any other (an image, say) is refused."""
PAIRS = [
    (prompt, completion)
    for prompt in ("prompt", "question", "instruction", "input", "query", "problem")
    for completion in ("completion", "answer", "response", "output", "solution", "target")
]
FIELDS = {
    "messages": ("messages", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "system"),
    "text": ("text",),
}
REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
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
        renamed = [f"{column} → {meaning}" for meaning, column in self.columns.items() if column != meaning]
        return self.format + (f" ({', '.join(renamed)})" if renamed else "")

    def read(self, row: Row) -> Conversation | Document:
        """RowError if a column is missing or has the wrong type."""
        for meaning in REQUIRED[self.format]:
            if row.columns.get(self.columns[meaning]) is None:
                raise RowError(f"has no {self.columns[meaning]!r}; its columns: {' '.join(row.columns) or 'none'}")
        values = {meaning: row.columns.get(column) for meaning, column in self.columns.items()}
        if self.format == "text":
            return Document(_string(values["text"], self.columns["text"]), row.where)
        messages = READERS[self.format](values)
        if values.get("system"):
            messages.insert(0, {"role": "system", "content": _string(values["system"], "system")})
        return Conversation(messages, _tools(values.get("tools")), row.where)


def make_reader(columns: dict[str, Any], format: str | None, fields: dict[str, str] | None, file: str) -> Reader:
    """The reader for a file, from the columns of its first row; UserError if it cannot be found out."""
    fields = fields or {}
    if "chosen" in columns and "rejected" in columns:
        raise _unusable(
            file,
            "has `chosen` and `rejected`: preference data, which is not trained on yet.\nUse data with one answer per question",
        )
    if format == "auto":
        format = _format_of_fields(fields) if fields else _format_of_columns(columns)
    if not format:
        example = "'data.fields={prompt: question, completion: answer}'  or  'data.fields={text: body}'"
        raise _unusable(file, f"no known format has its columns: {' '.join(columns) or 'none'}\nSay what they mean:  {example}")
    if unknown := sorted(set(fields) - set(FIELDS[format])):
        raise _unusable(f"data.fields={{{unknown[0]}: {fields[unknown[0]]}}}", f"format {format} has only: {' '.join(FIELDS[format])}")
    return Reader(format, {name: name for name in FIELDS[format]} | _found(columns, format) | fields)


def _format_of_fields(fields: dict[str, str]) -> str:
    for name, required in REQUIRED.items():
        if set(required) <= set(fields) <= set(FIELDS[name]):
            return name
    known = [f"{name}: {' '.join(m if m in REQUIRED[name] else f'({m})' for m in meanings)}" for name, meanings in FIELDS.items()]
    shown = ", ".join(f"{meaning}: {column}" for meaning, column in fields.items())
    raise _unusable(
        f"data.fields={{{shown}}}",
        "\n".join(["no format has these meanings. Each format's own (those in brackets may be left out):", *known]),
    )


def _format_of_columns(columns: dict[str, Any]) -> str | None:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(turns := _parsed(columns.get(name)), list):
            first: Any = next(iter(turns), {"role": ""} if name == "messages" else {"from": ""})
            return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "instruction" in columns and "output" in columns:
        return "alpaca"
    if any(p in columns and c in columns for p, c in PAIRS):
        return "prompt_completion"
    return "text" if "text" in columns or "content" in columns else None


def _found(columns: dict[str, Any], format: str) -> dict[str, str]:
    """Columns that mean something under another name."""
    if format in ("messages", "sharegpt"):
        name = "messages" if format == "messages" else "conversations"
        return next(({name: c} for c in (name, "messages", "conversations", "conversation") if c in columns), {})
    if format == "prompt_completion":
        return next(({"prompt": p, "completion": c} for p, c in PAIRS if p in columns and c in columns), {})
    return {"text": "content"} if format == "text" and "text" not in columns and "content" in columns else {}


def _read_messages(values: dict[str, Any]) -> list[Message]:
    return [_message(turn, turn.get("role"), turn.get("content")) for turn in _turns(values["messages"])]


def _read_sharegpt(values: dict[str, Any]) -> list[Message]:
    return [_message(turn, turn.get("from"), turn.get("value")) for turn in _turns(values["conversations"])]


def _read_alpaca(values: dict[str, Any]) -> list[Message]:
    question = _string(values["instruction"], "instruction")
    if values["input"]:
        question += "\n" + _string(values["input"], "input")
    history = values["history"] or []  # LLaMA-Factory keeps earlier turns there
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"history should be a list of [question, answer], it is {_shown(history)}")
    pairs = [*history, [question, values["output"]]]
    turns = [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [{"role": role, "content": _string(text, "output" if role == "assistant" else "instruction")} for role, text in turns]


def _read_prompt_completion(values: dict[str, Any]) -> list[Message]:
    return [
        {"role": "user", "content": _string(values["prompt"], "prompt")},
        {"role": "assistant", "content": _string(values["completion"], "completion")},
    ]


READERS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": _read_messages, "sharegpt": _read_sharegpt, "alpaca": _read_alpaca, "prompt_completion": _read_prompt_completion
}  # fmt: skip


def _turns(value: Any) -> list[dict]:
    value = _parsed(value)
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise RowError(f"its turns should be a list of objects, they are {_shown(value)}")
    return value


def _message(turn: dict, role: Any, content: Any) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"role {role!r} is not known; known are {' '.join(ROLES)}")
    read = ("role", "content", "from", "value", "weight", "loss_weight", "tool_calls", "text", *REASONING)
    others = {name: value for name, value in turn.items() if name not in read and value is not None}
    text, reasoning, calls = _content(content, turn)
    message: Message = {"role": ROLES[role], "content": text, **others}
    if reasoning:
        message["reasoning_content"] = reasoning
    named = _parsed(turn.get("tool_calls")) or []
    if not isinstance(named, list):
        raise RowError(f"tool_calls should be a list, they are {_shown(named)}")
    if calls := [_tool_call(call) for call in [*calls, *named]]:
        message["tool_calls"] = calls
    elif role in TOOL_CALL_ROLES and (written := _calls_in(text)):
        message |= {"content": "", "tool_calls": written, "text": text}
    weight = turn.get("weight") if turn.get("weight") is not None else turn.get("loss_weight")
    if weight is not None:
        message["weight"] = _weight(weight)
    return message


def _content(content: Any, turn: dict) -> tuple[str, str, list]:
    """(text, reasoning, tool calls) of a turn, whose content is text or a list of parts."""
    found: dict[str, list] = {"text": [], "reasoning": [], "tool_call": []}
    found["reasoning"] = [turn[name] for name in REASONING if turn.get(name)][:1]
    if content is None and (turn.get("tool_calls") or found["reasoning"]):
        content = ""
    for part in content if isinstance(content, list) else [content]:
        kind, value = ("text", part) if isinstance(part, str) else _part(part)
        found[kind].append(value)
    for name in ("text", "reasoning"):
        if wrong := [value for value in found[name] if not isinstance(value, str)]:
            raise RowError(f"the {'content' if name == 'text' else name} of a turn should be text, it is {_shown(wrong[0])}")
    return "".join(found["text"]), "".join(found["reasoning"]), found["tool_call"]


def _part(part: Any) -> tuple[str, Any]:
    """What a part of a turn's content is, and its value."""
    if not isinstance(part, dict):
        raise RowError(f"the content of a turn should be text, it is {_shown(part)}")
    type = part.get("type", "text")
    if not isinstance(type, str) or type not in PARTS:
        raise RowError(f"the content of a turn has a part of type {type!r}: only text, reasoning and tool calls are read")
    value = next((part[name] for name in (type, "text", "value", "content") if part.get(name) is not None), None)
    if PARTS[type] != "tool_call":
        return PARTS[type], value
    return "tool_call", part if value is None else _parsed(value)


def _weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 3.4e38:  # what a float32 holds
        raise RowError(f"the weight of a turn should be a number of 0 or more, it is {_shown(weight)}")
    return float(weight)


def _tool_call(call: Any) -> dict:
    """In the form that templates read: {"type": "function", "function": {"name": …, "arguments": {…}}}."""
    call = _parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call needs a name and arguments, it is {_shown(call)}")
    arguments = _parsed(next((function[name] for name in ("arguments", "input", "parameters") if name in function), {}))
    others = {name: call[name] for name in ("id",) if call.get(name)}
    return _plain({**others, "type": "function", "function": {"name": function["name"], "arguments": arguments}})


def _calls_in(text: str) -> list[dict] | None:
    """Tool calls written as JSON text: one or a list of them."""
    calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    return (
        [_tool_call(call) for call in calls]
        if calls and all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls)
        else None
    )


def _tools(tools: Any) -> list[dict] | None:
    """Descriptions of the tools that the model may call, in OpenAI's form."""
    tools = _parsed(tools.strip() if isinstance(tools, str) else tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools should be a list of objects, they are {_shown(tools)}")
    return [_plain(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools]


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
