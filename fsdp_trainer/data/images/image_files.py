"""Files of images: found, copied where a row holds bytes or a URL, checked, and opened."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from fsdp_trainer.config.data_files import is_url
from fsdp_trainer.data.files.media_files import MediaFile, digest_of
from fsdp_trainer.data.files.remote_files import fetch_file, origin_of
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.images.pictures import as_shown
from fsdp_trainer.data.records.images import Image
from fsdp_trainer.errors import UserError

MOST_PIXELS = 1 << 26
"""Pixels of the largest image that is read. A small file can name a size that fills the memory."""
MOST_BYTES = 256 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
"""All that Pillow is asked to open. Its reader of EPS would start Ghostscript on the content."""


class ImageFiles:
    """Finds the files of images. cache: folder of data.cache, for bytes and copies of URLs."""

    def __init__(self, cache: Path):
        self.cache = cache

    def find(self, image: Image, data_file: str) -> MediaFile:
        """Return the file of an image, decoded once. Raises RecordError, which names the image.

        data_file: the file that names it, whose folder relative paths begin at.
        """
        path = self._local(image, data_file)
        content, stamp = read_file(path, str(image))
        picture, lost = read_picture(content, str(image))
        return MediaFile(str(path), digest_of(content), picture.size, stamp, str(image), lost)

    def opened(self, image: Image, data_file: str = "") -> tuple[MediaFile, Any]:
        """Return an image of a prompt, and Pillow's. Its bytes are written to no file.

        data_file: see `find`. Raises RecordError.
        """
        content = image.content or read_file(self._local(image, data_file), str(image))[0]
        picture, lost = read_picture(content, str(image))
        digest = digest_of(content)
        return MediaFile("", digest, picture.size, (0, 0), str(image), lost), picture

    def _local(self, image: Image, data_file: str) -> Path:
        if image.content:
            return self._kept(image.content)
        place = image.place
        if not is_url(place) and not os.path.isabs(place):
            base = origin_of(data_file, self.cache)
            place = f"{base}/{place}" if base else os.path.join(os.path.dirname(data_file), place)
        if not is_url(place):
            return Path(place)
        try:
            return fetch_file(place, "image", self.cache)
        except UserError as error:
            raise RecordError(f"the image {place} {error.problems[0].reason}") from None

    def _kept(self, content: bytes) -> Path:
        """Return the file of bytes that a row holds, written once."""
        name = digest_of(content)
        path = self.cache / "images" / name[:2] / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_bytes(content)
            os.replace(aside, path)
        return path


def read_file(path: Path | str, name: str) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of an image's file, and its size and time of change. Raises RecordError."""
    try:
        about = os.stat(path)
        if about.st_size > MOST_BYTES:
            raise RecordError(
                f"the image {name} has {about.st_size:,} bytes, and at most {MOST_BYTES:,} are read"
            )
        return Path(path).read_bytes(), (about.st_size, about.st_mtime_ns)
    except FileNotFoundError:
        raise RecordError(f"the image {name} does not exist: there is no {path}") from None
    except OSError as error:
        raise RecordError(f"the image {name} cannot be read: {error.strerror}") from None


def decoded(content: bytes, name: str) -> Any:
    """Return Pillow's image in red, green and blue. Raises RecordError if it cannot be decoded."""
    return read_picture(content, name)[0]


def read_picture(content: bytes, name: str) -> tuple[Any, tuple[str, ...]]:
    """Return Pillow's image in red, green and blue, and what it has lost: see `as_shown`.

    Raises RecordError if it cannot be decoded.
    """
    pillow = pillow_module()
    with _as_record_error(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a size that is checked here
        picture = opened(pillow, content, name)
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise RecordError(
                f"the image {name} has {width:,} × {height:,} pixels, and at most {MOST_PIXELS:,}"
                " are read: make it smaller"
            )
        return as_shown(pillow, picture, name)


def opened(pillow: Any, content: bytes, name: str) -> Any:
    """Return Pillow's image, not decoded yet. Raises RecordError if it is in none of FORMATS."""
    if not content:
        raise RecordError(f"the image {name} cannot be decoded: it is empty")
    pillow.init()
    known = [form for form in FORMATS if form in pillow.OPEN]
    try:
        return pillow.open(BytesIO(content), formats=known)
    except pillow.UnidentifiedImageError:
        text = f"the image {name} cannot be decoded: it is none of {', '.join(known)}, or it is cut"
        raise RecordError(text) from None


@contextmanager
def _as_record_error(name: str) -> Iterator[None]:
    try:
        yield
    except RecordError:
        raise
    except Exception as error:  # whatever a decoder raises for broken content
        text = f"the image {name} cannot be decoded: {first_line(error)}"
        raise RecordError(text) from None


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def pillow_module() -> Any:
    try:
        from PIL import Image as pillow
    except ImportError:
        reason = "it is not installed:  pip install 'fsdp_trainer[images]'"
        raise UserError("images are decoded by Pillow", "Pillow", reason) from None
    return pillow
