"""Some units of files to a part of a store.

Works alike in this process and in others; imports no torch.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.conversations import Conversation, Document, Readable, Reader, make_reader
from fsdp_trainer.data.samples import Rendered, Sample, SampleBuilder
from fsdp_trainer.data.sources import Problems, RowError
from fsdp_trainer.data.store import Damaged, StoreWriter, check_columns
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.data.units import Unit, read_rows, read_unit
from fsdp_trainer.errors import Problem, UserError

CHUNK, CHARACTERS = (
    1000,
    1 << 22,
)  # texts and characters of one call of the tokenizer, whichever is reached first
TRAIN, VALIDATION = "train", "validation"
CAN_BE_CUT = ("text", "tokens")  # formats whose samples may go on in another row
SKIPPED = (
    "skipped.jsonl"  # in the folder of the cache: each row that data.on_error=skip has left out
)


@dataclass
class How:
    """All that decides the tokens of a row, for all units of a component.

    share: of its rows, chosen by their content, held out for validation.
    """

    data: Data
    seq_len: int
    share: float
    tokenizer: TextTokenizer
    template: Template


@dataclass(frozen=True)
class Piece:
    """A unit with the places of its source and its file, and the lines of the file before it; format and fields: as data.format, data.fields."""

    unit: Unit
    source: int
    number: int
    lines_before: int
    format: str
    fields: tuple[tuple[str, str], ...]


Task = list[Piece]
"""What one part is made of: a part of a large file, or several small files."""


def pieces_of(task: Task) -> list[list[int | None]]:
    """The pieces of a task, as plain numbers that distinguish it from other tasks."""
    return [[piece.number, piece.unit.start, piece.unit.stop] for piece in task]


@dataclass
class Done:
    """The results of a task, known once its rows have been read."""

    task: list[list[int | None]] = field(default_factory=list)
    """Number of the file, start and stop of each piece."""
    rows: list[tuple[int, str, int]] = field(default_factory=list)
    """(number of the file, format, rows) of each piece."""
    unused: list[tuple[int, list[str]]] = field(default_factory=list)
    """(number of the file, columns that are not read) of each piece that has any."""
    bad_rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The first few of them."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    totals: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Of each store, of each source (its place, as text): samples, tokens, supervised, longest."""

    @classmethod
    def of(cls, part: Path, task: Task) -> "Done | None":
        """The results of a part that an earlier process has finished; None if there are none.

        Another version may have divided the work in another way.
        """
        try:
            told = json.loads((part / "done.json").read_text(encoding="utf-8"))
            for name, by_source in told["totals"].items():
                check_columns(part / name, by_source)
            if told["task"] != pieces_of(task):
                return None
            return cls(**told | {"problems": [Problem(**problem) for problem in told["problems"]]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, Damaged):
            return None


Tick = Callable[[int, int], None]
"""Called with the rows read and the tokens written since the last time."""


def tokenise(task: Task, part: Path, how: How, tick: Tick) -> Done:
    """Write the samples of a task into the folder `part`, which appears when it is whole; not at all if bad rows are to end it."""
    aside = Path(tempfile.mkdtemp(prefix="tmp-", dir=part.parent))
    try:
        done = Tokenising(task, aside, how, tick).run()
        if not (done.bad_rows and how.data.on_error == "fail"):
            (aside / "done.json").write_text(
                json.dumps(asdict(done), ensure_ascii=False), encoding="utf-8"
            )
            aside.chmod(0o755)  # mkdtemp's folder is for its owner only, the cache is shared
            try:
                os.replace(aside, part)
            except OSError:
                if (
                    Done.of(part, task) is None
                ):  # else another process was faster, with the same content
                    shutil.rmtree(part, ignore_errors=True)
                    os.replace(aside, part)
        return done
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Tokenising:
    """One pass over a task: rows → conversations → samples → files, in bounded memory."""

    def __init__(self, task: Task, folder: Path, how: How, tick: Tick):
        self.task, self.how, self.tick = task, how, tick
        self.writers = {
            name: StoreWriter(folder / name)
            for name in ((TRAIN, VALIDATION) if how.share else (TRAIN,))
        }
        self.builder = SampleBuilder(how.data, how.seq_len, how.tokenizer, how.template)
        listed = (
            open(folder / SKIPPED, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as this
            if how.data.on_error == "skip"
            else None
        )
        self.problems = Problems(how.data.on_error, listed=listed)
        self.done = Done(pieces_of(task))

    def run(self) -> Done:
        """Everything is written."""
        for piece in self.task:
            self._read(piece)
            if self.problems.will_raise:  # those of the first file that has any are told
                break
        for writer in self.writers.values():
            writer.close()
        if self.problems.listed:
            self.problems.listed.close()
        done = self.done
        done.bad_rows, done.problems = self.problems.count, self.problems.first
        done.counts, done.examples = dict(self.builder.counts), self.builder.examples
        done.totals = {name: writer.totals for name, writer in self.writers.items()}
        return done

    def _read(self, piece: Piece) -> None:
        self.rows, told = 0, 0
        texts = self._texts(piece)
        while chunk := next_texts(texts, CHUNK, CHARACTERS):
            samples: dict[str, list[Sample]] = {name: [] for name in self.writers}
            lines: dict[str, list[int]] = {name: [] for name in self.writers}
            for (name, line, _), made in zip(
                chunk, self.builder.tokenize([text for *_, text in chunk]), strict=True
            ):
                samples[name] += made
                lines[name] += [line] * len(made)
            for name, writer in self.writers.items():
                writer.write(samples[name], piece.source, piece.number, lines[name])
            self.tick(
                self.rows - told,
                sum(len(sample.tokens) for made in samples.values() for sample in made),
            )
            told = self.rows

    def _texts(self, piece: Piece) -> Iterator[tuple[str, int, Rendered]]:
        """(store, line, text) for every text of a piece; after a problem that will be raised, only further problems are looked for."""
        file = piece.unit.file
        reader = self._first_reader(piece)
        for row in read_unit(piece.unit):
            self.rows += 1
            row.where = file, row.where[1] + piece.lines_before
            try:
                if row.error:
                    raise RowError(row.error)
                reader = reader or reader_for(
                    self.how.data, row.columns, file, piece.format, dict(piece.fields)
                )
                read = reader.read(row)
                texts, name = self.builder.render(read), self._store_of(read)
            except (RowError, RecursionError) as e:
                reason = str(e) if isinstance(e, RowError) else "is nested too deeply"
                self.problems.add(row.where, reason)
                if self.problems.is_enough:
                    break
                continue
            if not self.problems.will_raise:
                for text in texts:
                    yield name, row.where[1], text
        self._note_piece(piece, reader)

    def _first_reader(self, piece: Piece) -> Reader | None:
        """The reader chosen by the file's first row, for a piece that does not begin with it."""
        unit = piece.unit
        if not unit.start:
            return None
        first = first_reader(unit.file, unit.stamp, piece.format, piece.fields)
        return first.again() if first else None

    def _note_piece(self, piece: Piece, reader: Reader | None) -> None:
        """Note the rows and unused columns of a piece; a file without rows is a problem."""
        whole_file = not piece.unit.start and piece.unit.stop is None
        if not self.rows and whole_file:
            self.problems.add((piece.unit.file, 1), "the file holds no rows")
        if self.rows or not piece.unit.start:
            self.done.rows.append((piece.number, str(reader or "of no known format"), self.rows))
        if reader and reader.unused:
            self.done.unused.append((piece.number, list(reader.unused)))

    def _store_of(self, row: Readable) -> str:
        return VALIDATION if self.how.share and place(row) < self.how.share else TRAIN


def reader_for(
    data: Data, columns: dict[str, Any], file: str, format: str, fields: dict[str, str] | None
) -> Reader:
    """A reader for rows with these columns.

    Raises UserError if they cannot be used; RowError where data.on_error=skip continues.
    """
    try:
        reader = make_reader(columns, format, fields, file)
    except UserError as error:
        if data.on_error == "fail":
            raise
        raise RowError(error.problems[0].why.splitlines()[0]) from None
    if data.too_long == "split" and reader.format not in CAN_BE_CUT:
        beside = (
            "data.packing=best_fit " if data.packing == "stream" else ""
        )  # a stream of anything must be split
        use = f"Use  {beside}data.too_long=drop  or  {beside}data.too_long=truncate"
        reason = f"only text can be cut into pieces, and {file} holds conversations.\n{use}"
        raise UserError("the data cannot be used", [Problem("data.too_long=split", reason)])
    return reader


@lru_cache(maxsize=64)
def first_reader(
    file: str, stamp: tuple[int, int] | None, format: str, fields: tuple[tuple[str, str], ...]
) -> Reader | None:
    """The reader chosen by the first row of a file that decides its format; None without one."""
    for row in read_rows(file):
        if not row.error:
            try:
                return make_reader(row.columns, format, dict(fields), file)
            except UserError:  # who has the beginning of the file says so
                continue
    return None


def next_texts(
    texts: Iterator[tuple[Any, ...]], most: int, most_characters: int
) -> list[tuple[Any, ...]]:
    """The texts for one call of the tokenizer, each after what belongs to it.

    Their number bounds the memory that the call takes.
    """
    chunk, characters = [], 0
    for text in islice(texts, most):
        chunk.append(text)
        characters += text[-1].size
        if characters >= most_characters:
            break
    return chunk


def place(row: Readable) -> float:
    """A number in [0, 1) from a row's content, evenly spread.

    Rows are held out by it alone: their order does not matter.
    """
    if isinstance(row, Document):
        content = row.text
    elif isinstance(row, Conversation):
        content = json.dumps([row.messages, row.tools], sort_keys=True, default=str)
    else:
        content = json.dumps(asdict(row) | {"where": None}, sort_keys=True)
    digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
