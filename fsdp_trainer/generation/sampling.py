"""The choice of the next token, from logits and one random number for each row."""

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for continuing prompts.

    temperature: 0: always the likeliest token. top_p: nucleus sampling (Holtzman et al. 2020).
    samples: number of answers to each prompt. log_probabilities: record those of the chosen tokens.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1
    log_probabilities: bool = False
    top_k: int = 0
    """Only the likeliest so many tokens are sampled; 0: all."""
    min_p: float = 0.0
    """Only tokens of at least this share of the largest probability are sampled."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt or answer (Keskar et al. 2019); negative: times."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from the logits of all tokens in the answer."""
    no_repeat_ngram: int = 0
    """No so many tokens in a row occur twice in prompt and answer; 0: they may."""
    min_tokens: int = 0
    """No stop token is chosen before the answer has so many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    alternatives: int | None = None
    """Record scores of each token, with those of so many likeliest tokens; None: do not."""

    @property
    def changes_logits(self) -> bool:
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1, 0, 0) or bool(
            self.no_repeat_ngram or self.min_tokens or self.logit_bias
        )

    @property
    def shared(self) -> "Sampling":
        return replace(self, max_tokens=0, seed=0, samples=1)


class TokenScore(NamedTuple):
    """The log-probability of a token by the model's own logits, and the likeliest tokens."""

    token: int
    value: float
    likeliest: list[tuple[int, float]]


def random_numbers(seed: int, prompt: list[int], sample: int, count: int) -> np.ndarray:
    """Return numbers in [0, 1), one for each token of an answer: [count] float64.

    They depend only on the seed, the prompt and the sample, not on other prompts, the batch or the
    ranks. A larger `count` begins with the same numbers.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}/{prompt}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(generator).random(count)


def choose(logits: Tensor, numbers: Tensor | None, sampling: Sampling) -> Tensor:
    """Return a token for each row, [rows] int64, by inverting the cumulative distribution.

    logits: [rows, vocabulary]; numbers: [rows, 1] float64 in [0, 1), unused at temperature 0.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    assert numbers is not None
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_p == 1 and not (sampling.top_k or sampling.min_p):
        return drawn(probabilities, numbers)
    probabilities, tokens = probabilities.sort(descending=True, stable=True)
    if 0 < sampling.top_k < probabilities.shape[-1]:
        smallest = probabilities[:, sampling.top_k - 1, None]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    # the token that crosses top_p is kept
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p:
        smallest = sampling.min_p * probabilities[:, :1]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0)
    return tokens.gather(1, drawn(probabilities, numbers)[:, None])[:, 0]


def log_probabilities(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities of tokens at the sampling's temperature, [rows] float32.

    logits: [rows, vocabulary]; tokens: [rows]. Temperature 0 counts as 1; top_p is ignored.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    return torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]


def token_scores(logits: Tensor, tokens: Tensor, alternatives: int) -> list[TokenScore]:
    values = torch.log_softmax(logits.float(), -1)
    best = values.topk(min(alternatives, values.shape[-1]), -1)
    columns = tokens.tolist(), values.gather(1, tokens[:, None])[:, 0].tolist()
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    pairs = [list(zip(*row, strict=True)) for row in likeliest]
    return [TokenScore(*each) for each in zip(*columns, pairs, strict=True)]


def drawn(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the column of each row that its number selects, never one of probability 0."""
    below = probabilities.cumsum(-1)
    whole = below[:, -1:].contiguous()
    column = torch.searchsorted(below, numbers * whole, right=True)
    last = torch.searchsorted(below, whole)  # where the sum is whole: a product may round up to it
    return torch.minimum(column, last)[:, 0]
