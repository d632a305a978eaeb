"""Tasks of tokenization: each turns some units of files into one part of a store.

Runs in this process or in workers; imports no torch.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.files.file_splits import Unit, read_records, read_unit, token_blocks
from fsdp_trainer.data.files.sources import NO_ROWS, Problems, Record, RecordError
from fsdp_trainer.data.records.conversations import (
    Conversation,
    Document,
    Pretokenized,
    Readable,
    Reader,
    make_reader,
)
from fsdp_trainer.data.records.labelled_texts import LABELLED
from fsdp_trainer.data.records.preference_records import PROMPTS, SINGLE, UNPAIRED
from fsdp_trainer.data.records.prompts import make_prompt_reader
from fsdp_trainer.data.store.token_store import Damaged, StoreWriter, check_columns
from fsdp_trainer.data.token_files.known_token_files import is_token_file
from fsdp_trainer.data.tokens.document_samples import learnable, read_documents
from fsdp_trainer.data.tokens.records_to_samples import (
    TokenizeOptions,
    choose_reader,
    read_texts,
    tokenize_in_chunks,
)
from fsdp_trainer.data.tokens.samples import OtherAnswers, Rendered, Sample, SampleBuilder
from fsdp_trainer.errors import Problem, UserError

CHUNK, CHARACTERS = 1000, 1 << 22  # limits of texts and characters for one call of the tokenizer
TRAIN, VALIDATION = "train", "validation"
SKIPPED = "skipped.jsonl"
"""File in the cache folder that lists each row that data.on_error=skip left out."""


@dataclass(frozen=True)
class TaskUnit:
    """A unit of a task.

    source, number: indices of its source and of its file. lines_before: number of lines in the file
    before the unit. format, fields: as data.format and data.fields.
    """

    unit: Unit
    source: int
    number: int
    lines_before: int
    format: str
    fields: tuple[tuple[str, str], ...]


Task = list[TaskUnit]
"""The input of one part: a part of a large file, or several small files."""


def task_key(task: Task) -> list[list[int | None]]:
    return [[one.number, one.unit.start, one.unit.stop] for one in task]


@dataclass
class TaskResult:
    """Counts and problems of a task, complete once its rows have been read."""

    task: list[list[int | None]] = field(default_factory=list)
    """The value of `task_key`."""
    rows: list[tuple[int, str, int]] = field(default_factory=list)
    """(file number, format, number of rows) of each unit."""
    unused: list[tuple[int, list[str]]] = field(default_factory=list)
    """(file number, columns that are not used) of each unit with such columns."""
    bad_rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The first few bad rows."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    totals: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Samples, tokens, supervised, longest: by store and by source (its index as a string)."""


def read_result(part: Path, task: Task) -> TaskResult | None:
    """Return the result of a part that an earlier process finished; None if there is none.

    Also None if the part was made for another task, since another version may split the work
    differently.
    """
    try:
        stored = json.loads((part / "done.json").read_text(encoding="utf-8"))
        for name, by_source in stored["totals"].items():
            check_columns(part / name, by_source)
        if stored["task"] != task_key(task):
            return None
        problems = [Problem(**problem) for problem in stored["problems"]]
        return TaskResult(**stored | {"problems": problems})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, Damaged):
        return None


Tick = Callable[[int, int], None]
"""Called with the numbers of rows read and of tokens written since the last call."""
Job = tuple[int, Task, Path]
"""The index of a task, the task, and the folder of its part."""


def do_job(options: TokenizeOptions, job: Job, tick: Tick) -> tuple[int, TaskResult]:
    place, task, part = job
    return place, tokenize(task, part, options, tick)


