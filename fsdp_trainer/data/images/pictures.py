"""Pictures as their files mean them: turned, in red, green and blue of 8 bits each.

The result is that of transformers' `load_image`, except for numbers of more than 8 bits, of which
that makes white or black.
"""

from contextlib import suppress
from typing import Any

import numpy as np

from fsdp_trainer.data.files.sources import RecordError

NOT_TURNED, SCALED = "images_not_turned", "images_scaled"
TRANSPARENT, FRAMES = "images_transparent", "images_first_frame"
"""Keys of `findings.KINDS` for what a picture lacks of its file."""
ORIENTATION = 0x112
"""EXIF's number for how the camera was held."""
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE",
    6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""What Pillow has to do with a picture, by its orientation."""
LARGEST = {"I": 0xFFFF, "F": 255.0}
"""The largest number that is read, by the first letter of Pillow's modes of more than 8 bits."""
WITH_PREVIEWS = ("MPO",)
"""Formats whose further pictures are previews and depths of the first: telephones write them."""


def as_shown(pillow: Any, picture: Any, name: str) -> tuple[Any, tuple[str, ...]]:
    """Return Pillow's image as a viewer shows it, in RGB, and keys for what it has lost.

    pillow: its module of images. Raises RecordError if it is unknown which number is white.
    """
    picture.load()
    turned, lost = _turned(pillow, picture)
    scaled = _scaled(pillow, turned, name)
    lost += [SCALED] * (scaled is not turned) + [TRANSPARENT] * _is_transparent(turned)
    if picture.format not in WITH_PREVIEWS and _has_frames(picture):
        lost.append(FRAMES)
    return scaled.convert("RGB"), tuple(lost)


def _turned(pillow: Any, picture: Any) -> tuple[Any, list[str]]:
    """Return the image turned as its EXIF or XMP data says, and the key of data that is broken."""
    try:
        orientation = picture.getexif().get(ORIENTATION)
    except Exception:  # whatever the reader of EXIF raises for broken data
        return picture, [NOT_TURNED]
    if orientation not in TURNS:
        return picture, []
    return picture.transpose(pillow.Transpose[TURNS[orientation]]), []


def _scaled(pillow: Any, picture: Any, name: str) -> Any:
    """Return an image of more than 8 bits as one of 8; the same if its numbers are up to 255."""
    mode = picture.mode[0]
    if mode not in LARGEST:
        return picture
    values = np.asarray(picture)
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= LARGEST[mode]:
        raise RecordError(
            f"the image {name} has numbers from {low:,.9g} to {high:,.9g}, and it is unknown which"
            " of them is white: save it with 8 or 16 bits"
        )
    if mode == "F" and 0 < high <= 1:
        return pillow.fromarray((values * 255).round().astype(np.uint8))
    if mode == "I" and high > 255:
        # the upper byte, which Pillow takes of 16 bits in colour
        return pillow.fromarray((values >> 8).astype(np.uint8))
    return picture


def _is_transparent(picture: Any) -> bool:
    """Return True if some pixel can be seen through."""
    if not picture.has_transparency_data:
        return False
    whole = picture if "A" in picture.getbands() else picture.convert("RGBA")
    return bool(whole.getchannel("A").getextrema()[0] < 255)


def _has_frames(picture: Any) -> bool:
    """Return True for an animation, or a file of several pages."""
    with suppress(Exception):  # whatever the reader raises for a broken second frame
        return bool(getattr(picture, "is_animated", False))
    return False
