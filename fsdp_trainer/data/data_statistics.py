"""Statistics of a data set: two lines at the start of a run, tables in the preview."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.store.findings import (
    DROPPED,
    IN_TRAINING,
    Finding,
    fitting_length,
    label_findings,
    list_findings,
    percent,
)
from fsdp_trainer.data.store.token_store import TokenStore, group_digests
from fsdp_trainer.data.tokens.samples import EXAMPLES, LOST, MEDIA, MEDIA_TOKENS

BUCKET_BITS, BLOCK = 22, 1 << 20
"""Digests are first compared by this many bits, this many digests at a time."""


@dataclass
class SourceFigures:
    name: str
    samples: int
    tokens: int
    supervised: int


def figures_by_source(store: TokenStore) -> list[SourceFigures]:
    """Return the statistics of every source, including those without samples."""
    sources = np.asarray(store.sources)
    sums = [
        np.bincount(sources, weights, len(store.source_names))
        for weights in (None, store.lengths, store.supervised)
    ]
    return [
        SourceFigures(name, *(int(one[i]) for one in sums))
        for i, name in enumerate(store.source_names)
    ]


def findings(store: TokenStore, seq_len: int, answer: int = 0) -> list[Finding]:
    tokens = int(store.lengths.sum())
    known = list_findings(store.counts, store.examples, store.groups, tokens, seq_len, answer)
    for i, source in enumerate(figures_by_source(store)) if len(store.source_names) > 1 else ():
        if not source.samples:
            known.append(
                Finding(
                    f"source {source.name} has no samples left",
                    "see above what was dropped, or take it out of data.path",
                )
            )
        elif (
            store.counts.get("truncated")
            and (np.asarray(store.lengths)[np.asarray(store.sources) == i] == seq_len).all()
        ):
            known.append(
                Finding(
                    f"every sample of source {source.name} is cut at batch.seq_len={seq_len}",
                    "use a larger batch.seq_len",
                )
            )
    return known


def all_findings(prepared: Prepared, seq_len: int) -> list[Finding]:
    """Return findings about all components of the training data and about `data.validation`.

    Warnings come before notes.
    """
    every = [*zip(prepared.train, prepared.names, strict=True)]
    if prepared.validation and prepared.validation.counts:
        every.append((prepared.validation, "data.validation"))
    has_several = len(every) > 1 or prepared.streamed is not None
    known = [
        replace(finding, text=(f"{name}: " if has_several else "") + finding.text)
        for store, name in every
        for finding in findings(store, seq_len, prepared.answer)
    ]
    known += prepared.streamed.findings if prepared.streamed else []
    known += overlap_findings(prepared, seq_len)
    known += label_findings(sum((Counter(store.counts) for store in prepared.train), Counter()))
    return sorted(known, key=lambda finding: not finding.is_warning)


def overlap_findings(prepared: Prepared, seq_len: int) -> list[Finding]:
    held_out = prepared.validation
    if not held_out:
        return []
    firsts, digests = group_digests(held_out)
    if prepared.streamed:
        again = np.isin(digests, prepared.streamed.inspected)
        files = [prepared.streamed.reads(file) for file in held_out.file_names]
        again |= np.array(files)[np.asarray(held_out.files)[firsts]]
    else:
        again = are_in(digests, [group_digests(store)[1] for store in prepared.train])
    samples = firsts[again].tolist()
    places = dict.fromkeys(map(held_out.where, samples[: 2 * EXAMPLES]))
    examples = {IN_TRAINING: [*places][:EXAMPLES]}
    return list_findings({IN_TRAINING: len(samples)}, examples, len(firsts), 0, seq_len)


def are_in(digests: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each of the digests whether it is among the others, in bounded memory."""
    may_be = np.zeros(1 << BUCKET_BITS, np.bool_)
    shift = np.uint64(64 - BUCKET_BITS)
    may_be[digests >> shift] = True
    alike = [
        block[may_be[block >> shift]]
        for each in others
        for block in (each[first : first + BLOCK] for first in range(0, len(each), BLOCK))
    ]
    return np.isin(digests, np.concatenate([*alike, digests[:0]]))


