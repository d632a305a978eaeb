"""Images as rows name them: parts of a turn, or a column with marks in the texts."""

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.sources import RecordError

MARK = "\ufffc"
"""Stands for an image in the content of a turn: Unicode's character for an object in a text."""
COLUMN_MARK = "<image>"
"""Stands for an image of the row's column in texts of LLaVA, ShareGPT and others."""
EITHER_MARK = re.compile(f"{MARK}|{re.escape(COLUMN_MARK)}")
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a part that is an image: Hugging Face's and Qwen's, OpenAI's for chats and others."""
PLACES = ("image", "image_url", "url", "path", "base64", "data", "bytes", "source")
"""Keys of a part, or of an object in a column, that hold an image or say where it is."""
SHORTEST_BASE64 = 64
"""Characters of base64 that are not taken for the name of a file."""
OF_URLS = str.maketrans("-_", "+/")
"""The characters of base64 that may stand in a URL, and the usual ones."""
LONGEST_NAME = 300
"""Characters of an image's path or URL that a message shows."""


@dataclass(frozen=True)
class Image:
    """An image as a row names it.

    place: path or URL; empty if the row holds the file itself. content: the bytes of its file.
    Both are empty for a part that stands for the next image of the row's column.
    """

    place: str = ""
    content: bytes = b""

    def __str__(self) -> str:
        is_long = len(self.place) > LONGEST_NAME
        name = f"{self.place[:LONGEST_NAME]}…" if is_long else self.place
        return name or f"of {len(self.content):,} bytes"


NEXT = Image()
"""Stands for the next image of the row's column."""


def image_of(value: Any) -> Image:
    """Return an image from a part, an object with bytes or a path, a text, or bytes.

    Raises RecordError for anything else.
    """
    if isinstance(value, bytes | bytearray):
        return Image(content=bytes(value))
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, dict):
        given = [value[key] for key in PLACES if value.get(key)]
        # Hugging Face's Image feature has both: the path is then a name without a file
        inner = value["bytes"] if value.get("bytes") else next(iter(given), None)
        return NEXT if inner is None else image_of(inner)
    raise RecordError(f"an image should be a path, a URL or bytes, it is {type(value).__name__}")


def images_of(value: Any) -> list[Image]:
    """Return the images of a column: one, or a list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    images = [image_of(each) for each in values if each is not None]
    if NEXT in images:
        raise RecordError(f"image {images.index(NEXT) + 1} is empty: it has neither bytes nor path")
    return images


def _from_text(text: str) -> Image:
    """Return the image of a data URL, base64, a URL or a path."""
    if text[:5].lower() == "data:":
        head, _, body = text.partition(",")
        content = unquote_to_bytes(body)
        if head.lower().endswith(";base64"):
            content = _decoded(content.decode("latin-1").translate(OF_URLS))
        if not content:
            raise RecordError(f"an image's data URL cannot be decoded: {text[:40]}…")
        return Image(content=content)
    if urlsplit(text).scheme == "file":
        return Image(unquote(urlsplit(text).path))
    if len(text) >= SHORTEST_BASE64 and (content := _decoded(text)):
        return Image(content=content)
    return Image(text)


def _decoded(text: str) -> bytes:
    """Return the bytes of base64, in lines or not; none if the text is something else."""
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return b""


def images_in(messages: list[dict[str, Any]]) -> Iterator[Image]:
    """Yield the images of turns, in order."""
    for message in messages:
        yield from message.get("images", ())


def with_column(messages: list[dict[str, Any]], images: list[Image]) -> list[dict[str, Any]]:
    """Return the turns with a row's images in the places that stand for them.

    Those are parts without an image, else marks in the texts; without either, the images come
    before the text of the first user's turn. Raises RecordError if their numbers differ.
    """
    if not any(image == NEXT for image in images_in(messages)):
        messages = [with_marks(message) for message in messages]
    places = sum(image == NEXT for image in images_in(messages))
    if not places:
        first = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), 0)
        turn = messages[first]
        own = [*([NEXT] * len(images)), *turn.get("images", ())]
        text = MARK * len(images) + turn["content"]
        messages = [*messages]
        messages[first] = turn | {"content": text, "images": own}
        places = len(images)
    if places != len(images):
        raise RecordError(
            f"has {counted(len(images), 'image')}, and its turns have places for {places}"
        )
    given = iter(images)
    return [
        turn | {"images": [next(given) if one == NEXT else one for one in turn["images"]]}
        if turn.get("images")
        else turn
        for turn in messages
    ]


def with_marks(message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose marks for images of a column stand for the next ones."""
    content, own = message["content"], iter(message.get("images", ()))
    marks = EITHER_MARK.findall(content)
    if COLUMN_MARK not in marks:
        return message
    images = [NEXT if mark == COLUMN_MARK else next(own, NEXT) for mark in marks]
    return message | {"content": content.replace(COLUMN_MARK, MARK), "images": images}
