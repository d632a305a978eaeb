"""The web application: the page, and `/v1/models` and `/v1/chat/completions` as OpenAI's API."""

import asyncio
import json
import secrets
import time
from base64 import b64encode
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fsdp_trainer.apps.chat.engine import AnswerPiece, ChatJob, Engine, EngineError, Event
from fsdp_trainer.apps.chat.requests import (
    LOCAL_ADDRESSES,
    BadRequest,
    ChatDefaults,
    ChatRequest,
    read_request,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.prompt_images import PromptImages
from fsdp_trainer.generation.sampling import Sampling

HERE = Path(__file__).parent
POLL_SECONDS = 0.25
"""Seconds between two checks that a client is still connected while nothing is sent to it."""
MAX_REQUEST_BYTES = 16 << 20
CHARACTERS_PER_TOKEN = 100
"""A conversation with more characters per token of the context is refused without being encoded,
which would take 20 s for 16 MiB. Text has 3 to 5."""
DISCONNECTED = 499
"""nginx's status code for a client that has disconnected."""


@dataclass(frozen=True)
class Served:
    """The model that the application serves.

    token: required of requests; None: no token is. encoder: the thread that renders and encodes
    conversations, so that all connections are served meanwhile.
    """

    name: str
    engine: Engine
    defaults: ChatDefaults
    token: str | None
    created: int
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encoder"))


class AccessGuard:
    """Middleware that accepts requests with the token, or without one those to this machine.

    A page of another site could otherwise use the visitor's browser to reach the server.
    """

    def __init__(self, app: ASGIApp, token: str | None):
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 403, or pass the request to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.refusal(Request(scope))
        await (refusal or self.app)(scope, receive, send)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused; None if it is accepted."""
        if self.token is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            given = given or request.query_params.get("token", "")
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                return error_response(401, "the token is missing or wrong")
            return None
        host = host_of(f"//{request.headers.get('host', '')}")
        origin = request.headers.get("origin")
        origin_host = host_of(origin) if origin else host
        if host not in LOCAL_ADDRESSES or origin_host not in LOCAL_ADDRESSES:
            text = "only requests from this machine are accepted: start with  token=…"
            return error_response(403, text)
        return None


def host_of(url: str) -> str | None:
    """Return the host of a URL; None if there is none or it is malformed."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def make_app(served: Served) -> Starlette:
    """Return the application with its routes and the access guard."""

    async def page(request: Request) -> Response:
        return page_response(served)

    async def models(request: Request) -> Response:
        about = {"id": served.name, "object": "model", "created": served.created}
        return JSONResponse({"object": "list", "data": [about | {"owned_by": "fsdp_trainer"}]})

    async def completions(request: Request) -> Response:
        return await complete(request, served)

    routes = [
        Route("/", page),
        Route("/v1/models", models),
        Route("/v1/chat/completions", completions, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(AccessGuard, token=served.token)])


def error_response(status: int, message: str, param: str | None = None) -> Response:
    """Return an error in the format that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": error}, status)


def page_response(served: Served) -> Response:
    """Return the page with its style and script inline; no other script or fetch is allowed."""
    style, script = ((HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    defaults = served.defaults
    html = (HERE / "page.html").read_text("utf-8")
    for name, value in {
        "name": escape(served.name),
        "temperature": str(defaults.temperature),
        "top_p": str(defaults.top_p),
        "max_tokens": str(defaults.max_tokens),
        "no_images": "" if served.engine.speaker.images else "hidden",
        "style": style,
        "script": script,
    }.items():
        html = html.replace(f"{{{{ {name} }}}}", value)
    allowed = [
        "default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'", "img-src data:",
        f"style-src {hash_of(style)}", f"script-src {hash_of(script)}",
    ]  # fmt: skip
    headers = {"Content-Security-Policy": "; ".join(allowed), "Referrer-Policy": "no-referrer"}
    return HTMLResponse(html, headers=headers)


def hash_of(content: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or a style."""
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


async def complete(request: Request, served: Served) -> Response:
    """Answer a request for the next turn, at once or as a stream."""
    try:
        wanted = read_request(await body_of(request), served.defaults)
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(served.encoder, encode, served, wanted)
    except BadRequest as error:
        return error_response(400, *error.args)
    except ClientDisconnect:
        return Response(status_code=DISCONNECTED)
    answers = Answers(request, served, wanted, *encoded)
    if wanted.stream:
        return StreamingResponse(answers.stream(), media_type="text/event-stream")
    return await answers.at_once()


async def body_of(request: Request) -> Any:
    """Return the JSON of a request. Raises BadRequest."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_REQUEST_BYTES:
            raise BadRequest("the request is too long", None)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON", None) from None


def encode(served: Served, request: ChatRequest) -> tuple[list[int], PromptImages | None]:
    """Return the tokens of the conversation up to the answer, and its images. Raises BadRequest."""
    speaker = served.engine.speaker
    try:
        asked = speaker.ask(request.messages)
        context = speaker.model.config.max_position_embeddings
        if len(asked.text) > CHARACTERS_PER_TOKEN * context:
            reason = f"the prompt is too long: has {len(asked.text):,} characters"
            raise BadRequest(f"{reason}, the model's context {context:,} tokens", "messages")
        return speaker.encode(asked.text), asked.images
    except UserError as error:
        reason = error.problems[0].reason
        raise BadRequest(f"{error.title}: {reason}", "messages") from None


class Answers:
    """The answers to one request, received from the engine piece by piece."""

    def __init__(
        self,
        request: Request,
        served: Served,
        wanted: ChatRequest,
        prompt: list[int],
        images: PromptImages | None = None,
    ):
        self.request = request
        self.served = served
        self.wanted = wanted
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        seed = secrets.randbits(62) if wanted.seed is None else wanted.seed
        sampling = Sampling(wanted.max_tokens, wanted.temperature, wanted.top_p, seed, wanted.n)
        self.job = ChatJob(prompt, sampling, wanted.stops, send, images)
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events up to the end of all answers; closing this generator cancels the job."""
        self.served.engine.submit(self.job)
        remaining = self.wanted.n
        try:
            while remaining:
                event = await self._next()
                yield event
                if isinstance(event, EngineError):
                    return
                remaining -= event.finish is not None
        finally:
            self.job.is_cancelled = True

    async def _next(self) -> Event:
        """Return the next event. Raises ConnectionError if the client has disconnected."""
        while True:
            try:
                return await asyncio.wait_for(self._events.get(), POLL_SECONDS)
            except TimeoutError:
                if await self.request.is_disconnected():
                    raise ConnectionError from None

    async def at_once(self) -> Response:
        """Return all answers at once."""
        texts = [""] * self.wanted.n
        reasons: list[str | None] = [None] * self.wanted.n
        try:
            async with aclosing(self.events()) as events:
                async for event in events:
                    if isinstance(event, EngineError):
                        return error_response(500, event.message)
                    texts[event.index] += event.text
                    reasons[event.index] = event.finish
                    if await self.request.is_disconnected():
                        raise ConnectionError
        except ConnectionError:
            return Response(status_code=DISCONNECTED)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reasons[index],
            }
            for index, text in enumerate(texts)
        ]
        return JSONResponse(
            self.head("chat.completion") | {"choices": choices, "usage": self.usage()}
        )

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield the server-sent events of the answers."""
        for index in range(self.wanted.n):
            yield self.chunk(index, {"role": "assistant", "content": ""}, None)
        with suppress(ConnectionError):
            async with aclosing(self._parts()) as parts:
                async for part in parts:
                    yield part

    async def _parts(self) -> AsyncGenerator[str, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, EngineError):
                    error = {"message": event.message, "type": "server_error"}
                    yield f"data: {json.dumps({'error': error})}\n\n"
                    return
                for chunk in self.chunks(event):
                    yield chunk
        if self.wanted.include_usage:
            last = self.head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}
            yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"

    def chunks(self, piece: AnswerPiece) -> list[str]:
        """Return the server-sent events of a piece of text: one for the text, one for the end."""
        parts = []
        if piece.text:
            parts.append(self.chunk(piece.index, {"content": piece.text}, None))
        if piece.finish:
            parts.append(self.chunk(piece.index, {}, piece.finish))
        return parts

    def chunk(self, index: int, delta: dict[str, str], finish: str | None) -> str:
        """Return one server-sent event."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return f"data: {json.dumps(self.head('chat.completion.chunk') | {'choices': [choice]})}\n\n"

    def head(self, kind: str) -> dict[str, Any]:
        """Return the entries that all response objects of this request share."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
        }

    def usage(self) -> dict[str, int]:
        """Return the number of tokens of the prompt and of all answers."""
        prompt, answer = len(self.job.prompt), self.job.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }
