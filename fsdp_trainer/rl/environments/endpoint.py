"""The environment `endpoint`: a program that asks the model through an address like OpenAI's.

It serves agents, and environments of other packages, that call a model instead of being called. The
program runs in a thread of its own. Each of its requests ends when the model has answered.
"""

import asyncio
import inspect
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.environments.environment import Environment, Message, Reply, Start

NO_ROOM = "context_length_exceeded"
"""OpenAI's code for a request that leaves the model no room, which most agents know."""
MOST_BYTES = 64 << 20
"""Bytes of the longest request that is read."""
MOST_CONNECTIONS = 1024
"""Each connection has a thread. A further one is closed without an answer."""
IDLE_SECONDS = 120
"""Seconds after which a connection is closed on which no request, or no more of it, arrives."""
CUT = "cut"
"""A field of an answer that was cut at its longest, with OpenAI's reason for it."""
MODEL = "policy"
"""The name under which the address offers the model; a request may use any."""


class RefusedRequest(Exception):
    """A request that is answered with an error. args: status, code and message."""


@dataclass
class ProgramEnd:
    """The end of a program. error: what it raised; None: it returned `value`."""

    value: Any = None
    error: Exception | None = None


class Session:
    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.requests: queue.Queue[Json | ProgramEnd] = queue.Queue()
        self._answers: queue.Queue[Message | None] = queue.Queue()
        self._asks = threading.Lock()

    def ask(self, body: Json) -> Message:
        if not self._asks.acquire(blocking=False):
            raise RefusedRequest(
                409, "busy", "a rollout is one conversation: one request at a time"
            )
        try:
            self.requests.put(body)
            answer = self._answers.get()
        finally:
            self._asks.release()
        if answer is None:
            raise RefusedRequest(400, NO_ROOM, "the rollout has ended: no turn or no room is left")
        return answer

    def answer(self, message: Message | None) -> None:
        """Give the model's answer to the request that waits; None: there will be none."""
        self._answers.put(message)


