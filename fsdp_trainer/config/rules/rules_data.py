"""Rules between keys of the data. See config/rules/rules.py."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fsdp_trainer.config.check import (
    Report,
    Violations,
    as_text,
    convert,
    value_of,
    wrong_type,
    wrong_with,
)
from fsdp_trainer.config.data_files import Entry, entries, is_mixture
from fsdp_trainer.config.names import nearest, table
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import PrepareConfig, PreviewConfig, TokenizerConfig

LISTS = ("data.path", "data.validation")
"""Keys whose value may be a list of entries."""
ENTRY_PARTS = {field.name: field for field in fields(Entry)}
VALIDATION = {
    "data.validation": "data.validation=0.02",
    "train.validate_every": "train.validate_every=100",
}
"""Keys that a validation loss needs, with an example of an override for each."""


def padding(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.data.pad_to_multiple is None:
        return
    key = "data.pad_to_multiple"
    if cfg.data.packing != "none":
        full = f"with data.packing={cfg.data.packing} rows are full"
        yield key, f"{full}.\nUse  data.packing=none  or leave it out"
    elif cfg.compile.enabled:
        compiled = "micro-batches of many lengths have compiled blocks compiled again and again"
        yield key, f"{compiled}.\nUse  compile=disabled  or leave it out"


def stream_packing(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.data.packing == "stream" and cfg.data.too_long != "split":
        yield (
            "data.packing",
            "a stream cuts documents where rows end, it leaves none out.\n"
            "Use  data.too_long=split  or  data.packing=best_fit",
        )


def streaming(cfg: TrainConfig, report: Report) -> Violations:
    """Check that no setting needs streamed data to be counted, divided or prepared beforehand."""
    if not cfg.data.streaming or isinstance(cfg, TokenizerConfig):
        return
    if isinstance(cfg, PrepareConfig):
        yield (
            "data.streaming",
            "a stream is tokenized while it is trained on: there is nothing to prepare.\n"
            "Use  data.streaming=false",
        )
    elif cfg.train.steps is None and not isinstance(cfg, PreviewConfig):
        yield (
            "data.streaming",
            "nobody knows how long an epoch is before it has been read.\n"
            "Use  train.steps=1000  or  data.streaming=false",
        )
    if not cfg.batch.across_epochs:
        yield (
            "batch.across_epochs",
            "a stream has no epochs.\nUse  batch.across_epochs=true  or  data.streaming=false",
        )
    if isinstance(cfg.data.validation, float):
        yield (
            "data.validation",
            "a share is not known before all has been read. Name what to hold out, e.g.  "
            "data.validation=heldout.jsonl",
        )
    if is_mixture(cfg.data.path):
        yield (
            "data.path",
            "weights and repeats need all lengths before training.\n"
            "Use  data.streaming=false  or paths without weight and repeat",
        )
    if cfg.data.prefetch == 0:
        yield (
            "data.prefetch",
            "rows are made by a thread, ahead.\nUse  data.prefetch=1  or  data.streaming=false",
        )


def share_held_out(cfg: TrainConfig, report: Report) -> Violations:
    share = cfg.data.validation
    if isinstance(share, float) and not 0 < share < 1:
        reason = "a share is between 0 and 1, e.g.  data.validation=0.02 ; null: none"
        yield "data.validation", reason


def entries_of_a_list(cfg: TrainConfig, report: Report) -> Violations:
    """Check the parts of entries, and that the weights or repeats of a list fit together.

    It also converts the parts' values to their types.
    """
    for key in LISTS:
        listed = value_of(cfg, key)
        if not isinstance(listed, list):
            continue
        for item in listed:
            if isinstance(item, dict):
                yield from ((key, reason) for reason in _wrong_parts(item))
        if key not in report.settled:
            reason = _wrong_mixture(key, entries(listed))
            if reason:
                yield key, reason


def _wrong_parts(item: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of each part of an entry; convert the values of the right ones."""
    for name, value in item.items():
        reason = _wrong_part(item, name)
        if reason:
            yield f"{name}: {as_text(value)}  {reason}"
    if item.get("path") is None:
        yield f"{as_text(item)}  lacks a path, as in  {{path: chats.jsonl, weight: 0.7}}"


def _wrong_part(item: dict[str, Any], name: str) -> str | None:
    if name not in ENTRY_PARTS:
        close = table().entries.get(name) or nearest(name, ENTRY_PARTS)
        meant = f". Did you mean  {close} ?" if close else "."
        return f"is no part of an entry{meant}\nAn entry has: {' '.join(ENTRY_PARTS)}"
    part = ENTRY_PARTS[name]
    try:
        item[name] = convert(item[name], part.type)
    except (ValueError, OverflowError):
        return wrong_type(name, item[name], part)
    return wrong_with(item[name], part)


def _wrong_mixture(key: str, listed: list[Entry]) -> str:
    weights = [entry for entry in listed if entry.weight is not None]
    repeats = [entry for entry in listed if entry.repeat is not None]
    if not weights and not repeats:
        return ""
    if key == "data.validation":
        return "validation reads everything once: a weight or a repeat is for data.path"
    if weights and repeats:
        return (
            "has weights and repeats: a weight is a share of the tokens, a repeat a number of "
            "times per epoch. Keep one kind"
        )
    if weights and len(weights) < len(listed):
        without = next(entry.path for entry in listed if entry.weight is None)
        return f"{without} has no weight, and others have one: give each its own"
    if repeats and not any(entry.repeat is None or entry.repeat for entry in listed):
        return "repeats nothing: one entry must be read more than 0 times"
    twice = [path for path, n in Counter(entry.path for entry in listed).items() if n > 1]
    if twice:
        instead = "weight: SUM" if weights else "repeat: 2"
        return f"names {twice[0]} twice.\nUse  {{path: {twice[0]}, {instead}}}"
    return ""


def users_of_validation(cfg: TrainConfig, report: Report) -> Violations:
    missing = [typed for key, typed in VALIDATION.items() if value_of(cfg, key) is None]
    for key in ("checkpoint.best", "train.early_stop"):
        if value_of(cfg, key) and missing:
            yield key, f"goes by the validation loss: set  {'  '.join(missing)}"
    if cfg.train.early_stop_delta and not cfg.train.early_stop:
        yield "train.early_stop_delta", "only counts together with  train.early_stop=N"
