"""Prompts that the model answers itself, with the rows that answers are judged by."""

import json
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import (
    Conversation,
    Readable,
    Reader,
    make_reader,
    of_any_format,
)
from fsdp_trainer.data.records.flags import is_missing, number_of
from fsdp_trainer.data.records.messages import Message, turns_or_text
from fsdp_trainer.data.records.preference_records import Preference
from fsdp_trainer.data.records.record_formats import (
    FORMATS,
    LABELS,
    column_value,
    find_format,
    match,
    usual_name,
)
from fsdp_trainer.data.records.record_values import Values
from fsdp_trainer.errors import UserError

ANSWER = "answer"
"""The column of the reference answer in a row whose turns end with the user's."""
ANSWERS = {"completion", "output"}
"""Meanings of a reference answer."""
QUESTION_VERSION = 2
"""Part of the name of a store of prompts: raised when `DataQuestion.as_json` has other keys."""
PROMPT_PARTS = {"prompt", "system", "tools"}
"""What is read of a row with a prompt and no answer."""
HOLD_PROMPTS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference")
NO_PROMPT = """is read as %s, which has no prompt to answer.
Name the column:  'data.fields={prompt: …}'  or  'data.fields={messages: …}'"""


@dataclass
class DataQuestion:
    """A row as a question.

    messages: turns before the answer. tools: descriptions of the row's tools in OpenAI's format.
    reference: the row's own answer. columns: all columns of the row.
    """

    messages: list[Message]
    tools: list[dict] | None
    reference: str | None
    columns: Json
    where: tuple[str, int]

    @property
    def prompt(self) -> str:
        return str(self.messages[-1].get("content") or "")

    @property
    def as_values(self) -> Json:
        return {
            "prompt": self.prompt,
            "reference": self.reference,
            "row": self.columns,
            "messages": self.messages,
            "tools": self.tools,
        }

    @property
    def as_json(self) -> str:
        return json.dumps(self.as_values, default=str)


def question_of(row: Readable, columns: Json) -> DataQuestion:
    """Return a row as a question. Raises RecordError for one without turns or without a prompt."""
    if isinstance(row, Preference):
        messages, turns = row.prompt, row.chosen
    elif isinstance(row, Conversation):
        answered = row.messages[-1]["role"] == "assistant"
        messages = row.messages[:-1] if answered else row.messages
        turns = row.messages[-1:] if answered else []
    else:
        raise RecordError("holds no prompt: rewards are for answers to prompts, not for plain text")
    if not messages:
        raise RecordError("holds an answer alone, without a prompt")
    reference = "\n".join(str(turn.get("content") or "") for turn in turns) if turns else None
    if not turns and not is_missing(columns.get(ANSWER)):
        reference = str(columns[ANSWER])
    return DataQuestion(messages, row.tools, reference, columns, row.where)


class QuestionReader(Reader):
    def read(self, row: Record) -> Any:
        return question_of(self.readable(row), row.columns)

    def readable(self, row: Record) -> Readable:
        return super().read(row)

    def values(self, row: Record) -> Json:
        """Return the row's values; the reference answer may be a number, which becomes its text."""
        values = super().values(row)
        numbers = {key: values[key] for key in ANSWERS & values.keys()}
        return values | {
            key: str(value)
            for key, value in numbers.items()
            if not isinstance(value, bool | str) and number_of(value) is not None
        }


class PromptReader(QuestionReader):
    def readable(self, row: Record) -> Readable:
        column = self.columns["prompt"]
        value = column_value(row.columns, column)
        if value is None:
            raise RecordError(
                f"{column!r} is null" if column in row.columns else f"has no {column!r}"
            )
        given = {key: column_value(row.columns, name) for key, name in self.columns.items()}
        values = Values(
            dict.fromkeys(FORMATS["prompt_completion"]) | given, self.columns, row.where
        )
        turns = values.with_media(values.with_system(turns_or_text(value, "user", column)))
        return Conversation(turns, values.tools(), row.where)


@of_any_format
def make_prompt_reader(
    columns: Json, format: str | None, fields: dict[str, str] | None, file: str
) -> QuestionReader:
    """Return the reader for a file of prompts, from the columns of its first row.

    Raises UserError if they contain no prompt.
    """
    given = {meaning: str(column) for meaning, column in (fields or {}).items()}
    # a label is what rewards compare answers with, not a verdict on an answer of the row
    columns = {name: value for name, value in columns.items() if usual_name(name) not in LABELS}
    detected = find_format(columns, given) if format == "auto" else None
    if format == "auto" and (detected is None or detected[0] not in HOLD_PROMPTS):
        matched = match("prompt_completion", columns, given)
        if "prompt" in matched and set(given) <= PROMPT_PARTS:
            parts = {key: column for key, column in matched.items() if key in PROMPT_PARTS}
            return PromptReader("prompt", parts, frozenset(columns), learns=False)
    reader = make_reader(columns, format, fields, file)
    if reader.format not in HOLD_PROMPTS:
        raise UserError("the data cannot be used", file, NO_PROMPT % reader.format)
    return QuestionReader(
        reader.format, reader.columns, reader.first, reader.text_only, form=reader.form,
        learns=False,
    )  # fmt: skip
