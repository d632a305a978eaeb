"""The labels of texts: their names, found in the data or in a model's folder, and their numbers."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.records.flags import number_of
from fsdp_trainer.data.records.labelled_texts import TAGGED
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import OF_TOKENS, ONE_LABEL, ModelConfig

SINGLE, MULTI, REGRESSION = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
"""transformers' names for one label of several, any number of them, and numbers."""
FEW, SHOWN = 10, 20
"""Texts of a label that are hardly enough to learn it, and labels that are named in a line."""
PROBLEMS = {"single": SINGLE, "multi": MULTI, "regression": REGRESSION}
"""The values of objective.problem but `auto`."""


def labelled(
    config: ModelConfig, choice: ObjectiveChoice, stores: Sequence[TokenStore]
) -> ModelConfig:
    """Return the architecture with a head for the labels of the data.

    The order of the labels is that of objective.labels, else of the model's own head, else they are
    sorted. stores: of the training data, and of a share of it that is held out; empty in a
    rehearsal. Raises UserError.
    """
    of_tokens = OF_TOKENS if choice.method.reads == TAGGED else ""
    named = tuple(choice.labels) or config.labels
    known = of_tokens or PROBLEMS.get(choice.problem) or config.problem
    if not stores:
        kind = known or (SINGLE if len(named) > 1 else REGRESSION)
        return config.with_labels(named or ONE_LABEL, kind)
    values = [json.loads(text) for text in dict.fromkeys(_texts(stores))]
    problem = known or problem_of(values)
    names = named or names_in(values, problem)
    require_several(names, problem)
    return config.with_labels(names, problem)


def require_several(names: Sequence[str], problem: str) -> None:
    """Raise UserError for one label, or none, of which one is to be chosen."""
    if problem in (SINGLE, OF_TOKENS) and len(names) < 2:
        given = f"there is one label, {names[0]!r}" if names else "there are no labels"
        raise UserError("there is nothing to learn", [Problem("objective.labels", given)])


def names_in(values: Sequence[Any], problem: str) -> tuple[str, ...]:
    """Return the labels in the data, sorted. values: the different labels of texts."""
    if problem != REGRESSION:
        return tuple(sorted({name_of(one) for value in values for one in listed(value)}, key=rank))
    width = max(len(listed(value)) for value in values)
    return ONE_LABEL if width == 1 else tuple(f"LABEL_{i}" for i in range(width))


def problem_of(values: Sequence[Any]) -> str:
    """Return what labels are: fractions: numbers; lists: any number of them; else one of several.

    Words that are all numbers count as numbers: a CSV file has no others. values: the different
    labels of texts.
    """
    every = [one for value in values for one in listed(value)]
    read = [number_of(one) for one in every]
    numbers = [one for one in every if isinstance(one, float)] if None in read else read
    if not all(float(number).is_integer() for number in numbers):
        return REGRESSION
    return MULTI if any(isinstance(value, list) for value in values) else SINGLE


def counts_by_name(stores: Sequence[TokenStore]) -> dict[str, int]:
    """Return how many texts or words have each label, in their order; {} for numbers."""
    given = Counter(_texts(stores))
    values = {text: json.loads(text) for text in given}
    if problem_of([*values.values()]) == REGRESSION:
        return {}
    counts: Counter[str] = Counter()
    for text, value in values.items():
        for one in listed(value):
            counts[name_of(one)] += given[text]
    return {name: counts[name] for name in sorted(counts, key=rank)}


def in_words(counts: dict[str, int]) -> tuple[str, str]:
    """Return the numbers of texts or words with each label, and the labels that hardly any has.

    Of many labels only some are named.
    """
    shown = ", ".join(f"{name} {count:,}" for name, count in [*counts.items()][:SHOWN])
    more = f" … and {len(counts) - SHOWN:,} more" if len(counts) > SHOWN else ""
    rare = [name for name, count in counts.items() if count < FEW]
    return shown + more, ", ".join(rare[:SHOWN])


