"""Tasks and a tokenizer that are generated for the quickstart, without any download."""

import hashlib
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.files.built_in_templates import TEMPLATES

TOKENIZER = "demo:bytes"
BACKWARDS = {"demo:backwards": slice(0, 4000), "demo:backwards/heldout": slice(4000, 4200)}
SUMS = {"demo:sums": False, "demo:sums/half-wrong": True}
"""Tasks of adding two digits; True if every other answer is wrong."""
TASKS = (*BACKWARDS, *SUMS)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


@lru_cache
def words() -> list[str]:
    """Return 4,200 different words of 3 to 6 letters, the same on every machine."""
    unique: dict[str, None] = {}
    i = 0
    while len(unique) < 4200:
        length, *letters = hashlib.blake2b(str(i).encode(), digest_size=7).digest()
        word = "".join(chr(ord("a") + letter % 26) for letter in letters[: 3 + length % 4])
        unique[word] = None
        i += 1
    return list(unique)


def rows(name: str) -> list[Json]:
    """Return the chats of a task: spelling a word backwards, or adding two digits."""
    if name in SUMS:
        return sums(half_wrong=SUMS[name])
    return [
        {
            "messages": [
                {"role": "user", "content": f"Spell {word} backwards."},
                {"role": "assistant", "content": word[::-1]},
            ]
        }
        for word in words()[BACKWARDS[name]]
    ]


def sums(half_wrong: bool) -> list[Json]:
    """Return all sums of two digits; half_wrong: four times each, two of them with any answer."""
    rows = []
    for number in range(400 if half_wrong else 100):
        first, second = divmod(number % 100, 10)
        answer = first + second
        if half_wrong and number // 100 % 2:
            answer = hashlib.blake2b(str(number).encode(), digest_size=1).digest()[0] % 19
        rows.append(chat(f"{first}+{second}=", str(answer)))
    return rows


def chat(question: str, answer: str) -> Json:
    roles = zip(("user", "assistant"), (question, answer), strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in roles]}


def byte_tokenizer() -> tuple[Tokenizer, dict[str, str], set[int], str]:
    """Return a tokenizer with one token per byte, and ChatML as its template.

    The result is (tokenizer, special tokens by name, stop ids, chat template).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return tokenizer, special, set(), TEMPLATES["chatml"].text
