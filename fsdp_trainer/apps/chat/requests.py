"""Reading and checking of requests for OpenAI's chat and text completions.

A key that is not known is refused, and so is a value that would change the answer and is not
served: nothing that a client asks for is ignored.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.images import Image, image_of
from fsdp_trainer.data.records.media import HELD, MARK
from fsdp_trainer.data.records.messages import tool_call
from fsdp_trainer.generation.sampling import Sampling

LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")
MAX_STOPS = 64
MAX_ALTERNATIVES = 20
MAX_PROMPTS = 2048
"""Prompts of a request, as in OpenAI's API."""
TEXT_TOKENS = 16
"""Longest text completion of a request that names none, as in OpenAI's API."""
KEYS = table_beside(__file__)


@dataclass(eq=False)
class BadRequest(Exception):
    """A request that cannot be answered.

    message: of the error. param: the key that caused it or None. status: of HTTP. code: OpenAI's.
    """

    message: str
    param: str | None
    status: int = 400
    code: str | None = None


@dataclass(frozen=True)
class ChatDefaults:
    """Values for settings that a request leaves out. rows: the largest `n`.

    vocabulary: number of token ids of the model.
    """

    temperature: float
    top_p: float
    max_tokens: int
    rows: int
    vocabulary: int = 1 << 31


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by which the answers to a request are made and sent.

    seed: None: another one each time. stops: texts that end an answer. stop_tokens: tokens that do,
    beside the model's own, which do not with ignores_end. alternatives: see Sampling.
    """

    sampling: Sampling
    seed: int | None
    stops: list[str]
    stop_tokens: frozenset[int]
    ignores_end: bool
    stream: bool
    include_usage: bool
    model: str | None


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next turn of a conversation, or for more of its last one.

    asks: the text for the beginning of an answer follows the turns. goes_on: the last turn goes on.
    template_args: further variables of the chat template.
    """

    settings: AnswerSettings
    messages: list[Json]
    asks: bool = True
    goes_on: bool = False
    template_args: Json | None = None


@dataclass(frozen=True)
class TextRequest:
    """A request for the texts that follow prompts: texts or tokens.

    echo: the prompts are a part of the answers. with_specials: tokens such as bos are added.
    """

    settings: AnswerSettings
    prompts: list[str] | list[list[int]]
    echo: bool
    with_specials: bool


