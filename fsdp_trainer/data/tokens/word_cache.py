"""Tokens of words, remembered from earlier occurrences.

If a tokenizer never looks across a space, the tokens of a text are those of its words. The patterns
by which GPT-2, Llama 3, Qwen and GPT-4o split a text end every match before a space that follows a
non-space character, and do not depend on the text to the left. Special tokens are cut out first. So
a text that is cut at these positions gives the same tokens piece by piece. Most words of a text
occur repeatedly, and looking them up takes a quarter of the time.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

WORD = re.compile(r"\s*\S+(?:[^\S ]\s*\S+)*(?:[^\S ]\s*\Z)?|\s+")
"""A piece of text that ends before a space that follows a non-space character."""
CHARACTERS = 1 << 22
"""Maximum number of characters of remembered words: about 200 MB."""
SPACES = 16
"""Maximum average number of characters per space; with more, as in Chinese, most words are new."""
AT_ONCE = 1 << 15
"""Number of new words that are encoded together."""
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
PATTERNS = {LLAMA_3, QWEN, GPT_4O}


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
    """Return the result of a backend's `encode` as arrays."""
    ids = np.array(encoded.ids, dtype=np.int32)
    places = np.fromiter(chain.from_iterable(encoded.offsets), np.int64, 2 * len(ids))
    return Encoding(ids, places[0::2], places[1::2])


