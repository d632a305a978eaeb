"""Reads rows of texts that a head gives numbers to: texts with labels, queries with documents.

A text is encoded as the tokenizer itself does, without a chat template.
"""

import json
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import number_of, parsed, shown_value
from fsdp_trainer.data.records.media import MARK
from fsdp_trainer.data.records.messages import text_of
from fsdp_trainer.data.records.record_values import Values
from fsdp_trainer.data.records.texts_with_media import MarkedText, marked_text, media_column

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

    label: as JSON. kind: one of those in samples.py. media: of both texts, in order; a MARK stands
    for each, or the tokens of it once they are known.
    """

    text: str
    second: str | None
    label: str
    kind: int = 0
    media: tuple[Any, ...] = ()

    def marked(self, file: str) -> list[MarkedText]:
        """Return the text, and the second one if there is one. file: in which they stand."""
        first = self.text.count(MARK) if self.media else 0
        second = [] if self.second is None else [MarkedText(self.second, self.media[first:], file)]
        return [MarkedText(self.text, self.media[:first], file), *second]

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
    word or a number for each part, or one of IGNORED. before: the text before words. media: of
    prompt or `before`, see LabelledText.
    """

    parts: list[str]
    labels: list[Any]
    where: tuple[str, int]
    prompt: str | None = None
    before: str = ""
    media: tuple[Any, ...] = ()


def read_tagged(values: Values) -> TaggedText:
    """Return words, or the steps of an answer, with their labels.

    Raises RecordError for other columns, and for another number of labels.
    """
    if values["words"] is not None:
        (before,) = placed(values, [MarkedText("")])
        words, labels = labelled_parts(values, "words")
        return TaggedText(words, labels, values.where, before=before.text, media=before.media)
    if values["steps"] is None or values["prompt"] is None:
        raise RecordError(
            f"has neither {values.name('words')!r}, a list of words, nor {values.name('prompt')!r}"
            f" and {values.name('steps')!r}, an answer in steps"
        )
    (prompt,) = placed(values, [own_text(values, "prompt")])
    steps, labels = labelled_parts(values, "steps")
    return TaggedText(steps, labels, values.where, prompt.text, media=prompt.media)


def labelled_parts(values: Values, meaning: str) -> tuple[list[str], list[Any]]:
    """Return the parts of a text, and as many labels. RecordError for anything else."""
    name, of_labels = values.name(meaning), repr(values.name("tags"))
    parts, labels = parsed_list(values[meaning]), parsed_list(values["tags"])
    if not isinstance(parts, list) or not isinstance(labels, list):
        raise RecordError(f"{name!r} and {of_labels} should be lists")
    if len(labels) != len(parts):
        size = counted(len(parts), "part")
        raise RecordError(f"{of_labels} has {counted(len(labels), 'label')}, for {size}")
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
    label, name = parsed_list(values["label"]), values.name("label")
    for one in label if isinstance(label, list) else [label]:
        if not isinstance(one, str | int | float) or one == "":
            raise RecordError(
                f"{name!r} should be a word or a number, or a list of them, it is"
                f" {shown_value(one)}"
            )
    given = [name for name in ("text", "second") if values[name] is not None]
    texts = placed(values, [own_text(values, name) for name in given])
    first, second, *_ = [*(one.text for one in texts), None]
    media = tuple(item for one in texts for item in one.media)
    text = LabelledText(str(first), second, json.dumps(label, ensure_ascii=False), media=media)
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
    query, *documents = placed(values, [own_text(values, "query"), *documents])
    texts = [LabelledText(query.text, None, NO_SCORE, QUERY, query.media)]
    for one, number, kind in zip(documents, numbers, kinds, strict=True):
        label = NO_SCORE if number is None else json.dumps(float(number))
        texts.append(LabelledText(one.text, None, label, kind, one.media))
    return LabelledTexts(texts, values.where)


def read_ranked(values: Values) -> LabelledTexts:
    """Return a query with each of its documents, and the document's score.

    Scores of 0 and 1 say which are positive, as do columns of positive and negative documents.
    Raises RecordError without documents, or if there are not as many scores as documents.
    """
    documents = texts_of(values, "documents")
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
    query, *documents = placed(values, [own_text(values, "query"), *documents])
    texts = []
    for one, number in zip(documents, numbers, strict=True):
        kind, label = (2 - int(number)) if is_binary else SCORED, json.dumps(float(number))
        texts.append(LabelledText(query.text, one.text, label, kind, query.media + one.media))
    return LabelledTexts(texts, values.where)


def named_labels(value: Any, names: list[str] | None) -> Any:
    if isinstance(value, list):
        return [named_labels(one, names) for one in value]
    is_number = names is not None and type(value) is int and 0 <= value < len(names)
    return names[value] if names and is_number else value


def own_text(values: Values, meaning: str) -> MarkedText:
    """Return a column that holds a text, perhaps with media: all of them if it is one of media."""
    name = values.name(meaning)
    if kind := media_column(name):
        items = kind.read_all(parsed(values[meaning]))
        return MarkedText(MARK * len(items), tuple(items))
    return marked_text(values[meaning], name)


def texts_of(values: Values, meaning: str) -> list[MarkedText]:
    """Return a column that holds a text or a list of texts; [] if there is none."""
    value, name = parsed_list(values[meaning]), values.name(meaning)
    if value is None:
        return []
    if kind := media_column(name):
        return [MarkedText(MARK, (item,)) for item in kind.read_all(value)]
    return [marked_text(text, name) for text in (value if isinstance(value, list) else [value])]


def placed(values: Values, texts: list[MarkedText]) -> list[MarkedText]:
    """Return the texts of a row with the media of its columns. See Values.with_media."""
    turns = values.with_media([text.as_turn for text in texts])
    return [MarkedText.of_turn(turn) for turn in turns]


def parsed_list(value: Any) -> Any:
    """Return a list also from its JSON; anything else unchanged."""
    content = parsed(value)
    return content if isinstance(content, list) else value