def tokenize(task: Task, part: Path, options: TokenizeOptions, tick: Tick) -> TaskResult:
    """Write the samples of a task into the folder `part`, which appears only once it is complete.

    It does not appear if data.on_error=fail and there are bad rows.
    """
    aside = Path(tempfile.mkdtemp(prefix="tmp-", dir=part.parent))
    try:
        result = TaskTokenizer(task, aside, options, tick).run()
        if not (result.bad_rows and options.data.on_error == "fail"):
            text = json.dumps(asdict(result), ensure_ascii=False)
            (aside / "done.json").write_text(text, encoding="utf-8")
            aside.chmod(0o755)  # mkdtemp's folder is private to its owner, but the cache is shared
            try:
                os.replace(aside, part)
            except OSError:
                # otherwise another process was faster and wrote the same content
                if read_result(part, task) is None:
                    shutil.rmtree(part, ignore_errors=True)
                    os.replace(aside, part)
        return result
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class TaskTokenizer:
    """One pass over a task, in bounded memory: rows → conversations → samples → files."""

    def __init__(self, task: Task, folder: Path, options: TokenizeOptions, tick: Tick):
        self.task, self.options, self.tick = task, options, tick
        names = (TRAIN, VALIDATION) if options.share else (TRAIN,)
        with_media = options.media is not None
        self.writers = {name: StoreWriter(folder / name, with_media) for name in names}
        self.builder = options.builder()
        self.reader: Reader | None = None
        """Reads the rows of the current unit; None until its first row has been read."""
        on_error, listed = options.data.on_error, None
        if on_error == "skip":
            listed = open(folder / SKIPPED, "w", encoding="utf-8")  # noqa: SIM115 - run() closes it
        self.problems = Problems(on_error, listed=listed)
        self.result = TaskResult(task_key(task))

    def run(self) -> TaskResult:
        if self.options.kind == UNPAIRED:
            self.builder.others = self._first_answers()
        for unit in self.task:
            self._tokenize_unit(unit)
            if self.problems.will_raise:  # the message names rows of one file only
                break
        for writer in self.writers.values():
            writer.close()
        if self.problems.listed:
            self.problems.listed.close()
        result = self.result
        result.bad_rows, result.problems = self.problems.count, self.problems.first
        result.counts, result.examples = dict(self.builder.counts), self.builder.examples
        result.totals = {name: writer.totals for name, writer in self.writers.items()}
        return result

    def _first_answers(self) -> OtherAnswers:
        """Return an answer to each of the first two prompts of the task.

        Rows sorted by prompt may begin with many answers to one.
        """
        builder = self.options.builder()
        for unit in self.task:
            first = self._first_reader(unit)
            for text in _answers(unit.unit, first.again(), builder) if first else ():
                if builder.others.is_new(text):
                    builder.tokenize([text])
                if builder.others.are_several:
                    return builder.others
        return builder.others

    def _tokenize_unit(self, unit: TaskUnit) -> None:
        self.rows, reported = 0, 0
        if self._holds_tokens_alone(unit):
            self._copy_documents(unit)
            return
        for chunk in tokenize_in_chunks(self._texts(unit), self.builder, CHUNK, CHARACTERS):
            samples: dict[str, list[Sample]] = {name: [] for name in self.writers}
            lines: dict[str, list[int]] = {name: [] for name in self.writers}
            for (name, line), text_samples in chunk:
                samples[name] += text_samples
                lines[name] += [line] * len(text_samples)
            for name, writer in self.writers.items():
                writer.write(samples[name], unit.source, unit.number, lines[name])
            tokens = sum(len(sample.tokens) for one in samples.values() for sample in one)
            self.tick(self.rows - reported, tokens)
            reported = self.rows

    def _holds_tokens_alone(self, unit: TaskUnit) -> bool:
        file, data = unit.unit.file, self.options.data
        if self.options.kind not in (None, SINGLE) or not is_token_file(file):
            return False
        row = first_record(file, unit.unit.stamp)
        if row is None or row.error:
            return False
        with suppress(UserError, RecordError):  # reading the rows tells why
            fields = dict(unit.fields)
            self.reader = choose_reader(data, row.columns, file, unit.format, fields)
            return True
        return False

    def _copy_documents(self, unit: TaskUnit) -> None:
        name, share = unit.unit.file, self.options.share

        def refuse(number: int, reason: str) -> None:
            if not self.problems.is_enough:
                self.problems.add((name, number), reason)

        for file, block in token_blocks(unit.unit):
            for documents in read_documents(file, block):
                self.rows += len(documents)
                samples, is_used = learnable(documents, self.builder, name, refuse)
                place = documents.content_places()[is_used] if share else np.ones(len(samples))
                for store, writer in self.writers.items():
                    own = samples.take((place < share) == (store == VALIDATION))
                    writer.write_documents(own, unit.source, unit.number)
                self.tick(len(documents), len(samples.tokens))
            if self.problems.is_enough:
                return
        self._note_unit(unit)

    def _texts(self, unit: TaskUnit) -> Iterator[tuple[tuple[str, int], Rendered]]:
        """Yield ((store, line), text) for every text of a unit.

        After a problem that will be raised, rows are only checked for further problems.
        """
        self.reader = self._reader_of_file(unit)

        def choose(row: Record) -> Reader:
            if self.reader is None:
                fields = dict(unit.fields)
                file, data = unit.unit.file, self.options.data
                if self.options.kind == PROMPTS:
                    self.reader = make_prompt_reader(row.columns, unit.format, fields, file)
                else:
                    reader = choose_reader(
                        data, row.columns, file, unit.format, fields, self.options.kind,
                        self.options.media is not None,
                    )  # fmt: skip
                    self.reader = replace(reader, note=self.builder.count)
            return self.reader

        def refuse(row: Record, reason: str) -> None:
            self.problems.add(row.where, reason)

        for _, row, (name, texts) in read_texts(self._records(unit), choose, self._render, refuse):
            if not self.problems.will_raise:
                for text in texts:
                    yield (name, row.where[1]), text
        self._note_unit(unit)

    def _render(self, row: Any) -> tuple[str, list[Rendered]]:
        render = self.builder.render_prompt if self.options.kind == PROMPTS else self.builder.render
        # of labels a share of each is held out, as soon as all are known
        share = 0.0 if self.options.kind == LABELLED else self.options.share
        texts = render(row)
        return VALIDATION if share and content_place(row) < share else TRAIN, texts

    def _records(self, unit: TaskUnit) -> Iterator[Record]:
        for row in read_unit(unit.unit):
            self.rows += 1
            row.where = unit.unit.file, row.where[1] + unit.lines_before
            yield row
            if self.problems.is_enough:
                return

    def _reader_of_file(self, unit: TaskUnit) -> Reader | None:
        """Return the reader chosen by the file's first row; None if the unit holds that row."""
        first = self._first_reader(unit) if unit.unit.start else None
        return replace(first.again(), note=self.builder.count) if first else None

    def _first_reader(self, unit: TaskUnit) -> Reader | None:
        prompts, media = self.options.kind == PROMPTS, self.options.media is not None
        file, stamp = unit.unit.file, unit.unit.stamp
        kind = self.options.kind
        return first_reader(file, stamp, unit.format, unit.fields, prompts, media, kind)

    def _note_unit(self, unit: TaskUnit) -> None:
        file, start, stop = unit.unit.file, unit.unit.start, unit.unit.stop
        reader = self.reader
        if not (self.rows or start or stop is not None):
            self.problems.add((file, 1), NO_ROWS)
        if self.rows or not start:
            self.result.rows.append((unit.number, str(reader or "of no known format"), self.rows))
        if reader and reader.unused:
            self.result.unused.append((unit.number, list(reader.unused)))


