"""Images as rows name them."""

import base64
import binascii
import os
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.media import RowMedia

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

    part: ClassVar[str] = "image"
    """The type of the part for a template."""

    def __str__(self) -> str:
        is_long = len(self.place) > LONGEST_NAME
        name = f"{self.place[:LONGEST_NAME]}…" if is_long else self.place
        return name or f"of {len(self.content):,} bytes"

    def at(self, file: str) -> str:
        """Return the image's whole path, its URL, or a data URL. file: that names it."""
        if self.content:
            return f"data:image;base64,{base64.b64encode(self.content).decode()}"
        is_whole = bool(urlsplit(self.place).scheme) or os.path.isabs(self.place)
        near = os.path.join(os.path.dirname(file), self.place)
        return self.place if is_whole else os.path.abspath(near)


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


IMAGES = RowMedia(
    kind=Image.part,
    parts=("image", "image_url", "input_image"),  # Hugging Face's and Qwen's, OpenAI's, and others
    keys=("images", "image"),
    columns=("images", "image", "image_path", "image_url"),
    words=dict.fromkeys(("image", "img", "picture", "pixel_value"), "pictures"),
    mark="<image>",  # in texts of LLaVA, ShareGPT and others
    read=image_of,
    next=NEXT,
)
"""How rows name images."""
