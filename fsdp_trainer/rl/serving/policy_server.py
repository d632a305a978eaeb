"""The client of a vLLM server that answers prompts.

It uses OpenAI's API for answers and vLLM's own API for weights. Imports no torch.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.base.web import RequestFailed, first_line, retried, send

RETRIES = 5
"""Maximum number of retries after a temporary failure of a request: half a minute in all."""
TIMEOUT = 600.0  # seconds; a request may generate a long answer and wait for others
KEY = "VLLM_API_KEY"
"""Environment variable with the server's API key, the same as vLLM's own."""
TOKEN = "token_id:"
"""Prefix of a token that is given by its id (return_tokens_as_token_ids)."""
UNCHANGED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings that keep the model's probabilities unchanged; they override the generation_config.json
that the server reads."""


@dataclass(frozen=True)
class ServedModel:
    """A model that the server serves.

    name: its name in requests. root: its folder or hub id. context: maximum number of tokens of
    prompt and answer together, None if the server does not report it.
    """

    name: str
    root: str
    context: int | None


@dataclass(frozen=True)
class Completion:
    """An answer of the server.

    log_probabilities: log-probability of each token when it was sampled. finished: True if the
    answer ended with a stop token.
    """

    tokens: list[int]
    log_probabilities: list[float]
    finished: bool


@dataclass(frozen=True)
class PolicyServer:
    """A server at an address. Its methods raise RequestFailed."""

    url: str

    def base_models(self) -> list[ServedModel]:
        content = self._ask("/v1/models")
        cards = content.get("data") if isinstance(content, dict) else None
        if not isinstance(cards, list):
            raise RequestFailed("it lists no models", False)
        return [
            ServedModel(card["id"], str(card.get("root") or card["id"]), card.get("max_model_len"))
            for card in cards
            if isinstance(card, dict) and "id" in card and not card.get("parent")
        ]

    def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        self._ask("/v1/load_lora_adapter", body)

    def unload_adapter(self, name: str) -> None:
        self._ask("/v1/unload_lora_adapter", {"lora_name": name})

    def reload_weights(self) -> None:
        """Make the server reload its folder, and drop its cache computed with the old weights."""
        self._ask("/collective_rpc", {"method": "reload_weights"})
        self._ask("/reset_prefix_cache", {})

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_ids: Sequence[int],
    ) -> Completion:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **UNCHANGED,
        }
        return read_completion(self._ask("/v1/completions", body))

    def _ask(self, path: str, body: object = None) -> Any:
        """Send a request; return the response's parsed JSON, or its first line if it is not JSON.

        body: sent by POST as JSON; None: GET.
        """
        token = os.environ.get(KEY, "")
        address = self.url.rstrip("/") + path
        content = retried(lambda: send(address, body, token, TIMEOUT), RETRIES)
        try:
            return json.loads(content or b"null")
        except ValueError:
            return first_line(content)


def read_completion(content: Any) -> Completion:
    """Return the answer in a response of /v1/completions. Raises RequestFailed if it has none."""
    try:
        choice = content["choices"][0]
        given = choice["logprobs"]
        tokens = [int(str(token).removeprefix(TOKEN)) for token in given["tokens"]]
        log_probabilities = [float(value) for value in given["token_logprobs"]]
        finished = choice["finish_reason"] == "stop"
    except (KeyError, IndexError, TypeError, ValueError):
        shown = first_line(json.dumps(content).encode())
        wanted = "its answer lacks tokens by number with their log-probabilities"
        raise RequestFailed(f"{wanted}, as vLLM from 0.6 on gives them: {shown}", False) from None
    if not tokens or len(tokens) != len(log_probabilities):
        raise RequestFailed("its answer has no token, or not one log-probability for each", False)
    return Completion(tokens, log_probabilities, finished)