def _answers(unit: Unit, reader: Reader, builder: SampleBuilder) -> Iterator[Rendered]:
    def choose(row: Record) -> Reader:
        return reader

    def ignore(row: Record, reason: str) -> None:
        """Do nothing, since it is told when the row is tokenized."""

    for _, _, texts in read_texts(read_unit(unit), choose, builder.render, ignore):
        yield from texts


@lru_cache(maxsize=64)
def first_record(file: str, stamp: tuple[int, int] | None) -> Record | None:
    return next(read_records(file), None)


@lru_cache(maxsize=64)
def first_reader(
    file: str,
    stamp: tuple[int, int] | None,
    format: str,
    fields: tuple[tuple[str, str], ...],
    prompts: bool = False,
    with_media: bool = False,
    kind: str | None = None,
) -> Reader | None:
    """Return the reader chosen by a file's first readable row; None if no row can be read."""
    make: Callable[..., Reader] = partial(make_reader, kind=kind, with_media=with_media)
    if prompts:
        make = make_prompt_reader
    for row in read_records(file):
        if not row.error:
            try:
                return make(row.columns, format, dict(fields), file)
            except UserError:  # the task with the beginning of the file reports it
                continue
    return None


def content_place(row: Readable) -> float:
    """Return a number in [0, 1), a hash of a row's content.

    It alone decides whether a row is held out, so the order of rows does not matter.
    """
    if isinstance(row, Document):
        content = row.text
    elif isinstance(row, Pretokenized) and isinstance(row.tokens, np.ndarray):
        content = row.tokens.astype("<i4").tobytes().hex()
    elif isinstance(row, Conversation):
        content = json.dumps([row.messages, row.tools], sort_keys=True, default=str)
    else:
        # names of fields are part of it: renaming one would move rows between the stores
        content = json.dumps(asdict(row) | {"where": None}, sort_keys=True)
    digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