def read_request(body: Any, defaults: ChatDefaults) -> ChatRequest:
    refuse_others(body, (*KEYS["sampling"], *KEYS["of chats"]))
    longest = read_longest(body, defaults.max_tokens)
    alternatives = None
    if flag(body, "logprobs"):
        alternatives = integer(body, "top_logprobs", 0, 0, MAX_ALTERNATIVES)
    elif body.get("top_logprobs"):
        raise BadRequest("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    goes_on = flag(body, "continue_final_message")
    asks = body.get("add_generation_prompt")
    if goes_on and flag(body, "add_generation_prompt"):
        reason = "'continue_final_message' and 'add_generation_prompt' cannot both be true"
        raise BadRequest(reason, "continue_final_message")
    return ChatRequest(
        read_settings(body, defaults, longest, alternatives),
        read_messages(body.get("messages")),
        not goes_on and (asks is None or flag(body, "add_generation_prompt")),
        goes_on,
        read_template_args(body),
    )


def read_text_request(body: Any, defaults: ChatDefaults) -> TextRequest:
    refuse_others(body, (*KEYS["sampling"], *KEYS["of texts"]))
    echo = flag(body, "echo")
    longest = integer(body, "max_tokens", TEXT_TOKENS, 0 if echo else 1, 10**9)
    alternatives = None
    if body.get("logprobs") is not None:
        alternatives = integer(body, "logprobs", 0, 0, MAX_ALTERNATIVES)
    special = body.get("add_special_tokens")
    return TextRequest(
        read_settings(body, defaults, longest, alternatives),
        read_prompts(body.get("prompt"), defaults.vocabulary),
        echo,
        special is None or flag(body, "add_special_tokens"),
    )


def refuse_others(body: Any, served: Collection[str]) -> None:
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object", None)
    for key, value in body.items():
        if key in served or key in KEYS["names"]:
            continue
        if key not in KEYS["not served"]:
            near = nearest(key, [*served, *KEYS["not served"]])
            message = f"there is no setting {key!r}" + (f": did you mean {near!r}?" if near else "")
            raise BadRequest(message, key, code="unknown_parameter")
        is_neutral = key == "best_of" and value == body.get("n", 1)
        if not (is_neutral or changes_nothing(key, value)):
            message = f"{key!r} is not served here: leave it out"
            raise BadRequest(message, key, code="unsupported_parameter")


def changes_nothing(key: str, value: Any) -> bool:
    is_empty = value is None or not (value or key in KEYS["meant"])
    return is_empty or value in KEYS["not served"][key]


def read_settings(
    body: Json, defaults: ChatDefaults, longest: int, alternatives: int | None
) -> AnswerSettings:
    """Return the settings that both interfaces have. Raises BadRequest."""
    samples = integer(body, "n", 1, 1, defaults.rows)
    seed = None if body.get("seed") is None else integer(body, "seed", 0, -(2**63), 2**63)
    sampling = Sampling(
        longest,
        number(body, "temperature", defaults.temperature, 0, 100),
        number(body, "top_p", defaults.top_p, 0, 1) or 1e-9,
        samples=samples,
        top_k=max(0, integer(body, "top_k", 0, -1, 10**9)),
        min_p=number(body, "min_p", 0, 0, 1),
        repetition_penalty=number(body, "repetition_penalty", 1, 1e-6, 100),
        frequency_penalty=number(body, "frequency_penalty", 0, -2, 2),
        presence_penalty=number(body, "presence_penalty", 0, -2, 2),
        min_tokens=integer(body, "min_tokens", 0, 0, longest),
        logit_bias=read_bias(body.get("logit_bias"), defaults.vocabulary),
        alternatives=alternatives,
    )
    model = body.get("model")
    if not (model is None or isinstance(model, str)):
        raise BadRequest("'model' should be a text", "model")
    stops = read_tokens(body, "stop_token_ids", defaults.vocabulary)
    return AnswerSettings(
        sampling,
        seed,
        read_stops(body.get("stop")),
        frozenset(stops),
        flag(body, "ignore_eos"),
        flag(body, "stream"),
        read_stream_options(body.get("stream_options")),
        model,
    )


def read_longest(body: Json, default: int) -> int:
    """Return the largest number of tokens of an answer. Raises BadRequest."""
    older = integer(body, "max_tokens", default, 1, 10**9)
    longest = integer(body, "max_completion_tokens", older, 1, 10**9)
    if body.get("max_tokens") is not None and longest != older:
        reason = "'max_tokens' and 'max_completion_tokens' differ: leave one of them out"
        raise BadRequest(reason, "max_tokens")
    return longest


def read_stream_options(value: Any) -> bool:
    """Return True if the last event of a stream has the numbers of tokens. Raises BadRequest."""
    options = {} if value is None else value
    if not isinstance(options, dict):
        raise BadRequest("'stream_options' should be an object", "stream_options")
    for key, part in options.items():
        if key != "include_usage" and part:
            raise BadRequest(f"'stream_options' has {key!r}, which is not served", "stream_options")
    return flag(options, "include_usage")


def read_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Return tokens and what is added to their logits. Raises BadRequest."""
    biases: dict[int, float] = {}
    for token, bias in value.items() if isinstance(value, dict) else []:
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        is_id = token.isdecimal() and len(token) < 20 and int(token) < vocabulary
        if not (is_number and is_id and -100 <= bias <= 100):
            reason = "'logit_bias' should have ids of tokens, each with a number from -100 to 100"
            raise BadRequest(f"{reason}; it has {token!r}: {bias!r}", "logit_bias")
        biases[int(token)] = float(bias)
    if value and not biases:
        raise BadRequest("'logit_bias' should be an object", "logit_bias")
    return tuple(biases.items())


def read_tokens(body: Json, key: str, vocabulary: int) -> list[int]:
    """Return a list of token ids of the body, empty for null. Raises BadRequest."""
    ids = body.get(key) or []
    if not isinstance(ids, list) or not all(is_token(id, vocabulary) for id in ids):
        raise BadRequest(f"{key!r} should be a list of token ids below {vocabulary:,}", key)
    return ids


def is_token(value: Any, vocabulary: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary


def read_prompts(value: Any, vocabulary: int, key: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts of a request: texts, or the tokens of each. Raises BadRequest."""
    prompts = value if isinstance(value, list) else [value]
    if prompts and type(prompts[0]) is int:
        prompts = [prompts]
    are_texts = all(isinstance(one, str) and one for one in prompts)
    are_tokens = all(is_text_of_tokens(one, vocabulary) for one in prompts)
    if not prompts or not (are_texts or are_tokens):
        reason = f"{key!r} should be a text, its token ids, or a list of either, and none empty"
        raise BadRequest(reason, key)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"{key!r} has {len(prompts):,} of them: at most {MAX_PROMPTS:,}", key)
    for one in prompts if are_texts else []:
        require_characters(one, key)
    return prompts


def is_text_of_tokens(value: Any, vocabulary: int) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(is_token(id, vocabulary) for id in value)


