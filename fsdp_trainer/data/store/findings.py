"""Findings about a data set before it is trained on.

They are counted under short keys and printed as sentences with advice.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.media.kinds import KINDS as MEDIA_KINDS
from fsdp_trainer.data.records.unread_columns import CLASS_COLUMN
from fsdp_trainer.data.tokens.samples import (
    CUT_HELPS,
    FITS,
    LABELLED,
    LAST_TOKENS,
    LOST,
    REWRITTEN_SAMPLES,
    REWRITTEN_TOKENS,
    SPLIT_HELPS,
)

DROPPED = ("unsupervised", "too_long", "empty", "same_answers", "no_other_prompt")
"""Keys of rows that are dropped, so the store does not count them."""

IN_TRAINING = "in_training"
FEW_CLASSES = 10
"""A label is one of good and bad if it is something else in fewer rows than one in so many."""


@dataclass(frozen=True)
class Kind:
    """The sentence for a key of the counts.

    text: `{n}` is the count, `{s}` the plural s, `{seq_len}` batch.seq_len. warns_from: share of
    the samples above which it is a warning instead of a note; None for always a note.
    """

    text: str
    fix: str = ""
    warns_from: float | None = 0.0


SENTENCES = table_beside(__file__)
OF_MEDIA = {
    key: Kind(*texts) for kind in MEDIA_KINDS.values() for key, texts in kind.findings.items()
}
BEFORE, AFTER, UNREAD = (
    {key: Kind(**about) for key, about in SENTENCES[part].items()}
    for part in ("before media", "after media", "unread")
)
"""UNREAD: kinds that name a column or a key, by the prefix of their keys."""
KINDS = BEFORE | OF_MEDIA | AFTER
"""Kinds of findings, in the order in which they are shown."""


@dataclass
class Finding:
    """A finding, ready to be shown."""

    text: str
    fix: str = ""
    is_warning: bool = True
    places: list[str] = field(default_factory=list)
    """FILE:LINE of its first few occurrences."""

    def __str__(self) -> str:
        places = f" ({', '.join(self.places)})" if self.places else ""
        return f"{'warning' if self.is_warning else 'note'}: {self.text}{places}" + (
            f"\n    {self.fix}" if self.fix else ""
        )


def list_findings(
    counts: Mapping[str, int],
    examples: Mapping[str, list[str]],
    samples: int,
    tokens: int,
    seq_len: int,
    answer: int = 0,
) -> list[Finding]:
    """Return the counts as sentences with advice.

    samples, tokens: numbers of samples and tokens in the training data; a pair counts once.
    answer: objective.max_new_tokens, if the samples are prompts.
    """
    samples += sum(counts.get(key, 0) for key in DROPPED)
    fixes = dict.fromkeys(("too_long", "truncated"), _longer_rows(counts, samples, tokens, answer))
    room = f"batch.seq_len={seq_len}"
    if answer:
        room = f"the {seq_len - answer} tokens of {room} less objective.max_new_tokens={answer}"
    return [
        Finding(
            kind.text.format(
                n=f"{n:,}",
                s="s" * (n != 1),
                are="are" if n != 1 else "is",
                seq_len=seq_len,
                what="prompt" if answer else "sample",
                room=room,
                samples=f"{counts.get(REWRITTEN_SAMPLES, 0):,}",
                times=f"{counts.get(REWRITTEN_TOKENS, 0) / max(1, counts.get(LAST_TOKENS, 0)):.1f}",
            ),
            fixes.get(key, kind.fix),
            kind.warns_from is not None and n > kind.warns_from * samples,
            list(examples.get(key, ())),
        )
        for key, kind in (KINDS | _unread(counts)).items()
        if (n := counts.get(key, 0))
    ]


def label_findings(counts: Mapping[str, int]) -> list[Finding]:
    good, bad = (counts.get(key, 0) for key in LABELLED)
    if bool(good) == bool(bad):
        return []
    label, other, effect = ("good", "bad", "more") if good else ("bad", "good", "less")
    text = f"all {good or bad:,} answers are labelled {label}: each is only made {effect} likely"
    fix = f"add answers labelled {other}, for KTO learns from the difference"
    return [Finding(text, fix + (", or use  objective=sft" if good else ""))]


def _unread(counts: Mapping[str, int]) -> dict[str, Kind]:
    kinds = {}
    for key in sorted(counts):
        for prefix, kind in UNREAD.items():
            name = key.removeprefix(prefix)
            others = counts.get(CLASS_COLUMN + name, 0)  # a class, not good or bad
            if key.startswith(prefix) and counts[key] > FEW_CLASSES * others:
                shown = repr(name).replace("{", "{{").replace("}", "}}")
                kinds[key] = replace(kind, text=kind.text % shown)
    return kinds


class MediaWarnings:
    """Prints what media outside the training data have lost: each kind once, by one rank."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, name: str) -> None:
        """Print the warning of a key, for the first image that it is called with."""
        if key not in self._said and os.environ.get("RANK", "0") == "0":
            [finding] = list_findings({key: 1}, {key: [name]}, 1, 0, 0)
            print(visible(str(finding)), file=sys.stderr)
        self._said.add(key)


def percent(share: float) -> str:
    """Return a share in percent; a tiny one as "less than 0.1%", never as 0.0%."""
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def fitting_length(counts: Mapping[str, int], samples: int) -> int:
    """Return the length of rows that hold 99% of the samples; 0 if the present one does.

    samples: number of all, those that are left out too.
    """
    lengths = {int(key.removeprefix(FITS)): n for key, n in counts.items() if key.startswith(FITS)}
    longer, fits = sum(lengths.values()), 0
    for length in sorted(lengths):
        if longer <= 0.01 * samples:
            break
        fits, longer = length, longer - lengths[length]
    return fits


def _longer_rows(counts: Mapping[str, int], samples: int, tokens: int, answer: int) -> str:
    """Return the cost of samples that are too long, and what loses fewer of them."""
    what = f"prompts, with answers of {answer} tokens" if answer else "samples"
    fits = fitting_length(counts, samples)
    advice = [
        f"batch.seq_len={fits + answer} would hold 99% of the {what}"
        if fits
        else f"more than 99% of the {'prompts' if answer else 'samples'} fit"
    ]
    if counts.get(CUT_HELPS) and not counts.get("truncated"):
        advice.append("data.too_long=truncate  keeps their start")
    if counts.get(SPLIT_HELPS):
        advice.append("data.too_long=split  keeps all of documents")
    lost = counts.get(LOST, 0) / max(1, tokens + counts.get(LOST, 0))
    return f"{percent(lost)} of the tokens are lost; {'; '.join(advice)}"
