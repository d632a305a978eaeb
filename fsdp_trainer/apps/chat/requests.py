"""Reading and checking of requests for OpenAI's chat completions."""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.images import MARK, Image, image_of

LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")
MAX_STOPS = 4
NOT_SERVED = ("tools", "functions", "logprobs", "top_logprobs", "logit_bias", "audio")
"""Keys of OpenAI's API that are not supported; false, null and empty values are ignored."""


class BadRequest(Exception):
    """A request that cannot be answered. args: the message, and the key that caused it or None."""


@dataclass(frozen=True)
class ChatDefaults:
    """Values for settings that a request leaves out. rows: the largest `n`."""

    temperature: float
    top_p: float
    max_tokens: int
    rows: int


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next turn of a conversation."""

    messages: list[dict[str, Any]]
    temperature: float
    top_p: float
    max_tokens: int
    n: int
    seed: int | None
    stops: list[str]
    stream: bool
    include_usage: bool


def read_request(body: Any, defaults: ChatDefaults) -> ChatRequest:
    """Return the request in a JSON body. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object", None)
    for key in NOT_SERVED:
        if body.get(key):
            raise BadRequest(f"{key!r} is not served here: leave it out", key)
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise BadRequest("answers are text: leave 'response_format' out", "response_format")
    length = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return ChatRequest(
        read_messages(body.get("messages")),
        number(body, "temperature", defaults.temperature, 0, 100),
        number(body, "top_p", defaults.top_p, 1e-6, 1),
        integer(body, length, defaults.max_tokens, 1, 10**9),
        integer(body, "n", 1, 1, defaults.rows),
        None if body.get("seed") is None else integer(body, "seed", 0, -(2**63), 2**63),
        read_stops(body.get("stop")),
        flag(body, "stream"),
        flag(body.get("stream_options") or {}, "include_usage"),
    )


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the turns of a conversation, each with role, text and images. Raises BadRequest."""
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' should be a list of turns, with one at least", "messages")
    return [read_turn(turn, place) for place, turn in enumerate(value)]


def read_turn(turn: Any, place: int) -> dict[str, Any]:
    """Return role, text and images of a turn, which may be in parts. Raises BadRequest."""
    where = f"messages[{place}]"
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadRequest(f"{where} should be an object with a role and a content", "messages")
    content, images = turn.get("content"), []
    if isinstance(content, list):
        images = [read_image(part, where) for part in content if is_image(part)]
        parts = [MARK if is_image(part) else text_of_part(part, where) for part in content]
        content = "".join(parts)
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content should be a text", "messages")
    try:
        (turn["role"] + content).encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{where} holds half a character", "messages") from None
    # `developer` is OpenAI's newer name for the system role
    role = "system" if turn["role"] == "developer" else turn["role"]
    return {"role": role, "content": content} | ({"images": images} if images else {})


def is_image(part: Any) -> bool:
    """Return True for a part of a turn that is an image."""
    return isinstance(part, dict) and part.get("type") == "image_url"


def text_of_part(part: Any, where: str) -> str:
    """Return the text of a part of a turn. Raises BadRequest for anything else."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise BadRequest(f"{where} holds a part that is neither a text nor an image", "messages")
    return text


def read_image(part: dict[str, Any], where: str) -> Image:
    """Return the image of a part. Raises BadRequest.

    Only a data URL is read: a client must not make the server open files or other addresses.
    """
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        reason = f"{where}: an image should be a data URL, as data:image/png;base64,…"
        raise BadRequest(reason, "messages")
    try:
        return image_of(url)
    except RecordError as error:
        raise BadRequest(f"{where}: {error}", "messages") from None


def read_stops(value: Any) -> list[str]:
    """Return the stop strings, up to MAX_STOPS. Raises BadRequest."""
    stops = [value] if isinstance(value, str) else value or []
    are_texts = isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)
    if not are_texts or len(stops) > MAX_STOPS:
        raise BadRequest(f"'stop' should be a text or up to {MAX_STOPS} of them", "stop")
    return [stop for stop in stops if stop]


def number(body: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    """Return a number of the body, the default for null. Raises BadRequest if out of bounds."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{key!r} should be a number from {low:g} to {high:g}", key)
    return float(value)


def integer(body: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    """Return an integer of the body, the default for null. Raises BadRequest if out of bounds."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{key!r} should be a whole number from {low:,} to {high:,}", key)
    return value


def flag(body: Any, key: str) -> bool:
    """Return a boolean of the body, False for null. Raises BadRequest."""
    value = body.get(key) if isinstance(body, dict) else None
    if value not in (None, True, False):
        raise BadRequest(f"{key!r} should be true or false", key)
    return bool(value)
