"""The addresses of a model that writes no text: embeddings, ranked documents, and classes.

Requests and answers are those of OpenAI's embeddings, of Jina's and Cohere's rerank, and of vLLM's
classify.
"""

import asyncio
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from fsdp_trainer.apps.chat.app import Answer, AnsweringModel, body_of, require_model
from fsdp_trainer.apps.chat.encoded_prompts import CHARACTERS_PER_TOKEN
from fsdp_trainer.apps.chat.http_answers import POLL_SECONDS, error_response
from fsdp_trainer.apps.chat.requests import (
    MAX_PROMPTS,
    BadRequest,
    flag,
    integer,
    read_parts,
    read_prompts,
    refuse_others,
    require_characters,
)
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.checkpoint.load import endpoint_of
from fsdp_trainer.data.records.texts_with_media import MarkedText
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.labels import MULTI
from fsdp_trainer.methods.text_reader import Text, TextReader, Texts
from fsdp_trainer.training.documents.read_texts import Tokens

MOST_TOKENS = 300_000
"""Tokens of a request, as in OpenAI's API."""
CUT = "truncate_prompt_tokens"
"""Key for the number of tokens that longer texts are cut to; -1: the model's context."""
FLOAT, BASE64 = "float", "base64"
"""Forms of an embedding: a list, or the bytes of its numbers as little-endian float32."""


@dataclass(frozen=True)
class ServedReader(AnsweringModel):
    """A model that reads texts, and the thread that computes requests one after another."""

    reader: TextReader
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reader"))

    @property
    def answers(self) -> dict[str, Answer]:
        config = self.reader.model.config
        own: dict[str, Compute] = {}
        if config.pooling:
            own = {"/v1/embeddings": embeddings}
        if config.pooling or endpoint_of(config) == "/v1/rerank":
            own |= dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), rerank)
        else:
            own = dict.fromkeys(("/v1/classify", "/classify"), classify)
        return {
            path: partial(answer, served=self, compute=compute) for path, compute in own.items()
        }

    @property
    def kind(self) -> str:
        return "a model of scores or embeddings, which writes no text"

    def page(self) -> Response:
        return PlainTextResponse(f"{self.name} is {self.kind}: POST {self.offer}\n")

    def close(self) -> None:
        self.worker.shutdown(wait=False, cancel_futures=True)


Compute = Callable[[ServedReader, Any], Json]
"""Returns the answer to the JSON of a request. Raises BadRequest."""


async def answer(request: Request, served: ServedReader, compute: Compute) -> Response:
    """Answer a request; one that waits is forgotten if its client goes away."""
    work = asyncio.wrap_future(served.worker.submit(compute, served, await body_of(request)))
    while not (await asyncio.wait([work], timeout=POLL_SECONDS))[0]:
        if await request.is_disconnected():
            work.cancel()
            raise ClientDisconnect
    if work.cancelled():
        return error_response(503, "the server is closing")
    return JSONResponse(work.result())


def embeddings(served: ServedReader, body: Any) -> Json:
    own = ("input", "dimensions", "encoding_format", "prompt_name")
    limit = begin(served, body, own)
    reader, hidden = served.reader, served.reader.model.config.hidden_size
    width = integer(body, "dimensions", hidden, 1, hidden)
    form = body.get("encoding_format") or FLOAT
    if form not in (FLOAT, BASE64):
        raise BadRequest(f"'encoding_format' should be {FLOAT} or {BASE64}", "encoding_format")
    tokens = read_embedded(body, reader, limit)
    vectors = reader.vectors(checked(tokens, "input", reader), width)
    rows = vectors.numpy().astype("<f4")
    data = [
        {"object": "embedding", "index": i, "embedding": written(row, form)}
        for i, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": served.name, "usage": usage(tokens)}


def read_embedded(body: Json, reader: TextReader, limit: int | None) -> Tokens:
    """Return the tokens of the inputs: texts, texts in parts, or tokens. Raises BadRequest."""
    given = body.get("input")
    inputs = given if isinstance(given, list) else [given]
    if not any(isinstance(one, dict) for one in inputs):
        prompts = read_prompts(given, reader.tokenizer.vocab_size, "input")
        if not isinstance(prompts[0], str):
            return [ids[:limit] for ids in prompts if not isinstance(ids, str)]
        inputs = [*prompts]
    elif len(inputs) > MAX_PROMPTS:
        raise BadRequest(f"'input' should be a text or 1 to {MAX_PROMPTS:,} of them", "input")
    texts = [checked_text(text, "input", reader, limit) for text in inputs]
    return encoded(partial(reader.encode, texts, read_prompt(body, reader), limit), "input")


def written(row: np.ndarray, form: str) -> list[float] | str:
    """Return an embedding in the form of an answer. row: [width] float32."""
    return row.tolist() if form == FLOAT else b64encode(row.tobytes()).decode()


def read_prompt(body: Json, reader: TextReader) -> str:
    """Return the prompt that a request names. Raises BadRequest."""
    name = body.get("prompt_name")
    if name is None:
        return ""
    if not isinstance(name, str) or name not in reader.prompts:
        known = ", ".join(reader.prompts) or "none"
        raise BadRequest(f"'prompt_name' should be one of the model's: {known}", "prompt_name")
    return reader.prompts[name]


def rerank(served: ServedReader, body: Any) -> Json:
    """Return documents, those that answer a query best first. Raises BadRequest."""
    limit = begin(served, body, ("query", "documents", "top_n", "return_documents"))
    reader = served.reader
    query = checked_text(body.get("query"), "query", reader, limit)
    given = body.get("documents")
    if not isinstance(given, list) or not 0 < len(given) <= MAX_PROMPTS:
        reason = f"'documents' should be a list of 1 to {MAX_PROMPTS:,} texts"
        raise BadRequest(reason, "documents")
    inner = [one.get("text", one) if isinstance(one, dict) else one for one in given]
    documents = [checked_text(text, "documents", reader, limit) for text in inner]
    pairs = 0 if reader.model.config.pooling else len(documents)
    if len(characters(query)) * pairs > CHARACTERS_PER_TOKEN * MOST_TOKENS:
        reason = f"'query' is read with each of {pairs:,} documents, and is too long for"
        raise BadRequest(f"{reason} so many: send fewer", "query", code="context_length_exceeded")
    ranked = encoded(partial(reader.encode_ranked, query, documents, limit), "documents")
    tokens = checked(ranked, "documents", reader)
    scores = reader.relevance(tokens).tolist()
    shows = body.get("return_documents") is None or flag(body, "return_documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": shown_document(given[i])} if shows else {})
        for i in order[: integer(body, "top_n", len(order), 1, 10**9)]
    ]
    return {"id": f"rerank-{secrets.token_hex(12)}", "model": served.name} | {
        "results": results,
        "usage": usage(tokens),
    }


