"""Media in rows: parts of a turn, or a column with marks in the texts.

How rows name a kind of media is a RowMedia, in a file of its own (images.py) and in `ROW_KINDS`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.files.sources import RecordError

MARK = "\ufffc"
"""Stands for media in the content of a turn: Unicode's character for an object in a text."""
HELD = "images"
"""The key of a turn under which its media are, in order; the first kind has given it its name."""


@dataclass(frozen=True)
class RowMedia:
    """Names that rows have for one kind of media. A kind read as texts has no keys nor columns.

    kind: its name, also the type of its parts as templates read them. parts: types of parts of a
    turn. keys: of a turn, beside its content. columns: of a row. words: names of columns without a
    plural s, and what such columns hold. mark: stands for the next one of the column in a text.
    read: returns what a value names, `next` if it names none; a text stands for itself: the model
    then reads it as text.
    """

    kind: str
    parts: tuple[str, ...]
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    words: dict[str, str]
    mark: str
    read: Callable[[Any], Any]
    next: Any

    def read_all(self, value: Any) -> list[Any]:
        values = value if isinstance(value, list | tuple) else [value]
        items = [self.read(each) for each in values if each is not None]
        if self.next in items:
            empty = items.index(self.next) + 1
            raise RecordError(f"{self.kind} {empty} is empty: it has neither bytes nor path")
        return items

    def placed(self, messages: list[Json], items: list[Any]) -> list[Json]:
        """Return the turns with the media of a row's column in the places that stand for them.

        Those are parts without one, else marks in the texts; without either, they come before the
        text of the first user's turn. Raises RecordError if their numbers differ.
        """
        if self.next not in media_in(messages):
            messages = [self.marked(message) for message in messages]
        places = sum(one == self.next for one in media_in(messages))
        if not places:
            first = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), 0)
            turn = messages[first]
            own = [*([self.next] * len(items)), *turn.get(HELD, ())]
            text = MARK * len(items) + turn["content"]
            messages = [*messages]
            messages[first] = turn | {"content": text, HELD: own}
            places = len(items)
        if places != len(items):
            raise RecordError(
                f"has {counted(len(items), self.kind)}, and its turns have places for {places}"
            )
        given = iter(items)
        return [
            turn | {HELD: [next(given) if one == self.next else one for one in turn[HELD]]}
            if turn.get(HELD)
            else turn
            for turn in messages
        ]

    def marked(self, message: Json) -> Json:
        content, own = message["content"], iter(message.get(HELD, ()))
        marks = re.findall(f"{MARK}|{re.escape(self.mark)}", content)
        if self.mark not in marks:
            return message
        items = [self.next if mark == self.mark else next(own, self.next) for mark in marks]
        return message | {"content": content.replace(self.mark, MARK), HELD: items}


def media_in(messages: list[Json]) -> Iterator[Any]:
    for message in messages:
        yield from message.get(HELD, ())
