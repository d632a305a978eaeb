"""Counts samples and columns of another trainer's data, where its files are here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.config.data_files import ARROW, CSV, JSON, kind
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import find_sources
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.convert.defaults import AROUND
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.trainers import OWN_TOOL

LARGEST = 2**30
"""Bytes of data that are read to count samples."""


def counted(file: ForeignFile, path: Any) -> ForeignFile:
    if "://" in str(path) or str(path).startswith("demo:"):
        return file
    try:
        files = [one for source in find_sources(path, "data.path") for one in source.files]
        is_large = sum(Path(one).stat().st_size for one in files) > LARGEST
        if is_large or any(kind(one)[0] not in (*ARROW, *CSV, *JSON) for one in files):
            return file
        samples = 0
        first: dict[str, Any] = {}
        for one in files:
            for record in read_records(one):
                first = first or record.columns
                samples += record.error is None
    except (UserError, OSError, ValueError, RecursionError):
        return file
    return with_nothing_around(replace(file, samples=samples, columns=frozenset(first)), first)


def with_nothing_around(file: ForeignFile, sample: dict[str, Any]) -> ForeignFile:
    is_text = any(isinstance(sample.get(name), str) for name in ("prompt", "text"))
    if not (is_text and file.method and file.tool == OWN_TOOL):
        return file
    settings = file.settings | {AROUND: "no text"}
    return replace(file, settings=settings, implied=file.implied | {AROUND})
