"""The kinds of media that models read. A kind's name is also that in `records/row_kinds.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fsdp_trainer.data.images.image_files import ImageFiles, changed_files
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.images.sample_images import SampleImage
from fsdp_trainer.data.media.media import MediaFiles, MediaProcessor, MediaReader, SampleMedium


class MediaKind(NamedTuple):
    """One kind. column: of stores; counts: of its samples and tokens, in stores and statistics."""

    name: str
    column: str
    counts: tuple[str, str]
    processor: Callable[[str], MediaProcessor]
    files: Callable[[Path], MediaFiles]
    from_json: Callable[[list], SampleMedium]
    changed: Callable[..., list[str]]


KINDS = {
    "image": MediaKind(
        "image",
        "images",
        ("images", "image_tokens"),
        ImageProcessor,
        ImageFiles,
        SampleImage.from_json,
        changed_files,
    ),
}
"""By name."""
READ = KINDS["image"]
"""The kind that models read: they have towers for one."""


def processor_of(folder: str) -> MediaProcessor:
    """Return what a model of a folder does with media."""
    return READ.processor(folder)


def reader_of(
    processor: MediaProcessor,
    cache: Path,
    warn: Callable[[str, str], None] = lambda key, name: None,
) -> MediaReader:
    """Return what reads media for a model. cache: folder of data.cache."""
    return MediaReader(processor, READ.files(cache), warn)
