"""The cache of tokenized data.

Data is tokenized once, into a folder named by a hash of everything that decides the tokens. Later
runs find it there.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_trainer.config.data_files import entries, is_mixture
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import find_sources
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.records.preference_records import PAIRS
from fsdp_trainer.data.store.component_store import (
    ComponentSources,
    ComponentStores,
    Reporter,
    commit,
    read_complete,
)
from fsdp_trainer.data.store.fingerprint import contents, fingerprint
from fsdp_trainer.data.store.token_store import TokenStore, add_totals, merge, read_meta, write_meta
from fsdp_trainer.data.store.tokenize_tasks import TRAIN, VALIDATION
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.records_to_samples import TokenizeOptions
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer


def components(
    data: Data, root: Path, reporter: Reporter
) -> tuple[list[ComponentSources], ComponentSources | None]:
    """Return the components to train on and the one to validate on, after fetching remote files.

    The second is None if validation data is absent or a share of the training data. Raises
    UserError if there is no data.
    """
    sources = find_sources(data.path, "data.path", root, reporter.say, reporter.progress)
    named = entries(data.path)
    share = data.validation if isinstance(data.validation, int | float) else 0.0
    if is_mixture(data.path) and len(named) > 1:
        train = [ComponentSources(source.name, [source], share) for source in sources]
    else:
        train = [ComponentSources(named[0].name or TRAIN, sources, share)]
    if data.validation is None or share:
        return train, None
    return train, ComponentSources(
        VALIDATION,
        find_sources(data.validation, "data.validation", root, reporter.say, reporter.progress),
        key="data.validation",
    )


def component_stores(
    data: Data,
    batch: Batch,
    tokenizer: TextTokenizer,
    template: Template,
    root: Path,
    reporter: Reporter,
    kind: str | None = None,
    media: MediaReader | None = None,
    answer: int = 0,
) -> list["ComponentStores"]:
    """Return the preparation of every component, with separate validation data as the last one.

    kind: passed to `make_reader`. media, answer: see TokenizeOptions.
    """
    train, held_out = components(data, root, reporter)
    every = [*train, *([held_out] if held_out else [])]
    content = contents(
        [file for component in every for file in component.files],
        root,
        lambda: reporter.progress("data   hashing files"),
    )
    seq_len = batch.seq_len - answer
    options = TokenizeOptions(data, seq_len, 0.0, tokenizer, template, kind, media, answer)
    return [
        ComponentStores(component, replace(options, share=component.share), content, root, reporter)
        for component in every
    ]


def require_kind(one: ComponentStores, stores: dict[str, TokenStore], kind: str) -> None:
    """Raise UserError if cached stores hold pairs but single answers are needed, or vice versa."""
    samples = sum(map(len, stores.values()))
    groups = sum(store.groups for store in stores.values())
    expected = samples // 2 if kind == PAIRS else samples
    if groups == expected and all(store.kinds is None for store in stores.values()):
        return
    for source in one.component.sources:
        format, fields = source.columns(one.options.data)
        for file in source.files:
            row = next((row for row in read_records(file) if not row.error), None)
            if row is not None:
                make_reader(row.columns, format, fields, file, kind)


def merge_held_out(
    preparing: list["ComponentStores"], stores: list[TokenStore], root: Path
) -> TokenStore:
    if len(preparing) == 1:
        return stores[0]
    folder = root / fingerprint([one.folder.name for one in preparing])
    meta = read_complete(folder)
    if not meta:
        with tempfile.TemporaryDirectory(
            prefix=".together-", dir=root, ignore_cleanup_errors=True
        ) as aside:
            whole = Path(aside) / "whole"
            whole.mkdir()
            of_samples = merge([store.folder for store in stores], whole / VALIDATION, lambda: None)
            firsts = np.cumsum([0, *(len(one.component.files) for one in preparing)])
            for column, values in {
                "sources": [np.full(len(store), i, np.int32) for i, store in enumerate(stores)],
                "files": [
                    store.files + np.int32(first)
                    for store, first in zip(stores, firsts, strict=False)
                ],
            }.items():
                np.concatenate(values).astype(np.int32).tofile(whole / VALIDATION / f"{column}.bin")
            totals: dict[str, dict[str, int]] = {}
            for i, one in enumerate(preparing):
                for source_totals in one.meta["stores"][VALIDATION]["totals"].values():
                    add_totals(totals, {str(i): source_totals})
            write_meta(
                whole, {"stores": {VALIDATION: {"fingerprint": of_samples, "totals": totals}}}
            )
            if not read_complete(folder):  # it is damaged; or another rank has made it
                shutil.rmtree(folder, ignore_errors=True)
            commit(whole, folder)
        meta = read_meta(folder)
    files = [file for one in preparing for file in one.component.files]
    about = meta["stores"][VALIDATION]
    return TokenStore(
        folder / VALIDATION, about["fingerprint"], [one.component.name for one in preparing], files
    )
