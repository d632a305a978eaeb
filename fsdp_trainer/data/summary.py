"""What a data set is, in figures: two lines above a run, tables in the preview."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_trainer.data.findings import DROPPED, Finding, told
from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.samples import LOST
from fsdp_trainer.data.store import TokenStore


@dataclass
class SourceFigures:
    """One source of the data."""

    name: str
    samples: int
    tokens: int
    supervised: int


def figures_by_source(store: TokenStore) -> list[SourceFigures]:
    """Samples, tokens and supervised tokens of every source, those without a sample too."""
    sources = np.asarray(store.sources)
    sums = [np.bincount(sources, weights, len(store.source_names)) for weights in (None, store.lengths, store.supervised)]
    return [SourceFigures(name, *(int(of[i]) for of in sums)) for i, name in enumerate(store.source_names)]


def findings(store: TokenStore, seq_len: int) -> list[Finding]:
    """What is worth knowing about a store, the most serious first."""
    known = told(store.counts, store.examples, len(store), int(store.lengths.sum()), seq_len)
    for i, source in enumerate(figures_by_source(store)) if len(store.source_names) > 1 else ():
        if not source.samples:
            known.append(Finding(f"source {source.name} has no samples left", "see what was dropped, or take it out of data.path"))
        elif store.counts.get("truncated") and (np.asarray(store.lengths)[np.asarray(store.sources) == i] == seq_len).all():
            known.append(Finding(f"every sample of source {source.name} is cut at batch.seq_len={seq_len}", "use a larger batch.seq_len"))
    return sorted(known, key=lambda finding: not finding.is_warning)


def two_lines(stores: Sequence[TokenStore], order: Mixture, validation: TokenStore | None) -> list[str]:
    """What a run trains on, and what it does not."""
    samples, tokens, supervised = (sum(int(n) for n in of) for of in zip(*map(_sums, stores), strict=True))
    longest = max(int(store.lengths.max()) for store in stores)
    every = [finding for store in (*stores, *filter(None, [validation])) for finding in findings(store, order.seq_len)]
    warnings = sum(finding.is_warning for finding in every)
    held_out = f"; validation on {len(validation):,}" if validation else ""
    return [
        f"{samples:,} samples, {tokens:,} tokens, {supervised / tokens:.1%} supervised, longest {longest:,}; "
        f"{order.rows_per_epoch:,} rows an epoch, {order.fill:.1%} full{held_out}",
        left_out(stores)
        + (f"; {warnings} warning{'s' * (warnings != 1)}: fsdp-trainer preview, with the same keys, explains" if warnings else ""),
    ]


def left_out(stores: Sequence[TokenStore]) -> str:
    """What of the data is not trained on, or more than once."""
    count = {key: sum(store.counts.get(key, 0) for store in stores) for key in (*DROPPED, "truncated", "duplicate", "unreadable", LOST)}
    named = {"too_long": "too long", "unsupervised": "without a supervised token", "empty": "empty"}
    why = [f"{count[key]:,} {name}" for key, name in named.items() if count[key]]
    tokens = sum(int(store.lengths.sum()) for store in stores)
    parts = [
        *([f"{sum(count[key] for key in DROPPED):,} dropped ({', '.join(why)})"] if why else []),
        *([f"{count['truncated']:,} cut"] if count["truncated"] else []),
        *([f"{count[LOST] / (tokens + count[LOST]):.1%} of the tokens lost"] if count[LOST] else []),
        *([f"{count['unreadable']:,} rows unreadable"] if count["unreadable"] else []),
        *([f"{count['duplicate']:,} duplicates"] if count["duplicate"] else []),
    ]
    return ", ".join(parts) or "nothing dropped, cut or twice"


def _sums(store: TokenStore) -> tuple[int, int, int]:
    return len(store), int(store.lengths.sum()), int(store.supervised.sum())
