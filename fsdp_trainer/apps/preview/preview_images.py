"""Media in a preview: a mark in place of their tokens, and a small picture for the page."""

from base64 import b64encode
from io import BytesIO
from pathlib import Path

from fsdp_trainer.apps.preview.preview_page import TextPiece
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.images.image_files import decoded, read_file
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.media.media import SampleMedium
from fsdp_trainer.data.store.token_store import TokenStore

THUMBNAIL = 96
"""Pixels of the longer side of a picture on the page."""


class ShownImages:
    """Shows the media of samples. token: the number of the token that stands for them."""

    def __init__(self, token: int):
        self.token = token
        self._pictures: dict[str, str] = {}

    @classmethod
    def of(cls, init_from: str | None, stores: list[TokenStore]) -> "ShownImages | None":
        if init_from is None or not any(store.samples_with_media for store in stores):
            return None
        folder = model_folder(fetch(init_from, weights=False))
        return cls(ImageProcessor(str(folder)).token)

    def marked(self, pieces: list[TextPiece], media: list[SampleMedium]) -> list[TextPiece]:
        """Return the pieces of a document, with one in place of the tokens of each image."""
        shown: list[TextPiece] = []
        waiting, count = iter(media), 0
        image = next(waiting, None)
        for piece in pieces:
            if image is None or piece.ids != [self.token]:
                shown.append(piece)
                continue
            count += 1
            if count == image.tokens:
                shown.append(self._piece(image))
                image, count = next(waiting, None), 0
        return shown

    def _piece(self, image: SampleMedium) -> TextPiece:
        path, (width, height) = image.file.path, image.file.size
        if path not in self._pictures:
            self._pictures[path] = thumbnail(path)
        text = f"⟦{Path(path).name} {width} × {height}: {image.tokens} tokens⟧"
        return TextPiece(text, [self.token] * image.tokens, 0.0, True, self._pictures[path])


def thumbnail(path: str) -> str:
    """Return a small copy of an image as a data URL; empty if it cannot be read any more."""
    try:
        picture = decoded(read_file(path, path)[0], path)
    except RecordError:
        return ""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = BytesIO()
    picture.save(file, "JPEG")
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
