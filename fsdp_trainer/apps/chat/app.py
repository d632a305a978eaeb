"""The web application: the page, and `/v1/…` as OpenAI's API."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fsdp_trainer.apps.chat.encoded_prompts import PromptEncoder
from fsdp_trainer.apps.chat.engine import Engine
from fsdp_trainer.apps.chat.http_answers import DISCONNECTED, Answers, TextAnswers, error_response
from fsdp_trainer.apps.chat.requests import (
    LOCAL_ADDRESSES,
    BadRequest,
    ChatDefaults,
    ChatRequest,
    TextRequest,
    read_request,
    read_text_request,
)
from fsdp_trainer.base.checksum import policy_hash

HERE = Path(__file__).parent
MAX_REQUEST_BYTES = 16 << 20
ReadRequest = Callable[[Any, ChatDefaults], ChatRequest | TextRequest]


Answer = Callable[[Request], Awaitable[Response]]
POSTED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v2/rerank"),
    *("/rerank", "/v1/classify", "/classify"),
)
"""The addresses at which a model of some kind answers."""


@dataclass(frozen=True)
class AnsweringModel:
    """A model that the application serves, of any kind.

    path: another name of it. token: required of requests; None: no token is.
    """

    name: str
    token: str | None
    created: int
    path: str

    @property
    def answers(self) -> dict[str, Answer]:
        """Handlers by address, of those that this model has."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The kind of model, for messages."""
        raise NotImplementedError

    def page(self) -> Response:
        """Return what a browser shows."""
        raise NotImplementedError

    def start(self) -> None:
        """Start what computes answers."""

    def close(self) -> None:
        """End all answers. Any thread may call it, also from a signal handler."""

    def join(self) -> None:
        """Wait for what computes answers, after `close`."""

    @property
    def offer(self) -> str:
        return ", ".join(path for path in self.answers if path.startswith("/v1"))

    async def refuse(self, request: Request) -> Response:
        """Return the answer at an address of models of another kind."""
        return error_response(400, f"{self.name} is {self.kind}: it answers {self.offer}")


@dataclass(frozen=True)
class Served(AnsweringModel):
    """A model that writes text.

    encoder: the thread that renders and encodes prompts, so that all connections are served
    meanwhile.
    """

    engine: Engine
    defaults: ChatDefaults
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encoder"))

    @cached_property
    def prompts(self) -> PromptEncoder:
        return PromptEncoder(self.engine.speaker)

    @property
    def answers(self) -> dict[str, Answer]:
        """Handlers by address: for the next turn, or for more text."""
        readers: dict[str, ReadRequest] = {
            "/v1/chat/completions": read_request,
            "/v1/completions": read_text_request,
        }
        return {path: partial(complete, served=self, read=read) for path, read in readers.items()}

    @property
    def kind(self) -> str:
        return "a language model, which writes text"

    def page(self) -> Response:
        return page_response(self)

    def start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        self.engine.close()

    def join(self) -> None:
        self.engine.join()


@dataclass
class AccessGuard:
    """Middleware that accepts requests with the token, or without one those to this machine.

    A page of another site could otherwise use the visitor's browser to reach the server.
    """

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.refusal(Request(scope))
        await (refusal or self.app)(scope, receive, send)

    def refusal(self, request: Request) -> Response | None:
        if self.token is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            given = given or request.query_params.get("token", "")
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                text = "the token is missing or wrong"
                return error_response(401, text, code="invalid_api_key")
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


def make_app(served: AnsweringModel) -> Starlette:
    about = {"id": served.name, "object": "model", "created": served.created}
    about |= {"owned_by": "fsdp_trainer"}

    async def page(request: Request) -> Response:
        return served.page()

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [about]})

    async def model(request: Request) -> Response:
        require_model(request.path_params["id"], served)
        return JSONResponse(about)

    answers = served.answers
    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{id:path}", model),
        *(Route(path, answers.get(path, served.refuse), methods=["POST"]) for path in POSTED),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(AccessGuard, token=served.token)],
        exception_handlers={
            HTTPException: wrong_path,
            BadRequest: refused,
            ClientDisconnect: unheard,
            Exception: own_fault,
        },
    )


async def wrong_path(request: Request, error: Any) -> Response:
    shown = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        reason = f"not allowed: {shown}. It is served by {error.headers['Allow']}"
        return error_response(405, reason, code="method_not_supported")
    return error_response(error.status_code, f"there is no such address: {shown}")


async def refused(request: Request, error: Any) -> Response:
    return error_response(error.status, error.message, error.param, error.code)


async def unheard(request: Request, error: Exception) -> Response:
    return Response(status_code=DISCONNECTED)


async def own_fault(request: Request, error: Exception) -> Response:
    return error_response(500, f"{type(error).__name__}: {error}")


def page_response(served: Served) -> Response:
    style, script = ((HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    defaults = served.defaults
    html = (HERE / "page.html").read_text("utf-8")
    for name, value in {
        "name": escape(served.name),
        "temperature": str(defaults.temperature),
        "top_p": str(defaults.top_p),
        "max_tokens": str(defaults.max_tokens),
        "no_images": "" if served.engine.speaker.media else "hidden",
        "style": style,
        "script": script,
    }.items():
        html = html.replace(f"{{{{ {name} }}}}", value)
    allowed = [
        "default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'", "img-src data:",
        f"style-src {policy_hash(style)}", f"script-src {policy_hash(script)}",
    ]  # fmt: skip
    headers = {"Content-Security-Policy": "; ".join(allowed), "Referrer-Policy": "no-referrer"}
    return HTMLResponse(html, headers=headers)


async def complete(request: Request, served: Served, read: ReadRequest) -> Response:
    """Answer a request for the next turn, or for more text, at once or as a stream.

    Raises BadRequest and ClientDisconnect, which the application answers.
    """
    wanted = read(await body_of(request), served.defaults)
    require_model(wanted.settings.model, served)
    loop = asyncio.get_running_loop()
    prompts = await loop.run_in_executor(served.encoder, served.prompts.encode, wanted)
    common = request, served.engine, served.name, wanted.settings, prompts
    if isinstance(wanted, TextRequest):
        answers: Answers = TextAnswers(wanted, *common)
    else:
        answers = Answers(*common)
    if wanted.settings.stream:
        return StreamingResponse(answers.stream(), media_type="text/event-stream")
    return await answers.at_once()


def require_model(name: str | None, served: AnsweringModel) -> None:
    """Raise BadRequest if a request names another model.

    The beginning of the name is enough, as is the path that the command named.
    """
    if name and not served.name.startswith(name) and name != served.path:
        message = f"the model {name!r} does not exist: this server has {served.name!r}"
        raise BadRequest(message, "model", 404, "model_not_found")


async def body_of(request: Request) -> Any:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_REQUEST_BYTES:
            raise BadRequest("the request is too long", None)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON", None) from None
