"""The answers to a request in the format of OpenAI's API, at once or as a stream."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fsdp_trainer.apps.chat.encoded_prompts import EncodedPrompt
from fsdp_trainer.apps.chat.engine import (
    AnswerPiece,
    ChatJob,
    Engine,
    EngineError,
    Event,
    PromptScores,
    joined,
)
from fsdp_trainer.apps.chat.requests import AnswerSettings, TextRequest
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.tokens.text_stream import TextStream
from fsdp_trainer.generation.sampling import TokenScore

POLL_SECONDS = 0.25
"""Seconds between two checks that a client is still connected while nothing is sent to it."""
DISCONNECTED = 499
"""nginx's status code for a client that has disconnected."""
LEAST = -9999.0
"""The log-probability that stands for minus infinity, which JSON does not have."""


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    """Return an error in the format that OpenAI's clients read."""
    return JSONResponse(error_object(status, message, param, code), status)


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(eq=False)
class Answers:
    """The answers to one request, received from the engine piece by piece.

    They are turns of a conversation; see TextAnswers for others.
    """

    kind, id_prefix = "chat.completion", "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    request: Request
    engine: Engine
    model: str
    settings: AnswerSettings
    prompts: Sequence[EncodedPrompt]

    def __post_init__(self) -> None:
        self.words = TextStream(self.engine.speaker.tokenizer)
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        seed = secrets.randbits(62) if self.settings.seed is None else self.settings.seed
        sampling = replace(self.settings.sampling, seed=seed)
        own = frozenset() if self.settings.ignores_end else self.engine.speaker.tokenizer.stop_ids
        self.jobs = [
            ChatJob(
                prompt.tokens,
                sampling,
                self.settings.stops,
                send,
                prompt.media,
                stop_ids=self.settings.stop_tokens | own,
                first=number * sampling.samples,
                goes_on=prompt.goes_on,
                scores_prompt=self.scores_prompts,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        self.count = len(self.prompts) * sampling.samples
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    scores_prompts = False
    """True if the answers have scores of the prompts."""

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events up to the end of all answers; closing the generator cancels the jobs."""
        for job in self.jobs:
            self.engine.submit(job)
        remaining = self.count
        try:
            while remaining:
                event = await self._next()
                yield event
                if isinstance(event, EngineError):
                    return
                remaining -= isinstance(event, AnswerPiece) and event.finish is not None
        finally:
            for job in self.jobs:
                job.is_cancelled = True

    async def _next(self) -> Event:
        """Return the next event. Raises ConnectionError if the client has disconnected."""
        while True:
            try:
                return await asyncio.wait_for(self._events.get(), POLL_SECONDS)
            except TimeoutError:
                if await self.request.is_disconnected():
                    raise ConnectionError from None

    async def at_once(self) -> Response:
        pieces: list[list[AnswerPiece]] = [[] for _ in range(self.count)]
        of_prompts: dict[int, list[TokenScore | None]] = {}
        try:
            async with aclosing(self.events()) as events:
                async for event in events:
                    if isinstance(event, EngineError):
                        return error_response(500, event.message)
                    if isinstance(event, PromptScores):
                        of_prompts[event.first] = event.scores
                    else:
                        pieces[event.index].append(event)
                    if await self.request.is_disconnected():
                        raise ConnectionError
        except ConnectionError:
            return Response(status_code=DISCONNECTED)
        answers = map(joined, pieces)
        choices = [self.choice(one, of_prompts.get(self.first_of(one), [])) for one in answers]
        return JSONResponse(self.head(self.kind) | {"choices": choices, "usage": self.usage()})

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield the server-sent events of the answers."""
        for index in range(self.count):
            for chunk in self.opening(index):
                yield self.event(chunk)
        with suppress(ConnectionError):
            async with aclosing(self._parts()) as parts:
                async for part in parts:
                    yield part

    async def _parts(self) -> AsyncGenerator[str, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, EngineError):
                    error = error_object(500, event.message)
                    yield f"data: {json.dumps(error)}\n\n"
                    return
                for chunk in self.chunks(event):
                    yield self.event(chunk)
        if self.settings.include_usage:
            last = self.head(self.chunk_kind) | {"choices": [], "usage": self.usage()}
            yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"

    def event(self, choice: Json) -> str:
        return f"data: {json.dumps(self.head(self.chunk_kind) | {'choices': [choice]})}\n\n"

    def opening(self, index: int) -> Iterator[Json]:
        """Yield the first choices of a stream, for an answer of which nothing is known yet."""
        yield self.delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, event: AnswerPiece | PromptScores) -> Iterator[Json]:
        """Yield the choices for an event: one for the text, one for the end."""
        if isinstance(event, PromptScores):
            return
        if event.text or event.scores:
            scores = self.chat_scores(event.scores)
            yield self.delta(event.index, {"content": event.text}, scores, None)
        if event.finish:
            yield self.delta(event.index, {}, None, event.finish)

    def delta(self, index: int, delta: Json, scores: Json | None, finish: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}

    def choice(self, answer: AnswerPiece, prompt: Sequence[TokenScore | None]) -> Json:
        """Return a complete answer. prompt: scores of its prompt, if they are wanted."""
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self.chat_scores(answer.scores),
            "finish_reason": answer.finish,
        }

    def chat_scores(self, scores: Sequence[TokenScore]) -> Json | None:
        """Return the scores of tokens as chats have them; None if they are not wanted."""
        if self.settings.sampling.alternatives is None:
            return None
        content = [
            self.token(score.token, score.value)
            | {"top_logprobs": [self.token(*one) for one in score.likeliest]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def token(self, id: int, value: float) -> Json:
        content = self.words.bytes_of(id)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": max(value, LEAST), "bytes": [*content]}

    def first_of(self, answer: AnswerPiece) -> int:
        """Return the index of the first answer to the same prompt."""
        return answer.index - answer.index % self.settings.sampling.samples

    def head(self, kind: str) -> Json:
        """Return the entries that all response objects of this request share."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        prompt = sum(len(job.prompt) for job in self.jobs)
        answer = sum(job.tokens for job in self.jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }


class TextAnswers(Answers):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, wanted: TextRequest, *args: Any):
        self.echo = wanted.echo
        self.scores_prompts = wanted.echo and wanted.settings.sampling.alternatives is not None
        self.lengths: dict[int, int] = {}  # characters of the answers' texts so far, by index
        super().__init__(*args)

    def text_before(self, index: int) -> str:
        return self.prompts[index // self.settings.sampling.samples].text if self.echo else ""

    def opening(self, index: int) -> Iterator[Json]:
        if self.echo and not self.scores_prompts:
            yield self.part(index, self.text_before(index), [], None)

    def chunks(self, event: AnswerPiece | PromptScores) -> Iterator[Json]:
        if isinstance(event, PromptScores):
            for index in range(event.first, event.first + self.settings.sampling.samples):
                yield self.part(index, self.text_before(index), event.scores, None)
        else:
            yield self.part(event.index, event.text, event.scores, event.finish)

    def choice(self, answer: AnswerPiece, prompt: Sequence[TokenScore | None]) -> Json:
        text = self.text_before(answer.index) + answer.text
        return self.part(answer.index, text, [*prompt, *answer.scores], answer.finish)

    def part(
        self, index: int, text: str, scores: Sequence[TokenScore | None], finish: str | None
    ) -> Json:
        has_scores = self.settings.sampling.alternatives is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self.text_scores(index, text, scores) if has_scores else None,
            "finish_reason": finish,
        }

    def text_scores(self, index: int, text: str, scores: Sequence[TokenScore | None]) -> Json:
        tokens, offsets, likeliest = [], [], []
        first = self.prompts[index // self.settings.sampling.samples].tokens[0]
        start, end = self.lengths.get(index, 0), 0
        for score in scores:
            token = self.text_of(first if score is None else score.token)
            tokens.append(token)
            offsets.append(start + end)
            # the text may have no special tokens
            is_shown = text.startswith(token, end) or token not in self.words.special
            end += len(token) if is_shown else 0
            likeliest.append(None if score is None else self.likeliest(score))
        self.lengths[index] = start + len(text)
        values = [None if score is None else max(score.value, LEAST) for score in scores]
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def likeliest(self, score: TokenScore) -> dict[str, float]:
        values: dict[str, float] = {}
        for id, value in [*score.likeliest, (score.token, score.value)]:
            values.setdefault(self.text_of(id), max(value, LEAST))
        return values

    def text_of(self, id: int) -> str:
        return self.words.bytes_of(id).decode(errors="replace")
