"""SentencePiece `.model` files, read into a `tokenizers.Tokenizer`: one backend, token offsets, and a tokenizer.json that loads anywhere.

The text gets its leading space only at the start, not after special tokens; with `legacy` also
there, as transformers has it under that name.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
PROBES = (
    "The quick brown fox, 1984.",
    " one",
    "   three",
    "a  b\tc\nd",
    "naïve Ωμέγα 東京 🙂",
    "def f(x):\n    return x**2  # ½",
)


def read_sentencepiece(
    path: Path, legacy: bool = False, prefix: bool = True
) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer, and its special tokens by name (bos_token, eos_token …).

    legacy: a text behind a special token begins with a space too; prefix: False leaves out the
    space that the model puts before a text. ValueError if the file is no SentencePiece model.
    """
    proto = list(_fields(path.read_bytes()))
    pieces = [_piece(dict(_fields(value))) for number, value in proto if number == 1]
    trainer, normalizer = (dict(_fields(dict(proto).get(number, b""))) for number in (2, 3))
    if not pieces or not trainer:
        raise ValueError("it is not a SentencePiece model, or cut short")
    if trainer.get(3, UNIGRAM) not in (UNIGRAM, BPE):
        raise ValueError("its model type is neither BPE nor unigram")

    ids = {
        "unk_token": trainer.get(40, 0),
        "bos_token": trainer.get(41, 1),
        "eos_token": trainer.get(42, 2),
        "pad_token": trainer.get(43, -1),
    }
    special = {
        name: pieces[id][0]
        for name, id in ids.items()
        if 0 <= id < len(pieces) and pieces[id][2] in (CONTROL, UNKNOWN)
    }

    tokenizer = Tokenizer(_model(pieces, trainer, ids["unk_token"]))
    prefix_space = bool(normalizer.get(3, 1)) and prefix
    _put_spaces(tokenizer, normalizer, prefix_space, legacy)
    strip = [decoders.Strip(" ", left=1)] if prefix_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    added = [
        AddedToken(text, normalized=False, special=kind != USER_DEFINED)
        for text, _, kind in pieces
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if bos := special.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokenizer.token_to_id(bos))]
        )
    if prefix_space == bool(normalizer.get(3, 1)):
        _check(tokenizer, path)
    return tokenizer, special


def _check(tokenizer: Tokenizer, path: Path) -> None:
    """SentencePiece itself is the judge of whether it was read right."""
    from sentencepiece import SentencePieceProcessor  # no other tokenizer needs it

    original = SentencePieceProcessor(model_file=str(path))
    for text in PROBES:
        if (ours := tokenizer.encode(text, add_special_tokens=False).ids) != (
            theirs := original.encode(text)
        ):
            raise ValueError(
                f"it uses something that is not read: {text!r} would become {ours} instead of {theirs}"
            )


def _model(pieces: list[tuple[str, float, int]], trainer: dict, unk_id: int) -> models.Model:
    byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    if trainer.get(3, UNIGRAM) == UNIGRAM:
        return models.Unigram(
            [(text, score) for text, score, _ in pieces], unk_id=unk_id, byte_fallback=byte_fallback
        )
    vocabulary = {text: id for id, (text, _, _) in enumerate(pieces)}
    return models.BPE(
        vocabulary,
        _merges(pieces),
        unk_token=pieces[unk_id][0],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Every way in which two pieces make a third, best score first: SentencePiece stores no merges, only scores."""
    rank = {text: (-score, id) for id, (text, score, kind) in enumerate(pieces) if kind == NORMAL}
    merges = []
    for text, (score, _) in rank.items():
        splits = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges += [
            (score, rank[left], rank[right], left, right)
            for left, right in splits
            if left in rank and right in rank
        ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _put_spaces(tokenizer: Tokenizer, spec: dict, prefix_space: bool, legacy: bool) -> None:
    """Let the tokenizer normalise texts as the model says, and write ▁ for a space.

    prefix_space: a text gets a space before it; legacy: behind special tokens too.
    """
    steps: list[normalizers.Normalizer] = []
    first = "first" if prefix_space and not legacy else "never"
    metaspaces = [pre_tokenizers.Metaspace("▁", prepend_scheme=first, split=False)]
    if charsmap := spec.get(2):
        steps.append(normalizers.Precompiled(charsmap))
    if spec.get(4, 1):  # remove_extra_whitespaces
        # a space at the beginning is the one that would be put there; without it a text would
        # not begin where it did, and Metaspace would put none
        steps.append(normalizers.Strip(left=first == "never", right=True))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    elif first == "first":
        # Metaspace puts no space before a text that begins with its replacement: so all spaces
        # are replaced before, and a space stands for the replacement until the last step
        steps.append(normalizers.Replace(" ", "▁"))
        last = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
        metaspaces = [pre_tokenizers.Metaspace(" ", prepend_scheme=first, split=False), last]
    if legacy and prefix_space:
        steps.append(normalizers.Prepend("▁"))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(metaspaces)


def _piece(fields: dict) -> tuple[str, float, int]:
    return (
        fields[1].decode(),
        struct.unpack("<f", fields.get(2, bytes(4)))[0],
        fields.get(3, NORMAL),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a serialised protobuf message; a value is an int or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << 64) if value >> 63 else value

    try:
        while position < len(data):
            tag = varint()
            if tag & 7 == 0:
                yield tag >> 3, varint()
                continue
            size = {1: 8, 5: 4}.get(tag & 7) or varint()
            if tag & 7 not in (1, 2, 5) or position + size > len(data):
                raise ValueError("it is not a SentencePiece model, or cut short")
            yield tag >> 3, data[position : position + size]
            position += size
    except IndexError:
        raise ValueError("it is not a SentencePiece model, or cut short") from None
