"""The tokens of media in texts that are read without a chat template."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.data.records.labelled_texts import LabelledText
from fsdp_trainer.data.records.media import MARK
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

Find = Callable[[list[Any]], Sequence[Any]]
"""Returns the files of media as a row names them. Raises RecordError."""


def with_shown_media(
    one: LabelledText, reader: MediaReader, tokenizer: TextTokenizer, find: Find
) -> LabelledText:
    """Return texts with the tokens of their media, which are then samples'. Raises RecordError."""
    texts = [one.text, *([] if one.second is None else [one.second])]
    counts = [text.count(MARK) if one.media else 0 for text in texts]
    if sum(counts) != len(one.media):
        raise RecordError("holds U+FFFC, Unicode's character for an object, beside media")
    files, token = find([*one.media]), str(tokenizer.backend.id_to_token(reader.processor.token))
    expanded, first = [], 0
    for text, count in zip(texts, counts, strict=True):
        shown = text.replace(MARK, reader.processor.shown) if count else text
        own, first = files[first : first + count], first + count
        expanded.append(reader.expand(shown, own, token, is_whole=True, shown_by="its text"))
    media = tuple(item for each in expanded for item in each.media)
    second = None if one.second is None else expanded[1].text
    return replace(one, text=expanded[0].text, second=second, media=media)