def looks_across_no_space(backend: Tokenizer) -> bool:
    """Return whether a tokenizer is known never to look across a space.

    In that case no added token contains or swallows white space.
    """
    saved = json.loads(backend.to_str())
    added, model = saved["added_tokens"], saved["model"]
    return (
        (saved["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and model["type"] == "BPE"
        and not model.get("dropout")
        and _cuts_at_spaces(saved["pre_tokenizer"])
        and not any(
            re.search(r"\s", t["content"]) or t["lstrip"] or t["rstrip"] or t["single_word"]
            for t in added
        )
    )


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


def has_spaces(text: str) -> bool:
    return SPACES * text.count(" ") >= len(text)


def _cuts_at_spaces(pre: dict[str, Any] | None) -> bool:
    if pre is None:
        return False
    steps = pre.get("pretokenizers", [pre])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return False
    if len(steps) == 1:
        return steps[0]["use_regex"]
    return len(steps) == 2 and _is_known_split(steps[0]) and not steps[1]["use_regex"]


def _is_known_split(step: dict[str, Any]) -> bool:
    if step["type"] != "Split" or step["behavior"] != "Isolated":
        return False
    return step["pattern"].get("Regex") in PATTERNS and not step["invert"]


class EncodedWords:
    """Tokens of one text, word by word; like `Encoding`, but with positions computed on demand.

    sizes: number of tokens of each word.
    """

    def __init__(self, ids: np.ndarray, texts: list[str], sizes: np.ndarray, words: "Words"):
        self.ids, self._texts, self._sizes, self._words = ids, texts, sizes, words
        self._edges = _edges(np.fromiter(map(len, texts), np.int64, len(texts)))

    @cached_property
    def _first_tokens(self) -> np.ndarray:
        return _edges(self._sizes)

    @cached_property
    def _whole(self) -> Encoding:
        encoded = [self._words.encoding(text) for text in self._texts]
        shifted = np.repeat(self._edges[:-1], self._sizes)
        starts, ends = (
            np.concatenate([[], *(getattr(word, name) for word in encoded)]).astype(np.int64)
            for name in ("starts", "ends")
        )
        return Encoding(self.ids, starts + shifted, ends + shifted)

    @property
    def starts(self) -> np.ndarray:
        return self._whole.starts

    @property
    def ends(self) -> np.ndarray:
        """The end of each token: its last character + 1."""
        return self._whole.ends

    def lower_of_ends(self, values: np.ndarray) -> np.ndarray:
        """Return, for each token, the lower of the values at its first and last character.

        values: [characters + 1].
        """
        of_tokens = np.repeat(values[self._edges[:-1]], self._sizes)
        changes = np.flatnonzero(values[1:-1] != values[:-2]) + 1
        words = np.searchsorted(self._edges, changes, "right") - 1
        for word in words[self._edges[words] < changes].tolist():
            first, stop = self._first_tokens[word : word + 2]
            start, end = self._edges[word : word + 2]
            encoded = self._words.encoding(self._texts[word])
            of_tokens[first:stop] = encoded.lower_of_ends(values[start : end + 1])
        return of_tokens

    def first_reaching(self, end: int) -> int:
        word = int(np.searchsorted(self._edges[1:], end))
        if word == len(self._texts):
            return len(self.ids)
        encoded = self._words.encoding(self._texts[word])
        return int(self._first_tokens[word]) + encoded.first_reaching(end - int(self._edges[word]))

    def start_of(self, token: int) -> int:
        word = int(np.searchsorted(self._first_tokens, token, "right")) - 1
        encoded = self._words.encoding(self._texts[word])
        return int(self._edges[word]) + encoded.start_of(token - int(self._first_tokens[word]))


def _edges(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


class Words:
    """Encodes texts by words; the backend encodes new words, joined by a special token.

    separator: that special token, from `separator_of`.
    """

    def __init__(self, backend: Tokenizer, separator: str):
        self._backend, self._separator = backend, separator
        self._cut_out = {
            token.content: id
            for id, token in backend.get_added_tokens_decoder().items()
            if not token.normalized
        }
        longest_first = sorted(self._cut_out, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._forget()

    def _forget(self) -> None:
        self._characters = 0
        self._ids = {text: np.array([id], np.int32).tobytes() for text, id in self._cut_out.items()}
        self._encodings: dict[str, Encoding] = {}

    def plain(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, [tokens] int32."""
        return [
            np.frombuffer(b"".join(map(self._ids.__getitem__, words)), np.int32)
            for words in self._words(texts)
        ]

    def encode(self, texts: list[str]) -> list[EncodedWords]:
        return [self._encoded(words) for words in self._words(texts)]

    def encoding(self, word: str) -> Encoding:
        encoding = self._encodings.get(word)
        if encoding is None:
            encoding = encoding_of(self._backend.encode(word, add_special_tokens=False))
            self._encodings[word] = encoding
            self._characters += len(word)
        return encoding

    def _encoded(self, words: list[str]) -> EncodedWords:
        ids = list(map(self._ids.__getitem__, words))
        sizes = np.fromiter(map(len, ids), np.int64, len(ids)) // np.dtype(np.int32).itemsize
        return EncodedWords(np.frombuffer(b"".join(ids), np.int32), words, sizes, self)

    def _words(self, texts: list[str]) -> list[list[str]]:
        if self._characters > CHARACTERS:
            self._forget()
        cut = [self._cut(text) for text in texts]
        new = list(set(chain.from_iterable(cut)).difference(self._ids))
        for i in range(0, len(new), AT_ONCE):
            self._add(new[i : i + AT_ONCE])
        return cut

    def _cut(self, text: str) -> list[str]:
        before, *parts = self._special.split(text)
        words = WORD.findall(before)
        for special, part in zip(parts[0::2], parts[1::2], strict=True):
            words.append(special)
            words += WORD.findall(part)
        return words

    def _add(self, words: list[str]) -> None:
        joined = self._separator.join(words)
        (encoded,) = self._backend.encode_batch_fast([joined], add_special_tokens=False)
        ids = np.array(encoded.ids, np.int32)
        between = np.flatnonzero(ids == self._cut_out[self._separator]).tolist()
        spans = zip(words, [0, *(at + 1 for at in between)], [*between, len(ids)], strict=True)
        self._ids.update((word, ids[first:stop].tobytes()) for word, first, stop in spans)
        self._characters += len(joined)


def separator_of(backend: Tokenizer) -> str | None:
    """Return a token that is cut out of a text whatever is next to it; None if there is none."""
    tokens = backend.get_added_tokens_decoder().values()
    texts = [token.content for token in tokens if not token.normalized]
    return next(
        (text for text in texts if not any(_may_take(text, other) for other in texts)), None
    )


def _may_take(token: str, other: str) -> bool:
    longer = other.startswith(token) and other != token
    return longer or any(
        token.startswith(other[i:]) or other[i:].startswith(token) for i in range(1, len(other))
    )
