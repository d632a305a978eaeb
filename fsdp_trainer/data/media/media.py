"""Media in the text of a sample: their marks become as many tokens as the model takes.

What differs from kind to kind are a model's processor, its files and its samples: see `kinds.py`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.sources import RecordError

Arrays = dict[str, np.ndarray]
"""What a processor makes of media, by transformers' names."""


class MediaFile(Protocol):
    """The local file of one medium.

    stamp: its bytes and mtime. name: as its row has it. lost: keys of `findings.KINDS` for what the
    model does not perceive of it. size: whatever decides its tokens.
    """

    @property
    def path(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def stamp(self) -> tuple[int, int]: ...
    @property
    def name(self) -> str: ...
    @property
    def lost(self) -> tuple[str, ...]: ...
    @property
    def size(self) -> Any: ...


class SampleMedium(Protocol):
    """One medium of a sample. tokens: number of the sample's tokens that stand for it."""

    @property
    def file(self) -> MediaFile: ...
    @property
    def tokens(self) -> int: ...

    def as_json(self) -> list:
        """Return it as a store keeps it."""

    def load(self, processor: Any) -> Arrays:
        """Return its arrays. Raises UserError if its file is not what was tokenized."""


class MediaProcessor(Protocol):
    """What a model does with media of a kind before its tower.

    kind: its name. token: the token whose states are replaced. mark: stands for one in a rendered
    text. shown: stands for one in a text without a chat template, and holds the mark. fingerprint:
    a hash of all that decides tokens and numbers.
    """

    kind: str

    @property
    def token(self) -> int: ...
    @property
    def mark(self) -> str: ...
    @property
    def shown(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def text_of(self, size: Any, name: str = "") -> str:
        """Return the text in place of the mark. Raises RecordError."""

    def sample(self, file: Any, tokens: int) -> SampleMedium:
        """Return the medium of a sample."""

    def numbers_of(self, content: Any, name: str = "") -> Arrays:
        """Return the arrays of one that is read. Raises RecordError."""

    def smallest(self) -> Arrays:
        """Return the arrays of the smallest medium, for ranks without any."""

    def example(self) -> Any:
        """Return one with which a model is tried out."""


class MediaFiles(Protocol):
    """Finds the files of a kind."""

    def find(self, item: Any, data_file: str) -> Any:
        """Return the file of what a row names. Raises RecordError."""

    def opened(self, item: Any, data_file: str = "") -> tuple[Any, Any]:
        """Return the file of what is named, read once, and its content. Raises RecordError."""


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
    """Reads the media of rows. processor: the model's.

    warn: called with the key of each thing that a medium has lost, and its name.
    """

    def __init__(
        self,
        processor: Any,
        files: MediaFiles,
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
            media.append(self.processor.sample(file, instead.count(token)))
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
    model's folder. files: in the folder of data.cache. from_json: reads what `as_json` has written.
    changed: returns the paths of files that are not what was tokenized. findings: sentence and
    advice for each key in `MediaFile.lost`.
    """

    name: str
    column: str
    counts: tuple[str, str]
    processor: Callable[[str], Any]
    files: Callable[[Path], MediaFiles]
    from_json: Callable[[list], SampleMedium]
    changed: Callable[[Iterable[Any]], list[str]]
    findings: dict[str, tuple[str, str]]
