"""The number of text bytes in each token of a vocabulary."""

import json
import re
from typing import Any

import numpy as np

from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
SENTENCEPIECE_SPACE = "\u2581"


def token_bytes(tokenizer: TextTokenizer, size: int) -> np.ndarray:
    """Return the number of UTF-8 bytes in each token: [size] int64.

    size: size of the model's vocabulary. Special tokens and unused ids have 0.
    """
    backend = tokenizer.backend
    is_byte_level = uses(json.loads(backend.to_str()).get("decoder"), "ByteLevel")
    added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
    special = set(tokenizer.special_tokens.values())
    sizes = np.zeros(max(size, tokenizer.vocab_size), np.int64)
    for text, id in backend.get_vocab(with_added_tokens=True).items():
        if id in special:
            continue
        if id in added:
            sizes[id] = len(added[id].encode())
        elif is_byte_level:
            sizes[id] = len(text)  # each character stands for one byte
        elif BYTE_TOKEN.fullmatch(text):
            sizes[id] = 1
        else:
            sizes[id] = len(text.replace(SENTENCEPIECE_SPACE, " ").encode())
    return sizes[:size]


def uses(step: Any, kind: str) -> bool:
    if isinstance(step, dict):
        return step.get("type") == kind or any(uses(inner, kind) for inner in step.values())
    return isinstance(step, list) and any(uses(inner, kind) for inner in step)
