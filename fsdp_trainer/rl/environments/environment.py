"""Environments: what a model talks with over several turns. Imports no torch.

A user's environment is a class with the methods of `Environment`; it need not inherit from it. Each
of its objects serves one rollout, so that it may keep a state.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Message = dict[str, Any]
"""A turn in OpenAI's format."""
Start = tuple[list[Message], list[dict[str, Any]] | None]
Reply = tuple[list[Message], bool]


@dataclass
class Environment:
    """An environment with its settings; each field is a key of objective.environment.

    All methods may be asynchronous.
    """

    name: ClassVar[str] = ""
    rewards: ClassVar[bool] = False
    """True if it rewards rollouts itself."""
    code: ClassVar[str] = ""
    """The setting that names a function of the user's as FILE.py:FUNCTION, given as `program`."""
    names_code: ClassVar[tuple[str, ...]] = ()
    """The settings that decide which code of the user's machine runs: only typed ones count."""

    def reset(self, row: dict[str, Any]) -> Start | Awaitable[Start]:
        """Return the first turns, and descriptions of the tools in OpenAI's format.

        row: what `row_of` returns.
        """
        return list(row["messages"]), row["tools"]

    def step(self, messages: list[Message]) -> Reply | Awaitable[Reply]:
        """Return the turns that follow the model's newest one, and whether the rollout is over.

        messages: all turns so far. The model's newest may have `tool_calls`, whose arguments are
        objects.
        """
        raise NotImplementedError

    def reward(self, messages: list[Message]) -> Any:
        """Return a number, or one for each of the model's turns; None leaves it to rewards."""
        return None

    def wrong_settings(self) -> str | None:
        """Return an error message if the settings do not fit together, else None."""
        return None


@dataclass
class ToolEnvironment(Environment):
    """An environment with tools, over when the model calls none of them."""

    tools: ClassVar[tuple[dict[str, Any], ...]] = ()

    def reset(self, row: dict[str, Any]) -> Start:
        return list(row["messages"]), [*self.tools]

    def step(self, messages: list[Message]) -> Reply:
        calls = messages[-1].get("tool_calls") or []
        return [result(call, self.call(**arguments_of(call))) for call in calls], not calls

    def call(self, /, **arguments: Any) -> str:
        """Return the text that the tool answers with."""
        raise NotImplementedError


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the description of a tool whose parameters, described here, are required texts."""
    properties = {p: {"type": "string", "description": text} for p, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def result(call: dict[str, Any], text: str) -> Message:
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
    }


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    return call["function"]["arguments"]


def row_of(question: dict[str, Any]) -> dict[str, Any]:
    """Return what `reset` gets: the columns of a data row, and what was read from them.

    `messages`, `tools` and `reference`, the row's own answer, are there even if the row has other
    columns.
    """
    read = {name: question[name] for name in ("messages", "tools", "reference")}
    return {**question["row"], **read}


def last_text(messages: Sequence[Message]) -> str:
    own = [turn for turn in messages if turn["role"] == "assistant"]
    return str(own[-1].get("content") or "") if own else ""