def label_values(store: TokenStore, config: ModelConfig, key: str) -> np.ndarray:
    """Return the numbers of each text's label: [samples, numbers] float64.

    They are the number of its label; for any number of labels a 1 for each that it has; or its own
    numbers. key: of the configuration that names the data. Raises UserError for a label that the
    head does not have.
    """
    numbers = {name: number for number, name in enumerate(config.labels)}
    known: dict[str, list[float]] = {}
    rows = []
    for sample, text in enumerate(_texts([store])):
        if text not in known:
            values = listed(json.loads(text))
            row = _row(values, numbers, config.problem)
            if row is None:
                raise _unknown(values, config, f"{key}: {store.where(sample)}")
            known[text] = row
        rows.append(known[text])
    return np.array(rows, np.float64)


def token_labels(store: TokenStore, config: ModelConfig, key: str) -> np.ndarray:
    """Return the number of each labelled token's label, [labelled tokens] int64.

    key: of the configuration that names the data. Raises UserError for a label that the head does
    not have.
    """
    numbers = {name: number for number, name in enumerate(config.labels)}
    known: dict[str, int] = {}
    given: list[int] = []
    for sample, text in enumerate(_texts([store])):
        for value in json.loads(text):
            name = name_of(value)
            if name not in known:
                place = _place(value, numbers)
                if place is None:
                    raise _unknown([value], config, f"{key}: {store.where(sample)}")
                known[name] = place
            given.append(known[name])
    return np.array(given, np.int64)


def _row(values: list[Any], numbers: dict[str, int], problem: str) -> list[float] | None:
    if problem == REGRESSION:
        read = [number_of(value) for value in values]
        is_whole = None not in read and len(read) == len(numbers)
        return [float(number) for number in read] if is_whole else None
    places = [_place(value, numbers) for value in values]
    if None in places or (problem == SINGLE and len(places) != 1):
        return None
    if problem == SINGLE:
        return [float(place) for place in places if place is not None]
    return [float(place in places) for place in range(len(numbers))]


def _place(value: Any, numbers: dict[str, int]) -> int | None:
    name = name_of(value)
    if name in numbers:
        return numbers[name]
    is_number = name.isdecimal() and int(name) < len(numbers)
    return int(name) if is_number else None


def _unknown(values: list[Any], config: ModelConfig, where: str) -> UserError:
    shown = ", ".join(map(str, values))
    if config.problem == REGRESSION:
        reason = f"is {shown}, and a label is {counted(len(config.labels), 'number')}"
    else:
        reason = f"is {shown}, and the head has the labels {', '.join(config.labels)}"
        rule = " and one for each text" if config.problem == SINGLE else ""
        reason += (
            f"{rule}.\nThey are those of the training data, of the folder that training begins"
        )
        reason += " with, or  objective.labels=[…]"
    return UserError("a label is not known", [Problem(where, reason)])


def name_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def rank(name: str) -> tuple[float, str]:
    """Return the sort key of a label: numbers first, by their value."""
    number = number_of(name)
    return (np.inf if number is None else float(number), name)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _texts(stores: Sequence[TokenStore]) -> Iterator[str]:
    for store in stores:
        assert store.labels is not None
        yield from map(store.labels.text, range(len(store)))


def text_scores(store: TokenStore) -> np.ndarray:
    """Return each text's score, which is its label, [samples] float64; NaN without one."""
    return np.array([json.loads(text) for text in _texts([store])], np.float64)


def text_values(stores: Sequence[TokenStore]) -> list[np.ndarray]:
    """Return each text's score, and equal numbers for equal texts: [samples, 2] float64 a store."""
    known: dict[bytes, int] = {}
    values = []
    for store in stores:
        texts = (content_of_text(store, sample) for sample in range(len(store)))
        same = [
            known.setdefault(blake2b(each, digest_size=12).digest(), len(known)) for each in texts
        ]
        values.append(np.stack([text_scores(store), np.array(same, np.float64)], 1))
    return values


def content_of_text(store: TokenStore, sample: int) -> bytes:
    """Return what makes a text equal to another one: its tokens, and the files of its media."""
    files = "".join(one.file.digest for one in store.media(sample))
    return store.read(sample)[0].tobytes() + files.encode()
