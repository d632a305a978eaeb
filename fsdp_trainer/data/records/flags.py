"""Flags, weights, masks and labels of rows, in the spellings of JSON, CSV, pandas and numpy."""

import json
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from fsdp_trainer.base.json_files import DEEPEST, is_deeper
from fsdp_trainer.data.files.sources import RecordError

WORDS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n"), False),
}
VERDICTS = {
    **WORDS,
    **dict.fromkeys(("good", "desirable", "chosen"), True),
    **dict.fromkeys(("bad", "undesirable", "rejected"), False),
}
"""Words for a label of an answer."""
MISSING = ("", "nan", "NaN", "null", "None", "<NA>")
"""Texts that pandas and others write for a missing value."""
LARGEST = 3.4e38
"""The maximum of float32, in which weights are stored."""
SEPARATORS = re.compile(r"[\s,]+")
MASK_WORDS = {
    "mask", "masks", "masked", "loss", "train", "training", "trainable", "learn", "learnt",
    "weight", "weights", "supervise", "supervised",
}  # fmt: skip
OTHER_MASKS = {
    "attention", "attn", "special", "padding", "pixel", "image", "images",
    "in", "set", "split", "step", "steps", "n", "num", "number", "count", "params", "kg", "more",
}  # fmt: skip
"""Words in names that do not say what is learnt: in_gsm8k_train or num_masks, for example."""
NEGATIONS = {"masked", "no", "not", "ignore", "skip", "exclude"}
"""Words in names of flags that are true for what is not learnt."""


def parsed(value: Any) -> Any:
    """Return the value of JSON text; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if is_deeper(content, DEEPEST) else content


def shown_value(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"


def is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in MISSING
    return value is None or (isinstance(value, float | Decimal) and value != value)


def number_of(value: Any) -> Any:
    """Return a number, also from its text; None for anything else, and for NaN."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float | Decimal) and value == value else None


def flag_of(value: Any, what: str, words: dict[str, bool] = WORDS) -> bool | None:
    """Return what a flag says; None if it is missing.

    what: its name for the message. Raises RecordError for a value that is no flag.
    """
    if is_missing(value):
        return None
    word = value.strip().lower() if isinstance(value, str) else None
    if word in words:
        return words[word]
    number = number_of(value)
    if number in (0, 1):
        return bool(number)
    others = "  good and bad" if words is VERDICTS else ""
    raise RecordError(
        f"{what} is {value!r:.60}, which is no flag. Write true or false; read are also"
        f"  1 and 0  yes and no{others}"
    )


def weight_of(value: Any, what: str) -> float | None:
    """Return a weight, 1 or 0 for a flag; None if it is missing. RecordError for anything else."""
    if is_missing(value):
        return None
    word = value.strip().lower() if isinstance(value, str) else None
    number = WORDS[word] if word in WORDS else number_of(value)
    if number is not None and 0 <= number < LARGEST:
        return float(number)
    raise RecordError(f"{what} should be a number of 0 or more, it is {value!r:.60}")


def listed(value: Any) -> Any:
    """Return a list also from its text, as JSON or as numpy prints it; anything else unchanged.

    A list within a list of one is that list.
    """
    if isinstance(value, str):
        as_json = parsed(value)
        inner = value.strip().removeprefix("[").removesuffix("]").strip()
        value = as_json if isinstance(as_json, list) else SEPARATORS.split(inner)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        return value[0]
    return value


def whole_numbers(value: Any) -> list[int] | None:
    numbers = listed(value)
    if isinstance(value, str) and isinstance(numbers, list):
        try:
            numbers = [int(one) if isinstance(one, str) else one for one in numbers]
        except ValueError:
            return None
    if isinstance(numbers, list) and all(isinstance(number, int) for number in numbers):
        return numbers
    return None


def mask_of(value: Any, what: str) -> list[Any]:
    """Return a list of flags, one for each token: true values for those that count.

    Raises RecordError for anything else, also for a flag that is missing.
    """
    flags = listed(value)
    if not isinstance(flags, list):
        raise RecordError(f"{what} should be a list of 0 and 1, it is {value!r:.60}")
    try:
        if set(flags) <= {0, 1}:  # most are, and the rest takes twenty times as long
            return flags
    except TypeError:  # lists in the list
        pass
    read = [flag_of(flag, f"{what} at place {place}") for place, flag in enumerate(flags)]
    if None in read:
        raise RecordError(f"{what} has no flag at place {read.index(None)}. Write 0 or 1 there")
    return read


def is_mask_name(name: str) -> bool:
    words = _words(name)
    return bool(words & MASK_WORDS) and not words & OTHER_MASKS


@lru_cache(1024)
def _words(name: str) -> frozenset[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return frozenset(re.split(r"[\W_]+", spaced))


def leaves_out(name: str, value: Any) -> bool:
    """Return True for what looks like a mask or weight by which not all would be learnt alike."""
    if not is_mask_name(name):
        return False
    values = listed(value) if isinstance(value, str | list) else [value]
    try:
        weights = [weight_of(one, name) for one in values]
    except RecordError:
        return False
    words, given = _words(name), [weight for weight in weights if weight is not None]
    if words & NEGATIONS:
        return any(given)
    if "mask" in words and not isinstance(value, list):
        return bool(given)  # 0 and 1 may both mean that it is left out
    if not words & {"weight", "weights", "mask", "masks"} and not {*given} <= {0, 1}:
        return False  # the loss of a text, for example
    return any(weight != 1 for weight in given)


def agrees(name: str, value: Any, learnt: list[bool]) -> bool:
    try:
        flags = [bool(flag) for flag in mask_of(value, name)]
    except RecordError:
        return False
    return flags == ([not one for one in learnt] if "prompt" in _words(name) else learnt)
