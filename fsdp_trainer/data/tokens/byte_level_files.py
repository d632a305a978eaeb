"""Byte-level BPE without a tokenizer.json: tiktoken's `.model`, or vocab.json with merges.txt.

Both are converted to a `tokenizers.Tokenizer` in the same way as in transformers.
"""

import base64
import binascii
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.tokens.encoding import LLAMA_3, QWEN

RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\Z")
"""A line of a tiktoken file: a token's bytes in base64, and its rank, which is its id."""
LLAMA_3_RANKS = 128_000
LLAMA_3_SPECIAL = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>",
    10: "<|python_tag|>",
}  # fmt: skip
"""Special tokens of Llama 3.1 by offset after the ranks; the others of 256 are reserved ones."""
LLAMA_3_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
OTHER_CUT = 190_000  # ranks; GPT-4o and Llama 4 have more, and split texts by another pattern
MOST_DESCRIBED = 1 << 16  # tokens that a description adds to a tiktoken file
CLASSES = table_beside(__file__, "tokenizer_classes.yaml")
DEFAULTS: dict[str, dict[str, str]] = CLASSES["vocab and merges"]
"""Classes of transformers that use vocab.json and merges.txt this way, and their special tokens."""
MODEL_TYPES = {"qwen": "Qwen2Tokenizer", "roberta": "RobertaTokenizer", "bart": "BartTokenizer"}
"""Prefixes of config.json's model_type, used without a tokenizer class; all others mean GPT-2."""


def is_tiktoken(path: Path) -> bool:
    """Return True if the first line of a file is in tiktoken's format."""
    with open(path, "rb") as file:
        return bool(RANK.match(file.readline(1 << 16)))


def read_tiktoken(path: Path, described: Json | None = None) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer, and its special tokens by name. Raises ValueError if it cannot be read.

    The file names no special tokens. described: those of tokenizer_config.json; gaps among their
    ids are filled as in transformers. None: Llama 3 is recognised by its number of ranks and gets
    its special tokens.
    """
    ranks = _ranks(path)
    if len(ranks) >= OTHER_CUT:
        raise ValueError(
            f"it has {len(ranks):,} ranks, as GPT-4o and Llama 4, whose way of cutting a text "
            "tiktoken's file does not hold. Name the tokenizer.json of the model"
        )
    text_of = {token: _as_text(token) for token in ranks}
    merges = [
        (rank, ranks[token[:i]], ranks[token[i:]], text_of[token[:i]], text_of[token[i:]])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    vocabulary = {text_of[token]: rank for token, rank in ranks.items()}
    pairs = [(first, second) for *_, first, second in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=True))
    cut_as(tokenizer, LLAMA_3)
    if described is not None:
        ids = {int(id): token["content"] for id, token in described.items()}
        last = min(max(ids, default=0), len(ranks) + MOST_DESCRIBED)
        texts = [ids.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), last + 1)]
        tokenizer.add_special_tokens([*map(_special, texts)])
    if described is not None or len(ranks) != LLAMA_3_RANKS:
        return tokenizer, {}
    tokenizer.add_special_tokens([*map(_special, _llama_3_special())])
    return tokenizer, dict(LLAMA_3_NAMED)


def _ranks(path: Path) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} of tiktoken's file is no token and rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("it is cut short: its ranks are not 0, 1, 2 …")
    return ranks


def _llama_3_special() -> list[str]:
    names: list[str] = []
    reserved = 0
    for place in range(256):
        if place not in LLAMA_3_SPECIAL:
            names.append(f"<|reserved_special_token_{reserved}|>")
            reserved += 1
        else:
            names.append(LLAMA_3_SPECIAL[place])
    return names


def read_vocab_and_merges(folder: Path, config: Json) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of vocab.json and merges.txt, and its class's usual special tokens.

    config: content of tokenizer_config.json, which names the class. Raises ValueError if the files
    are not byte-level BPE.
    """
    kind = _class_of(folder, config)
    if kind not in DEFAULTS:
        raise ValueError(
            f"it is of class {kind}, which is not read from vocab.json and merges.txt. "
            "Use a folder with its tokenizer.json"
        )
    bpe = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(bpe)
    lacking = set(pre_tokenizers.ByteLevel.alphabet()) - tokenizer.get_vocab().keys()
    if lacking:
        raise ValueError(
            f"its vocabulary lacks {len(lacking)} of the 256 bytes: it is no byte-level BPE. "
            "Use a folder with its tokenizer.json"
        )
    prefix = bool(config.get("add_prefix_space", False))
    if kind == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
        cut_as(tokenizer, QWEN, prefix)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, DEFAULTS[kind]


def _class_of(folder: Path, config: Json) -> str:
    named = config.get("tokenizer_class")
    if isinstance(named, str):
        return named.removesuffix("Fast")
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        type = str(model.get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        type = ""
    classes = (name for start, name in MODEL_TYPES.items() if type.startswith(start))
    return next(classes, "GPT2Tokenizer")


def cut_as(tokenizer: Tokenizer, pattern: str, prefix: bool = False) -> None:
    """Make the tokenizer split texts by a pattern and encode the parts as bytes."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _byte_texts() -> list[str]:
    """Return the characters that represent the bytes 0 to 255 in GPT-2's vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    texts = {byte: chr(byte) for byte in shown}
    texts |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [texts[byte] for byte in range(256)]


BYTE_TEXTS = _byte_texts()


def _as_text(token: bytes) -> str:
    return "".join(BYTE_TEXTS[byte] for byte in token)
