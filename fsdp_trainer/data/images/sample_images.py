"""Images in the text of a sample: their marks become as many tokens as the model takes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.images.image_files import (
    ImageFile,
    ImageFiles,
    decoded,
    digest_of,
    read_file,
)
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.records.images import Image
from fsdp_trainer.errors import Problem, UserError


@dataclass(frozen=True)
class SampleImage:
    """An image of a sample. tokens: number of the sample's tokens that stand for it."""

    file: ImageFile
    tokens: int

    def as_json(self) -> list:
        """Return it as JSON has it."""
        return [self.file.path, self.file.digest, *self.file.size, *self.file.stamp, self.tokens]

    @classmethod
    def from_json(cls, values: list) -> "SampleImage":
        """Return the image that `as_json` has described."""
        path, digest, width, height, size, mtime, tokens = values
        return cls(ImageFile(path, digest, (width, height), (size, mtime)), tokens)


def images_json(images: Sequence[SampleImage]) -> str:
    """Return the images of a sample as a store keeps them."""
    return json.dumps([image.as_json() for image in images]) if images else ""


@dataclass
class Expanded:
    """A text in which the marks of images are replaced. shifts: (end of a mark, added characters).

    spans: characters [start, end) of the new text that stand for images.
    """

    text: str
    images: tuple[SampleImage, ...]
    shifts: list[tuple[int, int]]
    spans: list[tuple[int, int]]

    def moved(self, place: int) -> int:
        """Return where a character of the text with marks is now."""
        return place + sum(added for end, added in self.shifts if end <= place)


class ImageReader:
    """Reads the images of rows. processor: the model's; cache: folder of data.cache.

    warn: called with the key of each thing that an image has lost, and the image's name.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        cache: Path,
        warn: Callable[[str, str], None] = lambda key, name: None,
    ):
        self.processor, self.files, self.warn = processor, ImageFiles(cache), warn
        self._last: tuple[Any, list[ImageFile]] = None, []

    def find(
        self,
        images: list[Image],
        data_file: str,
        warn: Callable[[str, str], None] | None = None,
    ) -> list[ImageFile]:
        """Return the files of a row's images. Raises RecordError.

        The images of the last call are not decoded again: both answers of a pair have the same.
        warn: in place of that of the reader.
        """
        asked = images, data_file
        if self._last[0] != asked:
            self._last = asked, [self.files.find(image, data_file) for image in images]
            self.say_lost(self._last[1], warn)
        return self._last[1]

    def say_lost(
        self, files: Sequence[ImageFile], warn: Callable[[str, str], None] | None = None
    ) -> None:
        """Say what images have lost. warn: in place of that of the reader."""
        for file in files:
            for key in file.lost:
                (warn or self.warn)(key, file.name)

    def expand(self, text: str, files: Sequence[ImageFile], token: str, is_whole: bool) -> Expanded:
        """Return a rendered conversation with its images.

        files: of all images of the conversation; a part of it shows the first of them. token: the
        text of the token that stands for a part of an image. Raises RecordError.
        """
        mark = self.processor.mark
        pieces = text.split(mark)
        shown = len(pieces) - 1
        if shown > len(files) or (is_whole and shown < len(files)):
            raise RecordError(
                f"has {counted(len(files), 'image')}, and the chat template shows {shown}: {mark}"
                " stands for one"
            )
        expanded, images, spans, shifts, place = pieces[0], [], [], [], len(pieces[0])
        for file, after in zip(files, pieces[1:], strict=False):
            instead = self.processor.text_of(file.size, file.name)
            images.append(SampleImage(file, instead.count(token)))
            spans.append((len(expanded), len(expanded) + len(instead)))
            place += len(mark)
            shifts.append((place, len(instead) - len(mark)))
            place += len(after)
            expanded += instead + after
        if expanded.count(token) != sum(image.tokens for image in images):
            raise RecordError(f"a text holds {token}, which stands for a part of an image")
        return Expanded(expanded, tuple(images), shifts, spans)


def load_image(processor: ImageProcessor, image: SampleImage) -> dict[str, np.ndarray]:
    """Return the arrays of an image. Raises UserError if its file is not what was tokenized."""
    path = image.file.path
    try:
        content, _ = read_file(path, path)
        if digest_of(content) != image.file.digest:
            raise RecordError("has changed since it was tokenized: start again")
        return processor.numbers_of(decoded(content, path), path)
    except RecordError as error:
        raise UserError("an image cannot be used", [Problem(path, str(error))]) from None
