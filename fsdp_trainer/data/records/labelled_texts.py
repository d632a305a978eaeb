"""Reads rows of texts that a head gives numbers to: texts with labels, queries with documents.

A text is encoded as the tokenizer itself does, without a chat template.
"""

import json
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import number_of, parsed, shown_value
from fsdp_trainer.data.records.messages import text_of
from fsdp_trainer.data.records.record_values import Values

LABELLED, QUERIES, RANKED, TAGGED = "labelled", "queries", "ranked", "tagged"
"""Kinds of training data, and the formats of their rows: a text, or two, with its labels; a query
with documents that answer it, and others; a query with documents to be read together with it; words
or steps with a label each."""
IGNORED = (None, -100)
"""Labels of words that nothing is learnt of, as in torch's losses."""
QUERY, POSITIVE, NEGATIVE = range(3)
"""Kinds of the texts of a query, as in samples.py."""
NO_SCORE = "NaN"
"""The label of a text without a score."""
SCORED = QUERY
"""The kind of a document that is read with its query and has a score of its own."""


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of texts that are read together, and what is to be learnt of it.

    label: as JSON. kind: one of those in samples.py.
    """

    text: str
    second: str | None
    label: str
    kind: int = 0

    @property
    def pair(self) -> str | tuple[str, str]:
        return self.text if self.second is None else (self.text, self.second)


@dataclass
class LabelledTexts:
    """The texts of a row, which training keeps in one row of tokens."""

    texts: list[LabelledText]
    where: tuple[str, int]


@dataclass
class TaggedText:
    """A text in parts, each with a label.

    prompt: the text before steps; None: the parts are words, with spaces between them. labels: a
    word or a number for each part, or one of IGNORED.
    """

    parts: list[str]
    labels: list[Any]
    where: tuple[str, int]
    prompt: str | None = None


def read_tagged(values: Values) -> TaggedText:
    """Return words, or the steps of an answer, with their labels.

    Raises RecordError for other columns, and for another number of labels.
    """
    if values["words"] is not None:
        return TaggedText(*labelled_parts(values, "words"), values.where)
    if values["steps"] is None or values["prompt"] is None:
        raise RecordError(
            f"has neither {values.name('words')!r}, a list of words, nor {values.name('prompt')!r}"
            f" and {values.name('steps')!r}, an answer in steps"
        )
    return TaggedText(*labelled_parts(values, "steps"), values.where, values.text("prompt"))


def labelled_parts(values: Values, meaning: str) -> tuple[list[str], list[Any]]:
    """Return the parts of a text, and as many labels. RecordError for anything else."""
    name, of_labels = values.name(meaning), repr(values.name("tags"))
    parts, labels = parsed_list(values[meaning]), parsed_list(values["tags"])
    if not isinstance(parts, list) or not isinstance(labels, list):
        raise RecordError(f"{name!r} and {of_labels} should be lists")
    if len(labels) != len(parts):
        size = counted(len(parts), "part")
        raise RecordError(f"{of_labels} has {len(labels)} labels, for {size}")
    wrong = [one for one in labels if one not in IGNORED and not is_name(one)]
    if wrong:
        shown = shown_value(wrong[0])
        raise RecordError(f"{of_labels} should be words or whole numbers, one is {shown}")
    return [text_of(part, name) for part in parts], labels


def is_name(value: Any) -> bool:
    return isinstance(value, str | int) and value != ""


def read_labelled_text(values: Values) -> LabelledTexts:
    """Return a text with its label: a word, a number, or a list of either.

    Raises RecordError for any other label.
    """
    second = None if values["second"] is None else values.text("second")
    label, name = parsed_list(values["label"]), values.name("label")
    for one in label if isinstance(label, list) else [label]:
        if not isinstance(one, str | int | float) or one == "":
            raise RecordError(
                f"{name!r} should be a word or a number, or a list of them, it is"
                f" {shown_value(one)}"
            )
    text = LabelledText(values.text("text"), second, json.dumps(label, ensure_ascii=False))
    return LabelledTexts([text], values.where)


def read_query(values: Values) -> LabelledTexts:
    """Return a query, its positive and then its negative documents, with their scores if any.

    Raises RecordError without a positive document, or if there are not as many scores as documents.
    """
    positives, negatives = (texts_of(values, name) for name in ("positive", "negative"))
    if not positives:
        raise RecordError(f"{values.name('positive')!r} holds no text")
    scores = parsed_list(values["score"])
    scores = scores if isinstance(scores, list) else [scores] * (scores is not None)
    documents = [*positives, *negatives]
    if scores and len(scores) != len(documents):
        raise RecordError(
            f"{values.name('score')!r} has {len(scores)} scores, for {len(documents)} documents"
        )
    numbers = [number_of(score) for score in scores] or [None] * len(documents)
    if scores and None in numbers:
        raise RecordError(f"{values.name('score')!r} is not a number: {shown_value(scores)}")
    kinds = [POSITIVE] * len(positives) + [NEGATIVE] * len(negatives)
    texts = [LabelledText(values.text("query"), None, NO_SCORE, QUERY)]
    for text, number, kind in zip(documents, numbers, kinds, strict=True):
        label = NO_SCORE if number is None else json.dumps(float(number))
        texts.append(LabelledText(text, None, label, kind))
    return LabelledTexts(texts, values.where)


def read_ranked(values: Values) -> LabelledTexts:
    """Return a query with each of its documents, and the document's score.

    Scores of 0 and 1 say which are positive, as do columns of positive and negative documents.
    Raises RecordError without documents, or if there are not as many scores as documents.
    """
    query, documents = values.text("query"), texts_of(values, "documents")
    scores = parsed_list(values["score"])
    if not documents:
        positives, negatives = (texts_of(values, name) for name in ("positive", "negative"))
        documents, scores = [*positives, *negatives], [1] * len(positives) + [0] * len(negatives)
    if not documents:
        raise RecordError(f"has no {values.name('documents')!r}, nor positive and negative ones")
    scores = scores if isinstance(scores, list) else [scores]
    numbers = [number_of(score) for score in scores]
    if len(numbers) != len(documents) or None in numbers:
        size = counted(len(documents), "number")
        shown = f"{values.name('score')!r} should be {size}, one for each document"
        raise RecordError(f"{shown}; it is {shown_value(scores)}")
    is_binary = {*map(float, numbers)} <= {0.0, 1.0}
    texts = [
        LabelledText(
            query, text, json.dumps(float(number)), (2 - int(number)) if is_binary else SCORED
        )
        for text, number in zip(documents, numbers, strict=True)
    ]
    return LabelledTexts(texts, values.where)


def named_labels(value: Any, names: list[str] | None) -> Any:
    if isinstance(value, list):
        return [named_labels(one, names) for one in value]
    is_number = names is not None and type(value) is int and 0 <= value < len(names)
    return names[value] if names and is_number else value


def texts_of(values: Values, meaning: str) -> list[str]:
    """Return a column that holds a text or a list of texts; [] if there is none."""
    value = parsed_list(values[meaning])
    if value is None:
        return []
    name = values.name(meaning)
    return [text_of(text, name) for text in (value if isinstance(value, list) else [value])]


def parsed_list(value: Any) -> Any:
    """Return a list also from its JSON; anything else unchanged."""
    content = parsed(value)
    return content if isinstance(content, list) else value
