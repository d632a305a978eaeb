"""The kinds of media that models read. A kind's name is also that in `records/row_kinds.py`."""

from collections.abc import Callable
from pathlib import Path

from fsdp_trainer.data.media.image_kind import IMAGE
from fsdp_trainer.data.media.media import MediaKind, MediaProcessor, MediaReader

KINDS: dict[str, MediaKind] = {one.name: one for one in (IMAGE,)}
"""By name."""
READ = IMAGE
"""The kind that models read: they have towers for one."""


def processor_of(folder: str) -> MediaProcessor:
    return READ.processor(folder)


def reader_of(
    processor: MediaProcessor,
    cache: Path,
    warn: Callable[[str, str], None] = lambda key, name: None,
) -> MediaReader:
    """Return what reads media for a model. cache: folder of data.cache."""
    return MediaReader(processor, READ.files(cache), warn)
