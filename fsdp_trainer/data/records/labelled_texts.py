"""Reads rows of texts that a head gives numbers to: texts with labels.

A text is encoded as the tokenizer itself does, without a chat template.
"""

import json
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import parsed, shown_value
from fsdp_trainer.data.records.record_values import Values

LABELLED = "labelled"
"""Kind of training data, and the format of its rows: a text, or two, with its labels."""


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
        """The argument of a tokenizer."""
        return self.text if self.second is None else (self.text, self.second)


@dataclass
class LabelledTexts:
    """The texts of a row, which training keeps in one row of tokens."""

    texts: list[LabelledText]
    where: tuple[str, int]


def read_labelled_text(values: Values) -> LabelledTexts:
    """Return a text with its label: a word, a number, or a list of either.

    Raises RecordError for any other label.
    """
    second = None if values["second"] is None else values.text("second")
    label, name = parsed_list(values["label"]), values.name("label")
    for one in label if isinstance(label, list) else [label]:
        if not isinstance(one, str | int | float):
            raise RecordError(
                f"{name!r} should be a word or a number, or a list of them, it is"
                f" {shown_value(one)}"
            )
    text = LabelledText(values.text("text"), second, json.dumps(label, ensure_ascii=False))
    return LabelledTexts([text], values.where)


def parsed_list(value: Any) -> Any:
    """Return a list also from its JSON; anything else unchanged."""
    content = parsed(value)
    return content if isinstance(content, list) else value
