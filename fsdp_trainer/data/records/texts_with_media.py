"""Texts that are read without a chat template, and the media in them.

A text is written as the content of a turn is: a text, a part, or a list of parts.
"""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import shown_value
from fsdp_trainer.data.records.media import HELD, MARK, RowMedia
from fsdp_trainer.data.records.messages import Message, content_of, text_of
from fsdp_trainer.data.records.record_formats import MEDIA_MEANINGS, usual_name


@dataclass(frozen=True)
class MarkedText:
    """A text with a MARK in the place of each of its media. Without media, a MARK is text.

    file: in which it stands; paths of media begin at its folder.
    """

    text: str
    media: tuple[Any, ...] = ()
    file: str = ""

    @property
    def as_turn(self) -> Message:
        turn: Message = {"role": "user", "content": self.text}
        return turn | ({HELD: [*self.media]} if self.media else {})

    @classmethod
    def of_turn(cls, turn: Message) -> "MarkedText":
        return cls(turn["content"], tuple(turn.get(HELD, ())))


def marked_text(value: Any, name: str) -> MarkedText:
    """Return a text of a row. Raises RecordError. name: of its column.

    An object without a type is an image, or as a turn has them: {"text": …, "image": …}.
    """
    if isinstance(value, dict) and "type" not in value:
        return _of_object(value, name)
    parts = value if isinstance(value, list) else [value]
    if not any(isinstance(part, dict) for part in parts):
        return MarkedText(text_of(value, name))
    content = content_of(value, {}, repr(name))
    if content.reasoning or content.calls:
        raise RecordError(f"{name!r} holds reasoning or calls, which are parts of a conversation")
    return MarkedText(content.text, tuple(content.media))


def _of_object(value: dict[str, Any], name: str) -> MarkedText:
    text = value.get("text")
    for kind in MEDIA_MEANINGS.values():
        given = [value[key] for key in kind.keys if value.get(key)]
        if not given and text is None and kind.read(value) != kind.next:
            given = [value]
        if items := kind.read_all(given[0]) if given else []:
            return MarkedText(MARK * len(items) + text_of(text or "", name), tuple(items))
    if text is None:
        raise RecordError(f"{name!r} should be a text or its media, it is {shown_value(value)}")
    return MarkedText(text_of(text, name))


def media_column(name: str) -> RowMedia | None:
    kinds = MEDIA_MEANINGS.values()
    return next((kind for kind in kinds if usual_name(name) in kind.columns), None)
