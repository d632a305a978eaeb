"""Columns that look like masks, weights, labels or scores, in rows that are read without them."""

from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import (
    VERDICTS,
    agrees,
    flag_of,
    is_mask_name,
    leaves_out,
    number_of,
)
from fsdp_trainer.data.records.record_formats import LABELS, is_label, usual_name

UNREAD_COLUMN = "unread_column_"
"""Prefix of keys that count rows with a column that is not used; the name follows."""
CLASS_COLUMN = "class_column_"
"""Prefix of keys that count rows whose label is none of good and bad; the name follows."""
VERDICT_NAMES = (*LABELS, "correct", "good", "desirable", "accepted", "preferred")
SCORES = ("score", "rating", "reward")
NO_VERDICTS = ("text", "tokens", "segments", "unpaired")
"""Formats in which a label does not mean that an answer is good or bad, or is read."""


def _is_verdict_name(name: str) -> bool:
    return usual_name(name.rpartition(".")[2]).removeprefix("is_") in VERDICT_NAMES


def is_suspect(name: str) -> bool:
    return is_mask_name(name) or _is_verdict_name(name) or _is_score(name)


def _is_score(name: str) -> bool:
    known = usual_name(name)
    return ("chosen" in known or "rejected" in known) and any(one in known for one in SCORES)


def _is_bad(value: Any) -> bool:
    try:
        return flag_of(value, "", VERDICTS) is False
    except RecordError:
        return (number_of(value) or 0) < 0


def require_no_verdict(columns: Mapping[str, Any], refusal: str) -> None:
    """Raise RecordError with `refusal` for an answer that is labelled as bad in so many words."""
    for name, value in columns.items():
        if usual_name(name) in LABELS and is_label(value) and _is_bad(value):
            raise RecordError(refusal % name)


def bad_verdicts(columns: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in columns.items() if _is_verdict_name(name) and _is_bad(value))


def classes(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns named as labels of good and bad that hold something else."""
    for name, value in columns.items():
        try:
            if _is_verdict_name(name) and not (number_of(value) or 0) < 0:
                flag_of(value, name, VERDICTS)
        except RecordError:
            yield name


def is_worse(columns: Mapping[str, Any]) -> bool:
    for name, value in columns.items():
        if _is_score(name):
            other = columns.get(name.replace("chosen", "rejected"))
            scores = [number_of(score) for score in (value, other)]
            if None not in scores and scores[0] < scores[1]:
                return True
    return False


def unread_masks(columns: Mapping[str, Any], learnt: list[bool] | None) -> Iterator[str]:
    """Yield the columns that may be masks or weights by which not all would be learnt alike.

    learnt: what is learnt of a row of tokens; a mask that says the same is none of them.
    """
    for name, value in columns.items():
        if leaves_out(name, value) and (learnt is None or not agrees(name, value, learnt)):
            yield name
