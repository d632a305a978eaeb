"""The text of tokens that arrive one by one, without decoding all of them again."""

import codecs
import json

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.tokens.byte_level_files import BYTE_TEXTS
from fsdp_trainer.data.tokens.token_bytes import BYTE_TOKEN, SENTENCEPIECE_SPACE
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

BYTE_OF = {text: byte for byte, text in enumerate(BYTE_TEXTS)}
PER_TOKEN = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
"""Steps of a decoder whose text of a token depends on the token before it, or on a run of bytes."""


class TextStream:
    """The text of a growing list of tokens, special tokens left out.

    The pieces together are `TextTokenizer.decode` of all tokens, whatever the tokens are.
    `tokenizers.decoders.DecodeStream` is not used: at bytes that are no UTF-8, which a model may
    generate at any time, it waits or raises an error, and it never returns those at the end.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer, self._backend = tokenizer, tokenizer.backend
        self._unwanted = 0  # characters before the text
        added = self._backend.get_added_tokens_decoder().values()
        self.special = {token.content for token in added if token.special}
        """Texts of the tokens that are left out."""
        self._pieces = _pieces_of(tokenizer)

    def add(self, tokens: list[int]) -> str:
        """Append tokens; return the text that they add and that no further token can change."""
        texts = ((id, self._backend.id_to_token(id)) for id in tokens)
        return self._wanted(
            "".join(
                self._pieces.add(id, text)
                for id, text in texts
                if text is not None and text not in self.special
            )
        )

    def finish(self) -> str:
        return self._wanted(self._pieces.finish())

    def follow(self, tokens: list[int]) -> None:
        """Make the text that which follows some tokens. A decoder may strip the first space."""
        if not isinstance(self._pieces, _Bytes):
            unwanted = len(self._tokenizer.decode(tokens[-1:]))
            self._unwanted = unwanted - len(self.add(tokens[-1:]))

    def bytes_of(self, id: int) -> bytes:
        """Return the text of one token, also a special one, within others, in UTF-8."""
        text = self._backend.id_to_token(id) or ""
        if isinstance(self._pieces, _Bytes) and all(c in BYTE_OF for c in text):
            return bytes(BYTE_OF[c] for c in text)
        if BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace(SENTENCEPIECE_SPACE, " ").encode()

    def _wanted(self, text: str) -> str:
        wanted = text[self._unwanted :]
        self._unwanted -= len(text) - len(wanted)
        return wanted


class _Bytes:
    """Byte-level tokens: each is a few bytes of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, id: int, text: str) -> str:
        is_encoded = all(c in BYTE_OF for c in text)
        return self._decoder.decode(
            bytes(BYTE_OF[c] for c in text) if is_encoded else text.encode()
        )

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


class _Window:
    """Other tokens, decoded together with those of the piece of text before them.

    Consecutive tokens <0xNN> are a character only if all of them together are UTF-8, so that they
    are decoded when their run has ended.
    """

    def __init__(self, tokenizer: TextTokenizer, has_bytes: bool):
        self._tokenizer, self._has_bytes = tokenizer, has_bytes
        self._tokens: list[int] = []
        self._before = 0  # tokens whose text was returned, at the beginning of self._tokens
        self._length = 0  # characters of their text

    def add(self, id: int, text: str) -> str:
        """Return the text up to the token `text`, as far as it is new; nothing within bytes."""
        self._tokens.append(id)
        return "" if self._has_bytes and BYTE_TOKEN.fullmatch(text) else self._new_text()

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        text = self._tokenizer.decode(self._tokens)
        piece = text[self._length :]
        if piece:
            self._tokens = self._tokens[self._before :]
            self._before = len(self._tokens)
            text = self._tokenizer.decode(self._tokens)
        self._length = len(text)
        return piece


class _OneLater:
    """Tokens whose text depends on whether another one follows, which is waited for."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._last: list[int] = []

    def add(self, id: int, text: str) -> str:
        before, self._last = self._last, [id]
        return self._tokenizer.decode([*before, id]).removesuffix(self.finish())

    def finish(self) -> str:
        return self._tokenizer.decode(self._last)


class _Whole:
    """Tokens of which a later one may change any text before it."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []

    def add(self, id: int, text: str) -> str:
        self._tokens.append(id)
        return ""

    def finish(self) -> str:
        return self._tokenizer.decode(self._tokens)


def _pieces_of(tokenizer: TextTokenizer) -> _Bytes | _Window | _OneLater | _Whole:
    decoder = tokenizer.backend.decoder
    steps = _steps(json.loads(decoder.__getstate__())) if decoder else []
    kinds = [step["type"] for step in steps]
    if tokenizer.cleans_up:
        return _Whole(tokenizer)
    if kinds == ["ByteLevel"]:
        return _Bytes()
    if kinds == ["BPEDecoder"]:
        return _OneLater(tokenizer)
    if _is_local(steps):
        return _Window(tokenizer, "ByteFallback" in kinds)
    return _Whole(tokenizer)


def _steps(decoder: Json) -> list[Json]:
    inner = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step for step in inner if step]


def _is_local(steps: list[Json]) -> bool:
    """Return whether the text of a token depends on nothing further away than the piece before it.

    After `Fuse` a step changes the whole text: only one that strips its first character is local.
    """
    kinds = [step["type"] for step in steps]
    after = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    return set(kinds) <= PER_TOKEN and all(
        step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0 for step in after
    )