class BoundedServer(ThreadingHTTPServer):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self._free = threading.Semaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the other side has closed a connection, or sent no HTTP."""


class Endpoint:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        handler = type("Handler", (EndpointHandler,), {"endpoint": self})
        self._server = BoundedServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self, session: Session) -> str:
        self.sessions[session.name] = session
        return f"http://127.0.0.1:{self._server.server_port}/{session.name}/v1"

    def close(self, session: Session) -> None:
        self.sessions.pop(session.name, None)


@lru_cache(maxsize=1)
def endpoint_of_process() -> Endpoint:
    return Endpoint()


class EndpointHandler(BaseHTTPRequestHandler):
    endpoint: Endpoint
    timeout = IDLE_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        try:
            session = self._session()  # before the body is read
            body = self._request(self._content())
            answer = session.ask(body)
        except RefusedRequest as refused:
            status, code, message = refused.args
            self.close_connection = True  # the rest of the body may not have been read
            self._reply(status, {"error": {"message": message, "code": code, "type": code}})
            return
        if body.get("stream"):
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(answer))
            self._send(200, "text/event-stream", f"{events}data: [DONE]\n\n".encode())
        else:
            self._reply(200, completion(answer))

    def _session(self) -> Session:
        _, _, place = self.path.partition("?")[0].partition("/")
        name, _, path = place.partition("/")
        session = self.endpoint.sessions.get(name)
        if session is None or path != "v1/chat/completions":
            raise RefusedRequest(404, "not_found", f"there is nothing at {self.path}")
        return session

    def _content(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            text = f"Content-Length is {length!r}: it takes a number up to {MOST_BYTES:,}"
            raise RefusedRequest(413 if length.isdecimal() else 411, "wrong_length", text)
        return self.rfile.read(int(length))

    def _request(self, content: bytes) -> Json:
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise RefusedRequest(400, "invalid_json", "the request is not valid JSON") from None
        messages = body.get("messages") if isinstance(body, dict) else None
        if not (isinstance(messages, list) and messages and all(map(is_turn, messages))):
            raise RefusedRequest(400, "no_messages", "the request has no list of messages")
        return body

    def _reply(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def is_turn(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def completion(message: Message) -> Json:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call in message.get("tool_calls") or []
        for arguments in [call["function"]["arguments"]]
    ]
    turn = {"role": "assistant", "content": message.get("content") or ""}
    choice = {
        "index": 0,
        "message": turn | ({"tool_calls": calls} if calls else {}),
        "finish_reason": message.get(CUT) or ("tool_calls" if calls else "stop"),
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def chunks(message: Message) -> list[Json]:
    """Return a model's turn as the two chunks of a stream: all of it, and its end."""
    whole = completion(message)
    [choice] = whole.pop("choices")
    del whole["usage"]
    delta = choice["message"]
    for i, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = i
    common = whole | {"object": "chat.completion.chunk"}
    return [
        common | {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        for part, reason in ((delta, None), ({}, choice["finish_reason"]))
    ]


@dataclass
class ProgramEnvironment(Environment):
    """A program that asks the model. program: called with an address and the row.

    It returns the reward, or an awaitable of it.
    """

    rewards: ClassVar[bool] = True
    program: Callable[..., Any] | None = None
    session: Session = field(default_factory=Session)
    seen: list[Message] = field(default_factory=list)
    answers: int = 0
    tools: list[Json] | None = None
    ended: ProgramEnd | None = None

    def reset(self, row: Json) -> Start:
        """Raises RuntimeError if the program ends without a request."""
        address = endpoint_of_process().address(self.session)
        threading.Thread(target=self._work, args=(address, row), daemon=True).start()
        body = self._next_request()
        if body is None:
            raise RuntimeError(f"the program asked the model nothing{why(self.ended)}")
        self.seen, self.tools = list(body["messages"]), body.get("tools")
        return [as_turn(message) for message in self.seen], self.tools

    def step(self, messages: list[Message]) -> Reply:
        """See Environment. Raises ValueError for a conversation with other earlier turns."""
        self.session.answer(messages[-1])
        self.answers += 1
        body = self._next_request()
        if body is None:
            return [], True
        conversation = list(body["messages"])
        require_same_beginning([*self.seen, messages[-1]], conversation)
        if body.get("tools") != self.tools:
            raise ValueError("the program has other tools than at the beginning")
        new = conversation[len(self.seen) + 1 :]
        if not new:
            raise ValueError("the program asked for another answer to the same turns")
        self.seen = conversation
        return [as_turn(message) for message in new], False

    def reward(self, messages: list[Message]) -> Any:
        """See Environment.

        A program that still waits gets the last answer if this was cut, and is then told that there
        is none.
        """
        own = [turn for turn in messages if turn["role"] == "assistant"]
        rest: list[Message | None] = [{**turn, CUT: "length"} for turn in own[self.answers :]]
        while self.ended is None:
            self.session.answer(rest.pop(0) if rest else None)
            self._next_request()
        if self.ended.error is not None:
            raise self.ended.error
        return self.ended.value

    def close(self) -> None:
        self.session.answer(None)
        endpoint_of_process().close(self.session)

    def _work(self, address: str, row: Json) -> None:
        assert self.program
        try:
            value = self.program(address, row)
            value = asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
            self.session.requests.put(ProgramEnd(value))
        except Exception as error:  # of the user's program
            self.session.requests.put(ProgramEnd(error=error))

    def _next_request(self) -> Json | None:
        request = self.session.requests.get()
        if isinstance(request, ProgramEnd):
            self.ended = request
            return None
        return request


@dataclass
class UserProgram(ProgramEnvironment):
    """A function of the user's, which asks the model through OpenAI's interface."""

    name: ClassVar[str] = "endpoint"
    code: ClassVar[str] = "run"
    names_code: ClassVar[tuple[str, ...]] = ("run",)
    run: str = key(
        "", "FILE.py:FUNCTION of your own, called with an address like OpenAI's and the row"
    )

    def wrong_settings(self) -> str | None:
        if not self.run:
            return "lacks the program, as in  {name: endpoint, run: my_agent.py:rollout}"
        return None


async def _awaited(value: Any) -> Any:
    return await value


def why(ended: ProgramEnd | None) -> str:
    error = ended.error if ended else None
    return f": {type(error).__name__}: {error}" if error else ""


def as_turn(message: Message) -> Message:
    """Return a message of a request as a turn: its text in one piece, arguments as objects."""
    turn = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": as_object(call)}}
            for call in calls
        ]
    return turn


def as_object(call: Json) -> Any:
    arguments = call["function"].get("arguments") or "{}"
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def require_same_beginning(before: list[Message], conversation: list[Message]) -> None:
    """Raise ValueError unless a conversation goes on from earlier turns.

    The model's own are compared by their role: programs write tool calls in different forms.
    """
    there = conversation[: len(before)]
    same = len(there) == len(before) and all(
        old["role"] == new.get("role")
        and (old["role"] == "assistant" or text_of(old.get("content")) == text_of(new["content"]))
        for old, new in zip(before, there, strict=True)
    )
    if not same:
        raise ValueError(
            "the program changed earlier turns of the conversation, which were generated already"
        )
