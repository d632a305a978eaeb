"""A task and a tokenizer made on the spot, for the quickstart: nothing is downloaded."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOKENIZER = "demo:bytes"
TASKS = {"demo:backwards": slice(0, 4000), "demo:backwards/heldout": slice(4000, 4200)}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


@lru_cache
def words() -> list[str]:
    """4,200 different words of 3 to 6 letters, the same on every machine."""
    unique: dict[str, None] = {}
    i = 0
    while len(unique) < 4200:
        length, *letters = hashlib.blake2b(str(i).encode(), digest_size=7).digest()
        word = "".join(chr(ord("a") + letter % 26) for letter in letters[: 3 + length % 4])
        unique[word] = None
        i += 1
    return list(unique)


def rows(name: str) -> list[dict[str, Any]]:
    """The chats of a task: spell a word backwards."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Spell {word} backwards."},
                {"role": "assistant", "content": word[::-1]},
            ]
        }
        for word in words()[TASKS[name]]
    ]


def byte_tokenizer() -> tuple[Tokenizer, dict[str, str], set[int], str]:
    """One token a byte, and ChatML:

    (tokenizer, special tokens by name, stop ids, chat template).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    chatml = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text(encoding="utf-8")
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}, set(), chatml
