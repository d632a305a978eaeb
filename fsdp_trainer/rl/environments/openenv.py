"""The environment `openenv`: an environment behind a server that speaks OpenEnv's protocol.

Each rollout has a session of its own, a WebSocket at /ws. The model acts by calling a tool whose
parameters are the server's schema of an action, or by its text alone.
"""

import importlib.util
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.web import send
from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.environments.environment import (
    Environment,
    Message,
    Reply,
    Start,
    arguments_of,
    result,
)
from fsdp_trainer.rl.reasoning import said_in

TOOL = "act"
"""The name of the tool by which the model acts."""
HIDDEN = ("metadata",)
"""Fields of an action or an observation that the model does not see."""
LARGEST = 2**24
"""Bytes of a message of the server, at most."""


class WrongAction(ValueError):
    """An action that does not fit the server's schema; its text is an answer to the model."""


@dataclass
class OpenEnv(Environment):
    """An environment of OpenEnv, which rewards each action."""

    name: ClassVar[str] = "openenv"
    rewards: ClassVar[bool] = True
    url: str = key("", "the server's address, as http://localhost:8000")
    text: str | None = key(
        None, "the field of an action that the model's text fills; null: it calls a tool"
    )
    seed: str = key("seed", "the column of the row with the seed of `reset`, if there is one")
    connection: Any = None
    resources: ExitStack = field(default_factory=ExitStack)
    turn_rewards: list[float] = field(default_factory=list)

    def wrong_settings(self) -> str | None:
        if not self.url.startswith(("http://", "https://")):
            return "lacks the server, as in  {name: openenv, url: http://localhost:8000}"
        if importlib.util.find_spec("websockets") is None:
            return "a session is a WebSocket:  pip install 'fsdp_trainer[openenv]'"
        return None

    def reset(self, row: Json) -> Start:
        """See Environment. The first observation follows the row's own turns."""
        # an extra, and only this environment needs it
        from websockets.sync.client import connect

        address = self.url.rstrip("/")
        tools = None if self.text else [tool_of(json.loads(send(f"{address}/schema")))]
        opening = connect(f"ws{address.removeprefix('http')}/ws", max_size=LARGEST)
        self.connection = self.resources.enter_context(opening)
        data = {"seed": row[self.seed]} if row.get(self.seed) is not None else {}
        observed = self._ask("reset", data)
        return with_text(row["messages"], shown(observed["observation"])), tools

    def step(self, messages: list[Message]) -> Reply:
        turn = messages[-1]
        if self.text:
            text, reward, is_over = self._act({self.text: said_in(str(turn.get("content") or ""))})
            self.turn_rewards.append(reward)
            return [{"role": "user", "content": text}], is_over
        calls = turn.get("tool_calls") or []
        acts = [self._act(arguments_of(call)) for call in calls]
        self.turn_rewards.append(sum(reward for _, reward, _ in acts))
        replies = [result(call, text) for call, (text, *_) in zip(calls, acts, strict=True)]
        return replies, not calls or any(is_over for *_, is_over in acts)

    def _act(self, action: Json) -> tuple[str, float, bool]:
        """Return what is observed after an action, its reward, and whether it was the last."""
        try:
            observed = self._ask("step", action)
        except WrongAction as error:
            return f"error: {error}", 0.0, False
        text = shown(observed["observation"])
        return text, float(observed["reward"] or 0.0), bool(observed["done"])

    def reward(self, messages: list[Message]) -> Any:
        """Return the rewards of all turns; 0 for those that made no action."""
        own = sum(turn["role"] == "assistant" for turn in messages)
        return [*self.turn_rewards, *[0.0] * (own - len(self.turn_rewards))][:own]

    def close(self) -> None:
        if self.connection is not None:
            self.connection.send(json.dumps({"type": "close"}))
        self.resources.close()

    def _ask(self, kind: str, data: Json) -> Json:
        self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.connection.recv())
        if answer.get("type") != "observation":
            said = answer.get("data") or {}
            if said.get("code") == "VALIDATION_ERROR":
                raise WrongAction(f"the arguments do not fit: {said.get('errors', said)}")
            raise RuntimeError(f"the server refuses {kind}: {said.get('message', said)}")
        observed: Json = answer["data"]
        return observed


def tool_of(schema: Json) -> Json:
    """Return the description of the tool by which the model acts. schema: of /schema."""
    action = schema["action"]
    properties = {
        name: each for name, each in action.get("properties", {}).items() if name not in HIDDEN
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name in action.get("required", []) if name in properties],
    }
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    about = action.get("description") or "Acts in the environment, and returns what is observed."
    function = {"name": TOOL, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def with_text(messages: list[Message], text: str) -> list[Message]:
    """Return turns with a text at the end of the user's last one, or as a turn of the user's."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*before, {**last, "content": f"{last.get('content') or ''}\n\n{text}"}]


def shown(observation: Json) -> str:
    """Return an observation as text: that of its only field if this is a text, else JSON."""
    fields = {name: value for name, value in observation.items() if name not in HIDDEN}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)
