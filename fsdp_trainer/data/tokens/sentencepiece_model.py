"""Reads SentencePiece `.model` files into a `tokenizers.Tokenizer`.

That gives a single backend, token offsets, and a tokenizer.json that loads anywhere.

The leading space is added only at the start of a text. With `legacy` it is also added after special
tokens, as with the option of that name in transformers.
"""

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

ModelProto = Any
"""The class of the message in sentencepiece.sentencepiece_model_pb2, which is created at import."""
LONGEST_PIECE = 10_000
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

    legacy: if True, text after a special token also starts with a space. prefix: False omits the
    space that the model adds before a text. Raises ValueError if the file is not a SentencePiece
    model.
    """
    model = _parse(path)
    trainer, normalizer, Piece = model.trainer_spec, model.normalizer_spec, model.SentencePiece
    ids = {
        "unk_token": trainer.unk_id,
        "bos_token": trainer.bos_id,
        "eos_token": trainer.eos_id,
        "pad_token": trainer.pad_id,
    }
    special = {
        name: model.pieces[id].piece
        for name, id in ids.items()
        if 0 <= id < len(model.pieces) and model.pieces[id].type in (Piece.CONTROL, Piece.UNKNOWN)
    }

    tokenizer = Tokenizer(_model(model))
    prefix_space = normalizer.add_dummy_prefix and prefix
    _put_spaces(tokenizer, normalizer, prefix_space, legacy)
    strip = [decoders.Strip(" ", left=1)] if prefix_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    added = [
        AddedToken(piece.piece, normalized=False, special=piece.type != Piece.USER_DEFINED)
        for piece in model.pieces
        if piece.type in (Piece.CONTROL, Piece.UNKNOWN, Piece.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if bos := special.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokenizer.token_to_id(bos))]
        )
    if prefix_space == normalizer.add_dummy_prefix:
        _check(tokenizer, path)
    return tokenizer, special


def _parse(path: Path) -> ModelProto:
    """Return the file's message. Raises ValueError if it has none, or an unsupported model type."""
    from google.protobuf.message import DecodeError  # no other tokenizer needs it
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        raise ValueError("it is not a SentencePiece model, or cut short") from None
    if not model.pieces or not model.HasField("trainer_spec"):
        raise ValueError("it is not a SentencePiece model, or cut short")
    trainer = model.trainer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise ValueError("its model type is neither BPE nor unigram")
    if not 0 <= trainer.unk_id < len(model.pieces):
        raise ValueError(f"its unknown token is {trainer.unk_id} of {len(model.pieces):,} pieces")
    longest = max(len(piece.piece) for piece in model.pieces)
    if longest > LONGEST_PIECE:  # each way to cut a piece in two is looked at
        raise ValueError(f"has a piece of {longest:,} characters, more than {LONGEST_PIECE:,}")
    return model


def _check(tokenizer: Tokenizer, path: Path) -> None:
    """Compare with SentencePiece itself. Raises ValueError if a text gets different tokens."""
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(path))
    for text in PROBES:
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        theirs = original.encode(text)
        if ours != theirs:
            raise ValueError(
                f"it uses something that is not read: {text!r} would become {ours} "
                f"instead of {theirs}"
            )


def _model(model: ModelProto) -> models.Model:
    trainer, unk_id = model.trainer_spec, model.trainer_spec.unk_id
    byte_fallback = any(piece.type == piece.BYTE for piece in model.pieces)
    if trainer.model_type == trainer.UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in model.pieces]
        return models.Unigram(scores, unk_id=unk_id, byte_fallback=byte_fallback)
    return models.BPE(
        {piece.piece: id for id, piece in enumerate(model.pieces)},
        _merges(model),
        unk_token=model.pieces[unk_id].piece,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _merges(model: ModelProto) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form another piece, best score first.

    SentencePiece stores only scores, no merges.
    """
    rank = {
        piece.piece: (-piece.score, id)
        for id, piece in enumerate(model.pieces)
        if piece.type == piece.NORMAL
    }
    merges = []
    for text, (score, _) in rank.items():
        splits = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges += [
            (score, rank[first], rank[second], first, second)
            for first, second in splits
            if first in rank and second in rank
        ]
    return [(first, second) for *_, first, second in sorted(merges)]


def _put_spaces(tokenizer: Tokenizer, spec: Any, prefix_space: bool, legacy: bool) -> None:
    """Set the tokenizer's normalisation as in the model, with ▁ for a space.

    prefix_space: a text gets a space before it. legacy: also after special tokens.
    """
    steps: list[normalizers.Normalizer] = []
    first = "first" if prefix_space and not legacy else "never"
    metaspaces = [pre_tokenizers.Metaspace("▁", prepend_scheme=first, split=False)]
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # a leading space is kept as the one that would be added; if it were stripped, the offsets
        # of the text would change, and Metaspace would add none
        steps.append(normalizers.Strip(left=first == "never", right=True))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    elif first == "first":
        # Metaspace adds no space to a text that begins with its replacement character. So all
        # spaces are replaced first, and until the last step a space is used as the replacement
        steps.append(normalizers.Replace(" ", "▁"))
        last = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
        metaspaces = [pre_tokenizers.Metaspace(" ", prepend_scheme=first, split=False), last]
    if legacy and prefix_space:
        steps.append(normalizers.Prepend("▁"))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(metaspaces)