def read_template_args(body: Json) -> Json | None:
    """Return the variables for the chat template, None without any. Raises BadRequest."""
    value = body.get("chat_template_kwargs") or {}
    if not isinstance(value, dict):
        raise BadRequest("'chat_template_kwargs' should be an object", "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if not (effort is None or isinstance(effort, str)):
        raise BadRequest("'reasoning_effort' should be a text", "reasoning_effort")
    return value | ({"reasoning_effort": effort} if effort else {}) or None


def read_messages(value: Any) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' should be a list of turns, with one at least", "messages")
    return [read_turn(turn, place) for place, turn in enumerate(value)]


def read_turn(turn: Any, place: int) -> Json:
    """Return role, text and images of a turn, which may be in parts. Raises BadRequest."""
    where = f"messages[{place}]"
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadRequest(f"{where} should be an object with a role and a content", "messages")
    if turn["role"] not in KEYS["roles"]:
        known = ", ".join(KEYS["roles"])
        raise BadRequest(f"{where} has the role {turn['role']!r}; served are {known}", "messages")
    others = read_others(turn, where)
    content, images = turn.get("content"), list[Image]()
    if isinstance(content, list):
        content, images = read_parts(content, where)
    if content is None and "tool_calls" in others:
        content = ""
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content should be a text", "messages")
    read = {"role": KEYS["roles"][turn["role"]], "content": content, **others}
    require_characters(json.dumps(read, ensure_ascii=False), where)
    return read | ({HELD: images} if images else {})


def read_others(turn: Json, where: str) -> Json:
    """Return the further parts of a turn, without empty ones. Raises BadRequest."""
    others = {key: turn[key] for key in turn if key not in ("role", "content") and turn[key]}
    if others.get("type") in ("text", "message"):  # lm-evaluation-harness's and OpenAI's
        del others["type"]
    for key in others:
        if key not in KEYS["of turns"]:
            raise BadRequest(f"{where} has {key!r}, which is not served", "messages")
    if reasoning := others.pop("reasoning", None):
        others.setdefault("reasoning_content", reasoning)
    if not isinstance(others.get("reasoning_content", ""), str):
        raise BadRequest(f"{where}.reasoning_content should be a text", "messages")
    if calls := others.get("tool_calls"):
        try:
            others["tool_calls"] = [tool_call(call) for call in calls]
        except (RecordError, TypeError) as error:
            raise BadRequest(f"{where}.tool_calls: {error}", "messages") from None
    return others


def require_characters(text: str, where: str) -> None:
    """Raise BadRequest for a text with half a character, as JSON can write it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{where} holds half a character", where.partition("[")[0]) from None


def read_parts(content: list[Any], where: str) -> tuple[str, list[Image]]:
    """Return a text in parts with a MARK for each image, and the images. Raises BadRequest."""
    images = [read_image(part, where) for part in content if is_image(part)]
    parts = [MARK if is_image(part) else text_of_part(part, where) for part in content]
    return "".join(parts), images


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def text_of_part(part: Any, where: str) -> str:
    is_text = isinstance(part, dict) and part.get("type", "text") in ("text", "input_text")
    text = part.get("text") if is_text else None
    if not isinstance(text, str):
        raise BadRequest(f"{where} holds a part that is neither a text nor an image", "messages")
    return text


def read_image(part: Json, where: str) -> Image:
    """Return the image of a part. Raises BadRequest.

    Only a data URL is read: a client must not make the server open files or other addresses.
    """
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    detail = value.get("detail") if isinstance(value, dict) else None
    if detail not in (None, "auto"):
        raise BadRequest(f"{where}: the detail {detail!r} of an image is not served", "messages")
    if not isinstance(url, str) or not url.startswith("data:"):
        reason = f"{where}: an image should be a data URL, as data:image/png;base64,…"
        raise BadRequest(reason, "messages")
    try:
        return image_of(url)
    except RecordError as error:
        raise BadRequest(f"{where}: {error}", "messages") from None


def read_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    are_texts = isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)
    if not are_texts or len(stops) > MAX_STOPS:
        raise BadRequest(f"'stop' should be a text or up to {MAX_STOPS} of them", "stop")
    return [stop for stop in stops if stop]


def number(body: Json, key: str, default: float, low: float, high: float) -> float:
    """Return a number of the body, the default for null. Raises BadRequest if out of bounds."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{key!r} should be a number from {low:g} to {high:g}", key)
    return float(value)


def integer(body: Json, key: str, default: int, low: int, high: int) -> int:
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
    if not (value is None or isinstance(value, bool)):
        raise BadRequest(f"{key!r} should be true or false", key)
    return bool(value)