def summary_lines(prepared: Prepared, seq_len: int, order: Mixture | None = None) -> list[str]:
    """Return lines on what is and is not trained on, the warnings, and the unused columns.

    order: rows that the data is packed into; None to omit the row counts.
    """
    samples, tokens, supervised = amounts(prepared.train)
    longest = max(int(store.lengths.max()) for store in prepared.train)
    packed = ""
    if order:
        packed = f"; {counted(order.rows_per_epoch, 'row')} an epoch, {order.fill:.1%} full"
    held_out = f"; {len(prepared.validation):,} for validation" if prepared.validation else ""
    has_prompts = prepared.train[0].questions is not None
    what = "prompt" if has_prompts else "sample"
    learnt = "" if has_prompts else f" {supervised / tokens:.1%} supervised,"
    if has_prompts:
        packed = ""
    return [
        f"{counted(samples, what)}, {tokens:,} tokens,{learnt}"
        f" longest {longest:,}{packed}{held_out}",
        *images_line(prepared.train),
        left_out(prepared.train),
        *warning_lines(prepared, seq_len),
    ]


def warning_lines(prepared: Prepared, seq_len: int, others: Sequence[Finding] = ()) -> list[str]:
    """Return lines with all warnings, the unused columns and the unread files.

    others: findings that are not about the samples.
    """
    every = [*all_findings(prepared, seq_len), *others]
    warnings = [str(finding) for finding in every if finding.is_warning]
    lines = [line.strip() for text in warnings for line in text.splitlines()]
    return [*lines, *prepared.unused]


def images_line(stores: Sequence[TokenStore]) -> list[str]:
    media, of_media = (
        sum(store.counts.get(key, 0) for store in stores) for key in (MEDIA, MEDIA_TOKENS)
    )
    _, tokens, _ = amounts(stores)
    return [f"{counted(media, READ.name)}, {of_media / tokens:.1%} of the tokens"] if media else []


def amounts(stores: Sequence[TokenStore]) -> list[int]:
    return [
        sum(map(len, stores)),
        *(
            sum(int(getattr(store, name).sum()) for store in stores)
            for name in ("lengths", "supervised")
        ),
    ]


def lost_share(prepared: Prepared) -> float:
    """Return the share of training tokens that were dropped or cut off because of length."""
    lost = sum(store.counts.get(LOST, 0) for store in prepared.train)
    tokens = sum(int(store.lengths.sum()) for store in prepared.train)
    return lost / max(1, lost + tokens)


def length_for_most(prepared: Prepared) -> int:
    """Return the batch.seq_len that holds 99% of the samples; all, if 99% fit now."""
    counts = sum((Counter(store.counts) for store in prepared.train), Counter())
    samples = sum(store.groups for store in prepared.train)
    samples += sum(counts[key] for key in DROPPED)
    return prepared.answer + (fitting_length(counts, samples) or fitting_length(counts, 0))


def left_out(stores: Sequence[TokenStore]) -> str:
    """Return a line on data that is not trained on or is duplicated."""
    count = {
        key: sum(store.counts.get(key, 0) for store in stores)
        for key in (*DROPPED, "truncated", "duplicate", "unreadable", LOST)
    }
    named = {
        "too_long": "too long",
        "unsupervised": "without a supervised token",
        "empty": "empty",
        "same_answers": "with the same answer twice",
        "no_other_prompt": "without another prompt",
    }
    reason = [f"{count[key]:,} {name}" for key, name in named.items() if count[key]]
    tokens = sum(int(store.lengths.sum()) for store in stores)
    parts = []
    if reason:
        dropped = sum(count[key] for key in DROPPED)
        parts.append(f"{dropped:,} dropped ({', '.join(reason)})")
    if count["truncated"]:
        parts.append(f"{count['truncated']:,} cut")
    if count[LOST]:
        parts.append(f"{percent(count[LOST] / (tokens + count[LOST]))} of the tokens lost")
    if count["unreadable"]:
        parts.append(f"{counted(count['unreadable'], 'row')} unreadable")
    if n := count["duplicate"]:
        parts.append(f"{counted(n, 'duplicate')} kept")
    return ", ".join(parts) or "nothing dropped or cut, no duplicates"
