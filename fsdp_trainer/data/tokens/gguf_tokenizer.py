"""The tokenizer in a GGUF file, as llama.cpp keeps it."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.tokens.encoding import GPT_4O, LLAMA_3, QWEN, QWEN_3_5
from fsdp_trainer.data.tokens.sentencepiece_model import read_sentencepiece
from fsdp_trainer.interop.folders.gguf_header import read_header

TOKENIZER = "tokenizer.ggml."
LISTS = tuple(f"{TOKENIZER}{name}" for name in ("tokens", "token_type", "scores", "merges"))
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""GGUF's names of special tokens, and those of tokenizer_config.json."""
LLAMA_CUTS = ("llama-bpe", "llama3", "llama-v3")
CUTS = {
    **dict.fromkeys(LLAMA_CUTS, LLAMA_3), "qwen2": QWEN, "deepseek-r1-qwen": QWEN,
    "qwen35": QWEN_3_5, "gpt-4o": GPT_4O,
}  # fmt: skip
"""How a text is cut, by llama.cpp's name of it."""
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that a text is searched for before it is cut."""
COPY = "Copy the model's own tokenizer.json beside the file"


def read_gguf_tokenizer(file: Path) -> tuple[Tokenizer, dict[str, str], set[int], str | None]:
    """Return the tokenizer, its special tokens by name, those that end a turn, and its template.

    Raises ValueError if the file has none, or one that is not read.
    """
    known = read_header(file, LISTS).facts
    facts = {name.removeprefix(TOKENIZER): value for name, value in known.items()}
    kind, tokens = facts.get("model"), facts.get("tokens") or []
    if kind not in READERS:
        raise ValueError(f"it is {kind}: read are  {'  '.join(READERS)}. {COPY}")
    named = {name: facts.get(f"{name}_token_id") for name in (*SPECIAL, "eot")}
    ids: dict[str, int] = {
        name: id for name, id in named.items() if type(id) is int and 0 <= id < len(tokens)
    }
    begins = facts.get("add_bos_token", kind == "llama" or facts.get("pre") in LLAMA_CUTS)
    tokenizer = READERS[kind](facts, tokens, ids.get("bos") if begins else None)
    special = {name: tokens[ids[own]] for own, name in SPECIAL.items() if own in ids}
    ends = {ids[name] for name in ("eos", "eot") if name in ids}
    return tokenizer, special, ends, known.get("tokenizer.chat_template")


def byte_level(facts: Json, tokens: list[str], bos: int | None) -> Tokenizer:
    """Return a byte-level tokenizer, of which the file has the merges and the name of the cut.

    bos: the token that a text begins with, if it does.
    """
    merges, cut = facts.get("merges") or [], facts.get("pre", "default")
    if merges and cut not in ("gpt-2", *CUTS):
        raise ValueError(f"it cuts texts as  {cut} , which is not known here. {COPY}")
    cut_by, usual = CUTS.get(cut), {"add_prefix_space": False, "trim_offsets": True}
    steps: list[Json] = [{"type": "ByteLevel", "use_regex": cut_by is None, **usual}]
    if cut_by:
        isolated = {"behavior": "Isolated", "invert": False}
        steps.insert(0, {"type": "Split", "pattern": {"Regex": cut_by}, **isolated})
    added = [
        {"id": id, "content": text, "special": type == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for id, (text, type) in enumerate(zip(tokens, facts.get("token_type") or [], strict=False))
        if type in (CONTROL, USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "vocab": {text: id for id, text in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": cut in LLAMA_CUTS,  # a word that is a token needs none
    }
    described = {
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut_by is QWEN else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None if bos is None else beginning_with(tokens[bos], bos),
        "decoder": {"type": "ByteLevel", "use_regex": True, **usual},
        "model": model,
    }
    return Tokenizer.from_str(json.dumps(described))


def beginning_with(text: str, id: int) -> Json:
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    single = [token, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {text: {"id": text, "ids": [id], "tokens": [text]}}
    named = {"type": "TemplateProcessing", "special_tokens": special}
    return {**named, "single": single, "pair": pair}


def sentencepiece(facts: Json, tokens: list[str], bos: int | None) -> Tokenizer:
    """Return a tokenizer of SentencePiece's, of which the file has the pieces and their scores.

    bos: the token that a text begins with, if it does.
    """
    from sentencepiece import sentencepiece_model_pb2 as messages

    pieces = zip(tokens, facts["scores"], facts["token_type"], strict=True)
    model = messages.ModelProto(  # type: ignore[attr-defined]
        pieces=[{"piece": text, "score": score, "type": type} for text, score, type in pieces],
        trainer_spec={
            "model_type": 2,  # BPE
            "unk_id": facts.get("unknown_token_id", 0),
            "bos_id": -1 if bos is None else bos,
            "eos_id": facts.get("eos_token_id", 2),
            "pad_id": -1,
            "byte_fallback": True,
        },
        normalizer_spec={
            "name": "identity",
            "add_dummy_prefix": facts.get("add_space_prefix", True),
            "remove_extra_whitespaces": False,
        },
    )
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        Path(file.name).write_bytes(model.SerializeToString())
        tokenizer, _ = read_sentencepiece(Path(file.name))
    return tokenizer


READERS: dict[str, Callable[[Json, list[str], int | None], Tokenizer]] = {
    "gpt2": byte_level,
    "llama": sentencepiece,
}
"""By tokenizer.ggml.model."""
