"""The first rows of the data as they were written, each with the tokens that training reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Record, Source, find_sources
from fsdp_trainer.data.prepared_data import cache_root
from fsdp_trainer.data.records.conversations import Readable, Reader
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.tokens.records_to_samples import choose_reader, read_texts

ROWS = 100
"""Rows of each source that are read."""


@dataclass(frozen=True)
class WrittenRow:
    """A row as it was written, and its samples: tokens, and the weight of each as a target."""

    written: Readable
    samples: list[tuple[np.ndarray, np.ndarray]]


def written_rows(evidence: Evidence) -> list[WrittenRow]:
    """Return the first rows of each source that training reads."""
    cfg, prepared = evidence.small.plain, evidence.data[2]
    streamed, places = prepared.streamed, samples_by_place(prepared.train)
    builder = streamed.options.builder() if streamed else None

    def samples_of(written: Readable) -> list[tuple[np.ndarray, np.ndarray]]:
        if builder is None:
            return places.get("{}:{}".format(*written.where), [])
        every = builder.tokenize(builder.render(written))
        return [(one.tokens, one.weights) for samples in every for one in samples]

    root = None if streamed else cache_root(cfg.data, cfg.run)
    first = (
        written
        for source in find_sources(cfg.data.path, "data.path", root)
        for written in islice(read_source(source, cfg.data, cfg.objective.method.reads), ROWS)
    )
    return [WrittenRow(one, samples) for one in first if (samples := samples_of(one))]


def samples_by_place(
    stores: list[TokenStore],
) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Return tokens and weights of samples by FILE:LINE of their rows."""
    places: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for store in stores:
        for sample in range(min(len(store), 20 * ROWS)):
            places.setdefault(store.where(sample), []).append(store.read(sample))
    return places


def read_source(source: Source, data: Data, kind: str) -> Iterator[Readable]:
    """Yield the rows of a source; those that cannot be read are left out. kind: of the data."""
    format, fields = source.columns(data)

    def choose(row: Record) -> Reader:
        return choose_reader(data, row.columns, row.where[0], format, fields, kind, True)

    for file in source.files:
        rows = read_texts(read_records(file), choose, lambda one: one, lambda row, reason: None)
        yield from (written for _, _, written in rows)
