"""Tokens of a text and their positions in it; the patterns by which tokenizers split a text."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    SUFFIXES
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # also of GPT-4
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")  # of Qwen 2, 2.5 and 3
QWEN_3_5 = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + SUFFIXES
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + SUFFIXES
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Encoding:
    """Tokens of one text, [tokens] int32, and the characters `starts[i]:ends[i]` of each.

    Tokens that are bytes of one character have the same position.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def lower_of_ends(self, values: np.ndarray) -> np.ndarray:
        """Return, for each token, the lower of the values at its first and last character.

        values: [characters + 1].
        """
        last = np.maximum(self.ends - 1, self.starts)
        return np.minimum(values[self.starts], values[last])

    def first_reaching(self, end: int) -> int:
        return int(np.searchsorted(self.ends, end))

    def start_of(self, token: int) -> int:
        return int(self.starts[token])


def encoding_of(encoded: Any) -> Encoding:
    ids = np.array(encoded.ids, dtype=np.int32)
    places = np.fromiter(chain.from_iterable(encoded.offsets), np.int64, 2 * len(ids))
    return Encoding(ids, places[0::2], places[1::2])
