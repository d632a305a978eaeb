"""Tokens of a text and their positions in it; the patterns by which tokenizers split a text."""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

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

    def cut(self, start: int | None = None, stop: int | None = None) -> "Encoding":
        return Encoding(self.ids[start:stop], self.starts[start:stop], self.ends[start:stop])

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


def joins_anywhere(backend: Tokenizer) -> bool:
    """Return whether overlapping pieces of a text can be joined at any token that both contain.

    This holds for BPE that splits at single characters or not at all. A merge across the boundary
    of two neighbouring tokens would also happen if these two were the complete text, and vice
    versa. So tokens are those of the complete text if every two neighbours are the tokens of their
    own text.
    """
    saved = json.loads(backend.to_str())
    pre, model = saved["pre_tokenizer"] or {"type": "Metaspace"}, saved["model"]
    only_metaspace = all(
        step["type"] == "Metaspace" and not step["split"]
        for step in pre.get("pretokenizers", [{"type": ""}])
    )
    cuts_nothing = pre["type"] == "ByteLevel" and not pre["use_regex"]
    at_a_space = pre["type"] == "Split" and pre["pattern"] == {"String": " "}
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and (pre["type"] == "Metaspace" or only_metaspace or cuts_nothing or at_a_space)
    )
