"""Media in the text of a sample: their marks become as many tokens as the model takes.

What differs from kind to kind are a model's processor, its files and its samples: see `kinds.py`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.media_files import MediaFile, SampleMedium
from fsdp_trainer.data.files.sources import RecordError

Arrays = dict[str, np.ndarray]
"""What a processor makes of media, by transformers' names."""


class MediaProcessor(Protocol):
    """What a model does with media of a kind before its tower.

    kind: its name. token: the token whose states are replaced. mark: stands for one in a rendered
    text. shown: stands for one in a text without a chat template, and holds the mark. fingerprint:
    a hash of all that decides tokens and numbers.
    """

    kind: str
    token: int
    mark: str
    shown: str
    fingerprint: str

    def text_of(self, size: Any, name: str = "") -> str:
        """Return the text in place of the mark. Raises RecordError."""

    def load(self, file: Any) -> Arrays:
        """Return the arrays of a sample's file. Raises UserError if it has changed."""

    def numbers_of(self, content: Any, name: str = "") -> Arrays:
        """Return the arrays of one that is read. Raises RecordError."""

    def smallest(self) -> Arrays:
        """Return the arrays of the smallest medium, for ranks without any."""

    def example(self) -> Any:
        """Return one with which a model is tried out."""


@dataclass
class Expanded:
    """A text in which the marks of media are replaced. shifts: (end of a mark, added characters).

    spans: characters [start, end) of the new text that stand for media.
    """

    text: str
    media: tuple[SampleMedium, ...]
    shifts: list[tuple[int, int]]
    spans: list[tuple[int, int]]

    def moved(self, place: int) -> int:
        return place + sum(added for end, added in self.shifts if end <= place)


class MediaReader:
    """Reads the media of rows. processor: the model's. files: finds and opens those of a kind.

    warn: called with the key of each thing that a medium has lost, and its name.
    """

    def __init__(
        self,
        processor: Any,
        files: Any,
        warn: Callable[[str, str], None] = lambda key, name: None,
    ):
        self.processor, self.files, self.warn = processor, files, warn
        self._last: tuple[Any, list[Any]] = None, []

    def find(
        self,
        items: list[Any],
        data_file: str,
        warn: Callable[[str, str], None] | None = None,
    ) -> list[Any]:
        """Return the files of a row's media. Raises RecordError.

        Those of the last call are not decoded again: both answers of a pair have the same. warn: in
        place of that of the reader.
        """
        key = items, data_file
        if self._last[0] != key:
            self._last = key, [self.files.find(item, data_file) for item in items]
            self.say_lost(self._last[1], warn)
        return self._last[1]

    def say_lost(
        self, files: Sequence[MediaFile], warn: Callable[[str, str], None] | None = None
    ) -> None:
        """Say what media have lost. warn: in place of that of the reader."""
        for file in files:
            for key in file.lost:
                (warn or self.warn)(key, file.name)

    def expand(
        self,
        text: str,
        files: Sequence[MediaFile],
        token: str,
        is_whole: bool,
        shown_by: str = "the chat template",
    ) -> Expanded:
        """Return a rendered conversation with its media.

        files: of all media of the conversation; a part of it shows the first of them. token: the
        text of the token that stands for a part of one. shown_by: what has put the marks into the
        text. Raises RecordError.
        """
        mark, kind = self.processor.mark, self.processor.kind
        pieces = text.split(mark)
        shown = len(pieces) - 1
        if shown > len(files) or (is_whole and shown < len(files)):
            raise RecordError(
                f"has {counted(len(files), kind)}, and {shown_by} shows {shown}: {mark}"
                " stands for one"
            )
        expanded, media, spans, shifts, place = pieces[0], [], [], [], len(pieces[0])
        for file, after in zip(files, pieces[1:], strict=False):
            instead = self.processor.text_of(file.size, file.name)
            media.append(SampleMedium(file, instead.count(token)))
            spans.append((len(expanded), len(expanded) + len(instead)))
            place += len(mark)
            shifts.append((place, len(instead) - len(mark)))
            place += len(after)
            expanded += instead + after
        if expanded.count(token) != sum(one.tokens for one in media):
            raise RecordError(f"a text holds {token}, which stands for a part of an {kind}")
        return Expanded(expanded, tuple(media), shifts, spans)


def media_json(media: Sequence[SampleMedium]) -> str:
    return json.dumps([one.as_json() for one in media]) if media else ""


def joined(arrays: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}


@dataclass(frozen=True)
class MediaKind:
    """One kind of media, from files to a model.

    column: of stores. counts: keys of the numbers of its samples and tokens. processor: of a
    model's folder. files: in the folder of data.cache, with the methods of ImageFiles. findings:
    sentence and advice for each key in `MediaFile.lost`.
    """

    name: str
    column: str
    counts: tuple[str, str]
    processor: Callable[[str], Any]
    files: Callable[[Path], Any]
    findings: dict[str, tuple[str, str]]
