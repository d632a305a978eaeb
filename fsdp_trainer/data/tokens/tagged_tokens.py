"""Tokens of words or steps that have a label each, and which tokens get the labels."""

import json

import numpy as np

from fsdp_trainer.data.records.labelled_texts import IGNORED, TaggedText
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

Placed = tuple[np.ndarray, list[int]]
"""The tokens of a text, int32, and for each of its parts the token that gets its label; -1: none,
for a part that has no token of its own."""


def place_labels(
    row: TaggedText, tokenizer: TextTokenizer, separator: str, most: int | None
) -> Placed:
    """Return the tokens of a row and those that get a label. See `words` and `steps`.

    most: number of tokens, at most; None: all.
    """
    if row.prompt is None:
        return words(row.parts, tokenizer, most, row.before)
    tokens, places = steps(row.prompt, row.parts, tokenizer, separator)
    return tokens[:most], [place for place in places if most is None or place < most]


def words(parts: list[str], tokenizer: TextTokenizer, most: int | None, before: str = "") -> Placed:
    """Return the tokens of words with spaces between them, and the first token of each word.

    They are encoded as one text, with what the tokenizer itself adds. before: stands before them.
    """
    ends = len(before) + np.cumsum([len(word) + 1 for word in parts]) - 1
    begins = ends - [len(word) for word in parts]
    encoding = tokenizer.encode_published_with_places(before + " ".join(parts), most)
    # tokens that the tokenizer adds have no characters
    reached = np.maximum.accumulate(encoding.ends)
    firsts = np.searchsorted(reached, begins, side="right")
    starts = np.append(encoding.starts, np.iinfo(np.int64).max)
    places = np.where(starts[firsts] < ends, firsts, -1)
    # a token of two words is the first one's
    is_new = places > np.maximum.accumulate(np.append(-1, places))[:-1]
    return encoding.ids, np.where(is_new, places, -1).tolist()


def steps(prompt: str, parts: list[str], tokenizer: TextTokenizer, separator: str) -> Placed:
    """Return the tokens of a prompt and of each step with a separator, and the last of each step.

    Each is encoded by itself, without what the tokenizer adds, as TRL does for process rewards.
    """
    first, end, *encoded = tokenizer.encode_plain([prompt, separator, *parts])
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    pieces = [np.concatenate([step, end]) for step in encoded]
    tokens = np.concatenate([bos, first, *pieces]).astype(np.int32)
    ends = len(bos) + len(first) + np.cumsum([len(piece) for piece in pieces]) - 1
    return tokens, ends.tolist()


def labelled_tokens(row: TaggedText, places: list[int], count: int) -> tuple[np.ndarray, str]:
    """Return the weight of each of `count` tokens, 1 for those with a label, and the labels.

    The labels are JSON, a list in the order of the tokens.
    """
    weights, labels = np.zeros(count, np.float32), []
    for place, label in zip(places, row.labels, strict=False):
        if place >= 0 and label not in IGNORED:
            weights[place] = 1
            labels.append(label)
    return weights, json.dumps(labels, ensure_ascii=False)
