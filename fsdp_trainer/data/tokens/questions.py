"""Questions from data in any format: the turns before a row's last answer, and that answer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Problems, Record, RecordError, Source
from fsdp_trainer.data.records.conversations import Reader
from fsdp_trainer.data.records.prompts import DataQuestion, question_of
from fsdp_trainer.data.tokens.records_to_samples import choose_reader, read_texts

RowCheck = Callable[[DataQuestion], str | None]
"""Returns the reason why a question cannot be used; None if it can."""


def read_questions(
    data: Data, sources: list[Source], problems: Problems, check: RowCheck = lambda _: None
) -> Iterator[tuple[int, DataQuestion]]:
    """Yield the questions of all files in order, each with the number of its row among all rows.

    Rows that cannot be read or that `check` refuses are counted, and added to `problems`.
    """
    numbers = count()
    # requirements of training do not matter here
    data = replace(data, too_long="drop", packing="best_fit")
    for source in sources:
        for file in source.files:
            yield from _of_file(data, source, file, problems, check, numbers)


def _of_file(
    data: Data,
    source: Source,
    file: str,
    problems: Problems,
    check: RowCheck,
    numbers: Iterator[int],
) -> Iterator[tuple[int, DataQuestion]]:
    format, fields = source.columns(data)
    number = -1

    def numbered() -> Iterator[Record]:
        nonlocal number
        for row in read_records(file):
            number = next(numbers)
            yield row

    def choose(row: Record) -> Reader:
        return replace(choose_reader(data, row.columns, file, format, fields), learns=False)

    def refuse(row: Record, reason: str) -> None:
        problems.add(row.where, reason)

    for _, row, readable in read_texts(numbered(), choose, lambda one: one, refuse):
        try:
            question = question_of(readable, row.columns)
            reason = check(question)
        except RecordError as error:
            reason = str(error)
        if reason:
            problems.add(row.where, reason)
        else:
            yield number, question
        if problems.is_enough:
            break
    problems.raise_if_failing()
