"""One unit of a file to a part of a store. Works alike in this process and in others; imports no torch."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.conversations import Conversation, Document, Reader, make_reader
from fsdp_trainer.data.samples import Rendered, Sample, SampleBuilder
from fsdp_trainer.data.sources import Problems, RowError, read_rows
from fsdp_trainer.data.store import StoreWriter
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError

CHUNK = 1000  # texts per call of the tokenizer
TRAIN, VALIDATION = "train", "validation"


@dataclass
class How:
    """What decides the tokens of a row, for all units of a component. share: of its rows, by their content, held out for validation."""

    data: Data
    seq_len: int
    share: float
    tokenizer: TextTokenizer
    template: Template


@dataclass(frozen=True)
class Task:
    """A unit of work. source, number: places of its source and its file; format, fields: as data.format and data.fields."""

    file: str
    source: int
    number: int
    format: str
    fields: dict[str, str] | None


@dataclass
class Done:
    """What is known of a unit when it has been read."""

    rows: int = 0
    format: str = ""
    bad_rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The first few of them."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each store: samples, tokens, supervised, longest."""

    @classmethod
    def of(cls, part: Path) -> "Done | None":
        """Of a part that an earlier process has finished."""
        try:
            told = json.loads((part / "done.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls(**told | {"problems": [Problem(**problem) for problem in told["problems"]]})


Tick = Callable[[int, int], None]
"""Called with rows read and tokens written since the last time."""


def tokenise(task: Task, part: Path, how: How, tick: Tick) -> Done:
    """Write the samples of a unit into the folder `part`, which appears when it is whole; not at all if bad rows are to end it."""
    aside = Path(tempfile.mkdtemp(prefix="tmp-", dir=part.parent))
    try:
        done = Tokenising(task, aside, how, tick).run()
        if not (done.bad_rows and how.data.on_error == "fail"):
            (aside / "done.json").write_text(json.dumps(asdict(done), ensure_ascii=False), encoding="utf-8")
            aside.chmod(0o755)  # mkdtemp's folder is for its owner only, the cache is shared
            try:
                os.replace(aside, part)
            except OSError:
                if Done.of(part) is None:  # else another process was faster, with the same content
                    raise
        return done
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Tokenising:
    """One pass over a unit: rows → conversations → samples → files, in bounded memory."""

    def __init__(self, task: Task, folder: Path, how: How, tick: Tick):
        self.task, self.how, self.tick = task, how, tick
        self.writers = {name: StoreWriter(folder / name) for name in ((TRAIN, VALIDATION) if how.share else (TRAIN,))}
        self.builder = SampleBuilder(how.data, how.seq_len, how.tokenizer, how.template)
        self.problems = Problems(how.data.on_error)
        self.done = Done()

    def run(self) -> Done:
        """Everything is written."""
        self.how.template.adapted.clear()
        texts, rows = self._texts(), 0
        while chunk := list(islice(texts, CHUNK)):
            samples: dict[str, list[Sample]] = {name: [] for name in self.writers}
            lines: dict[str, list[int]] = {name: [] for name in self.writers}
            for (name, line, _), made in zip(chunk, self.builder.tokenize([text for *_, text in chunk]), strict=True):
                samples[name] += made
                lines[name] += [line] * len(made)
            for name, writer in self.writers.items():
                writer.write(samples[name], self.task.source, self.task.number, lines[name])
            self.tick(self.done.rows - rows, sum(len(sample.tokens) for made in samples.values() for sample in made))
            rows = self.done.rows
        for writer in self.writers.values():
            writer.close()
        done = self.done
        done.bad_rows, done.problems = self.problems.count, self.problems.first
        done.counts, done.notes = dict(self.builder.counts), sorted(self.how.template.adapted)
        done.examples = getattr(self.builder, "examples", {})
        done.totals = {name: dict(writer.totals) for name, writer in self.writers.items()}
        return done

    def _texts(self) -> Iterator[tuple[str, int, Rendered]]:
        """(store, line, text) for every text of a file; after a problem that will be raised, only further problems are looked for."""
        reader, file = None, self.task.file
        for row in read_rows(file):
            self.done.rows += 1
            try:
                if row.error:
                    raise RowError(row.error)
                if reader is None:
                    reader = self._reader(row.columns)
                    self._check_split(reader.format)
                read = reader.read(row)
                texts, name = self.builder.render(read), self._store_of(read)
            except (RowError, RecursionError) as e:
                self.problems.add(row.where, str(e) if isinstance(e, RowError) else "is nested too deeply")
                if self.problems.is_enough:
                    break
                continue
            if not self.problems.will_raise:
                yield from ((name, row.where[1], text) for text in texts)
        if not self.done.rows:
            self.problems.add((file, 1), "the file holds no rows")
        self.done.format = str(reader or "of no known format")

    def _store_of(self, row: Conversation | Document) -> str:
        return VALIDATION if self.how.share and place(row) < self.how.share else TRAIN

    def _reader(self, columns: dict[str, Any]) -> Reader:
        try:
            return make_reader(columns, self.task.format, self.task.fields, self.task.file)
        except UserError as error:
            if self.how.data.on_error == "fail":
                raise
            raise RowError(error.problems[0].why.splitlines()[0]) from None  # the next row may tell

    def _check_split(self, format: str) -> None:
        data = self.how.data
        if data.too_long == "split" and format != "text":
            beside = "data.packing=best_fit " if data.packing == "stream" else ""  # a stream of anything must be split
            use = f"Use  {beside}data.too_long=drop  or  {beside}data.too_long=truncate"
            why = f"only text can be cut into pieces, and {self.task.file} holds conversations.\n{use}"
            raise UserError("the data cannot be used", [Problem("data.too_long=split", why)])


def place(row: Conversation | Document) -> float:
    """Of a row's content, evenly spread over [0, 1): which rows are held out depends on nothing else, least of all on their order."""
    content = row.text if isinstance(row, Document) else json.dumps([row.messages, row.tools], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64
