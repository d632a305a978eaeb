"""The choice of the next token, from logits and one random number for each row."""

import hashlib
from dataclasses import dataclass

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
    if sampling.top_p == 1:
        return drawn(probabilities, numbers)
    probabilities, tokens = probabilities.sort(descending=True, stable=True)
    # the token that crosses top_p is kept
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    return tokens.gather(1, drawn(probabilities, numbers)[:, None])[:, 0]


def log_probabilities(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities of tokens at the sampling's temperature, [rows] float32.

    logits: [rows, vocabulary]; tokens: [rows]. Temperature 0 counts as 1; top_p is ignored.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    return torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]


def drawn(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the column of each row that its number selects, never one of probability 0."""
    below = probabilities.cumsum(-1)
    column = torch.searchsorted(below, numbers * below[:, -1:], right=True)[:, 0]
    last = (probabilities > 0).int().cumsum(-1).argmax(-1)
    return torch.minimum(column, last)
