"""Tokens of words that were met before: where a tokenizer never looks across a space, a text's tokens are those of its words.

GPT-2's way of cutting a text, and those of Llama 3, Qwen and GPT-4o, end every match of their pattern before a space that follows what is no
white space, and look at nothing to its left. So cut there, each piece gives the tokens that it gives within the text. Most words of a text
are met again and again: to look them up takes a quarter of the time.
"""

import json
import re
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

WORD = re.compile(
    r"\s*\S+(?:[^\S ]\s*\S+)*(?:[^\S ]\s*\Z)?|\s+"
)  # up to a space behind what is no white space
CHARACTERS = 1 << 22  # of the words that are kept: some 200 MB
SPACES = 16  # characters for each space: where there are more, as in Chinese, most words are new
AT_ONCE = 1 << 15  # new words that are asked for together
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    SUFFIXES
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # also GPT-4's
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")  # 2, 2.5 and 3
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {LLAMA_3, QWEN, GPT_4O}


@dataclass
class Encoding:
    """Tokens of one text. A token covers the characters `starts[i]:ends[i]`; bytes of one character share its place."""

    ids: np.ndarray  # [tokens] int32
    starts: np.ndarray  # [tokens] int64
    ends: np.ndarray  # [tokens] int64

    def cut(self, start: int | None = None, stop: int | None = None) -> "Encoding":
        """Tokens `start` to `stop`."""
        return Encoding(self.ids[start:stop], self.starts[start:stop], self.ends[start:stop])


def looks_across_no_space(backend: Tokenizer) -> bool:
    """Whether it is one of those that this is known of, and none of its added tokens holds or swallows white space."""
    told = json.loads(backend.to_str())
    added, model = told["added_tokens"], told["model"]
    return (
        (told["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and model["type"] == "BPE"
        and not model.get("dropout")
        and _cuts_at_spaces(told["pre_tokenizer"])
        and not any(
            re.search(r"\s", t["content"]) or t["lstrip"] or t["rstrip"] or t["single_word"]
            for t in added
        )
    )


def joins_anywhere(backend: Tokenizer) -> bool:
    """Whether two overlapping stretches of a text, joined at any token that both have, give the tokens of the whole.

    So it is for BPE that cuts at single characters or not at all. A merge across the edge of two neighbours would be made where these two
    are the whole text as well, and the other way round; so tokens are those of the whole if each two neighbours are tokens of their own text.
    """
    told = json.loads(backend.to_str())
    pre, model = told["pre_tokenizer"] or {"type": "Metaspace"}, told["model"]
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


def has_spaces(text: str) -> bool:
    """Whether words are short enough to be met again."""
    return SPACES * text.count(" ") >= len(text)


def _cuts_at_spaces(pre: dict[str, Any] | None) -> bool:
    steps = (pre or {}).get("pretokenizers", [pre] if pre else [])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return False
    if len(steps) == 1:
        return steps[0]["use_regex"]
    split = steps[0]
    known = (
        split["type"] == "Split"
        and split["pattern"].get("Regex") in PATTERNS
        and split["behavior"] == "Isolated"
        and not split["invert"]
    )
    return len(steps) == 2 and known and not steps[1]["use_regex"]


class Words:
    """Encodes by words; the backend is asked for those that are new."""

    def __init__(self, backend: Tokenizer):
        self._backend, self._characters = backend, 0
        self._ids: dict[str, bytes] = {}  # int32
        self._places: dict[str, bytes] = {}  # int64, each token's start and end in the word

    def plain(self, texts: list[str]) -> list[np.ndarray]:
        """[tokens] int32 of each text."""
        return [
            np.frombuffer(b"".join(map(self._ids.__getitem__, words)), np.int32)
            for words in self._met(texts, self._ids)
        ]

    def encode(self, texts: list[str]) -> list[Encoding]:
        """Tokens with their places in the text."""
        encoded = []
        for words in self._met(texts, self._places):
            ids = [self._ids[word] for word in words]
            places = np.frombuffer(
                b"".join(map(self._places.__getitem__, words)), np.int64
            ).reshape(-1, 2)
            lengths = np.array([len(word) for word in words], np.int64)
            starts = np.repeat(
                np.cumsum(lengths) - lengths,
                np.array([len(of_word) // 4 for of_word in ids], np.int64),
            )
            encoded.append(
                Encoding(
                    np.frombuffer(b"".join(ids), np.int32),
                    places[:, 0] + starts,
                    places[:, 1] + starts,
                )
            )
        return encoded

    def _met(self, texts: list[str], known: dict[str, bytes]) -> list[list[str]]:
        """The words of each text, all of which are in `known` then: the ids, or the places."""
        if self._characters > CHARACTERS:
            self._ids.clear()
            self._places.clear()
            self._characters = 0
        cut = [WORD.findall(text) for text in texts]
        new = set(chain.from_iterable(cut)).difference(known)
        alone = [
            word for word in new if word[0] != " " or word[-1].isspace()
        ]  # the others may follow one another
        joined = list(new.difference(alone))
        for words in [
            *(joined[i : i + AT_ONCE] for i in range(0, len(joined), AT_ONCE)),
            *([word] for word in alone),
        ]:
            self._meet(words, with_places=known is self._places)
        return cut

    def _meet(self, words: list[str], with_places: bool) -> None:
        """Ask the backend for words, as one text that they make up."""
        encoding = self._backend.encode("".join(words), add_special_tokens=False)
        places = np.fromiter(
            chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding.ids)
        ).reshape(-1, 2)
        edges = np.cumsum([0, *map(len, words)])
        tokens = np.searchsorted(places[:, 0], edges)
        spans = list(zip(words, tokens.tolist(), tokens[1:].tolist(), strict=False))
        ids = array("i", encoding.ids).tobytes()
        self._ids.update((word, ids[4 * first : 4 * stop]) for word, first, stop in spans)
        if with_places:
            within = (places - np.repeat(edges[:-1], np.diff(tokens))[:, None]).tobytes()
            self._places.update(
                (word, within[16 * first : 16 * stop]) for word, first, stop in spans
            )
        self._characters += int(edges[-1])