def classify(served: ServedReader, body: Any) -> Json:
    """Return the probabilities of texts' labels, or their numbers. Raises BadRequest."""
    limit = begin(served, body, ("input",))
    reader, given = served.reader, body.get("input")
    inputs = given if isinstance(given, list) else [given]
    if not 0 < len(inputs) <= MAX_PROMPTS:
        raise BadRequest(f"'input' should be a text or 1 to {MAX_PROMPTS:,} of them", "input")
    texts = [read_classified(one, reader, limit) for one in inputs]
    tokens = checked(encoded(partial(reader.encode, texts, limit=limit), "input"), "input", reader)
    config = reader.model.config
    data: list[Json] = []
    for index, values in enumerate(reader.probabilities(tokens)):
        probs = values.tolist()
        best = config.labels[int(values.argmax())]
        one: Json = {"index": index, "label": best, "probs": probs, "num_classes": len(probs)}
        if config.problem == MULTI:
            named = zip(config.labels, probs, strict=True)
            one["labels"] = [name for name, value in named if value > 0.5]
        data.append(one)
    about: Json = {"id": f"classify-{secrets.token_hex(12)}", "object": "list"}
    about |= {"created": int(time.time()), "model": served.name}
    return about | {"data": data, "usage": usage(tokens)}


def read_classified(value: Any, reader: TextReader, limit: int | None) -> Texts:
    """Return a text, or two that are read together: a list of them. Raises BadRequest."""
    if isinstance(value, list) and len(value) == 2:
        first, second = (checked_text(text, "input", reader, limit) for text in value)
        return first, second
    return checked_text(value, "input", reader, limit)


# --- what all of them check -----------------------------------------------------------------------


def begin(served: ServedReader, body: Any, keys: Sequence[str]) -> int | None:
    """Check a request's keys and model; return the tokens that texts are cut to, None: not.

    Raises BadRequest.
    """
    refuse_others(body, ("model", CUT, *keys))
    model = body.get("model")
    if not (model is None or isinstance(model, str)):
        raise BadRequest("'model' should be a text", "model")
    require_model(model, served)
    if body.get(CUT) is None:
        return None
    context = served.reader.context
    limit = integer(body, CUT, -1, -1, context)
    return context if limit < 1 else limit


def encoded(encode: Callable[[], Tokens], key: str) -> Tokens:
    """Return the tokens of texts. Raises BadRequest for images that cannot be read."""
    try:
        return encode()
    except UserError as error:
        raise BadRequest(f"{key!r}: {error.problems[0].reason}", key) from None


def shown_document(given: Any) -> Json:
    return given if isinstance(given, dict) else {"text": given}


def characters(text: Text) -> str:
    return text.text if isinstance(text, MarkedText) else text


def checked_text(value: Any, key: str, reader: TextReader, limit: int | None) -> Text:
    """Return a text that is not empty, and not far too long. Raises BadRequest.

    value: a text, or {"content": parts} with images as data URLs. limit: tokens that it is cut to;
    None: it is not.
    """
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        text, media = read_parts(value["content"], key)
        whole = checked_text(text, key, reader, limit)
        return MarkedText(characters(whole), tuple(media)) if media else whole
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{key!r} should be text, and not empty", key)
    require_characters(value, key)
    longest = CHARACTERS_PER_TOKEN * reader.context
    if len(value) > longest and limit is None:
        raise too_long(f"{len(value):,} characters", key, reader)
    return value[:longest]


def checked(tokens: Tokens, key: str, reader: TextReader) -> Tokens:
    """Return the tokens of texts if the model reads so many. Raises BadRequest."""
    longest, total = max(map(len, tokens)), sum(map(len, tokens))
    if longest > reader.context:
        raise too_long(f"{longest:,} tokens", key, reader)
    if total > MOST_TOKENS:
        reason = f"{key!r} has {total:,} tokens, and a request at most {MOST_TOKENS:,}: send fewer"
        raise BadRequest(reason, key, code="context_length_exceeded")
    if not min(map(len, tokens)):
        raise BadRequest(f"{key!r} holds a text without tokens", key)
    return tokens


def too_long(size: str, key: str, reader: TextReader) -> BadRequest:
    reason = f"{key!r} holds a text of {size}, and the model reads {reader.context:,} tokens: send"
    reason = f"{reason} a shorter one, or  {CUT!r}: -1  to have it cut"
    return BadRequest(reason, key, code="context_length_exceeded")


def usage(tokens: Tokens) -> Json:
    count = sum(map(len, tokens))
    return {"prompt_tokens": count, "total_tokens": count}
