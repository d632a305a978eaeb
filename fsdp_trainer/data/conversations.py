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
    """Turns of a chat: `role` (system, user, assistant, tool) and `content`, perhaps `tool_calls` and `weight` (0: not learnt).

    `text` of a turn is what its tool calls look like for a template that knows none.
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
        if isinstance(columns.get(name), list):
            first: Any = next(iter(columns[name]), {"role": ""} if name == "messages" else {"from": ""})
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
    pairs = [*(values.get("history") or []), [question, values["output"]]]  # LLaMA-Factory keeps earlier turns in `history`
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowError(f"history should be a list of [question, answer], it is {_shown(values['history'])}")
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
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise RowError(f"its turns should be a list of objects, they are {_shown(value)}")
    return value


def _message(turn: dict, role: Any, content: Any) -> Message:
    if role not in ROLES:
        raise RowError(f"role {role!r} is not known; known are {' '.join(ROLES)}")
    others = {
        name: value
        for name, value in turn.items()
        if name not in ("role", "content", "from", "value", "weight", "tool_calls") and value is not None
    }
    message: Message = {"role": ROLES[role], "content": _content(content, turn), **others}
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    elif role in TOOL_CALL_ROLES and (calls := _calls_in(message["content"])):
        message |= {"content": "", "tool_calls": calls, "text": message["content"]}
    if turn.get("weight") is not None:
        message["weight"] = _weight(turn["weight"])
    return message


def _content(content: Any, turn: dict) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    if content is None and turn.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    raise RowError(f"the content of a turn should be text, it is {_shown(content)}")


def _weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise RowError(f"the weight of a turn should be a number of 0 or more, it is {_shown(weight)}")
    return float(weight)


def _tool_call(call: Any) -> dict:
    """In the form that templates read: {"type": "function", "function": {"name": …, "arguments": {…}}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call needs a name and arguments, it is {_shown(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json_or_none(arguments) or arguments
    others = {name: call[name] for name in ("id",) if call.get(name)}
    return {**others, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _calls_in(text: str) -> list[dict] | None:
    """Tool calls written as JSON text: one or a list of them."""
    calls = _json_or_none(text)
    calls = calls if isinstance(calls, list) else [calls]
    return (
        [_tool_call(call) for call in calls]
        if calls and all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls)
        else None
    )


def _tools(tools: Any) -> list[dict] | None:
    """Descriptions of the tools that the model may call, in OpenAI's form."""
    if isinstance(tools, str):
        tools = (_json_or_none(tools) or tools) if tools.strip() not in ("", "[]", "{}", "null") else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools should be a list of objects, they are {_shown(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column!r} should be text, it is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"


def _unusable(what: str, why: str) -> UserError:
    return UserError("the data cannot be used", [Problem(what, why)])
