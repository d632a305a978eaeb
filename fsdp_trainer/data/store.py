"""Tokenised once: flat memory-mapped files, named by what they were made from, written aside and renamed when whole."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.conversations import Conversation, Document, Reader, make_reader
from fsdp_trainer.data.samples import Rendered, Sample, SampleBuilder
from fsdp_trainer.data.sources import Problems, RowError, Source, content_hash, find_sources
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.data.units import read_rows
from fsdp_trainer.errors import Problem, UserError

CODE_VERSION = 4  # raise it when the same input gives other tokens or weights
CHUNK = 1000  # texts per call of the tokenizer
COLUMNS = {
    "tokens": np.int32, "weights": np.float32, "lengths": np.int64, "weight_sums": np.float64, "supervised": np.int64, "sources": np.int32,
    "files": np.int32, "lines": np.int64,
}  # fmt: skip

Progress = Callable[[int, int], None]
"""Called with (rows read, tokens written) so far."""


class TokenStore:
    """Samples on disk. `weights` belongs to `tokens` one to one: the weight with which that token is learnt, as a target."""

    def __init__(self, folder: Path, fingerprint: str, source_names: Sequence[str] = ("",), files: Sequence[str] = ()):
        self.folder, self.fingerprint, self.source_names, self.file_names = folder, fingerprint, list(source_names), list(files)
        columns = {name: _map(folder / f"{name}.bin", dtype) for name, dtype in COLUMNS.items()}
        self.tokens: np.ndarray = columns["tokens"]  # [all tokens] int32
        self.weights: np.ndarray = columns["weights"]  # [all tokens] float32
        self.lengths: np.ndarray = columns["lengths"]  # [samples] int64
        self.weight_sums: np.ndarray = columns["weight_sums"]  # [samples] float64
        self.supervised: np.ndarray = columns["supervised"]  # [samples] int64: tokens with a weight
        self.sources: np.ndarray = columns["sources"]  # [samples] int32, places in source_names
        self.files: np.ndarray = columns["files"]  # [samples] int32, places in file_names; this and `lines` are empty in an older store
        self.lines: np.ndarray = columns["lines"]  # [samples] int64, from 1; in a table the row
        self.offsets: np.ndarray = np.concatenate([[0], np.cumsum(self.lengths)])  # [samples + 1] int64

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, sample: int, start: int = 0, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, weights) of a sample, or of at most `length` of its tokens from `start` on."""
        first, end = self.offsets[sample] + start, self.offsets[sample + 1]
        part = slice(first, end if length is None else min(first + length, end))
        return self.tokens[part], self.weights[part]

    def where(self, sample: int) -> str:
        """FILE:LINE that a sample was made of, as the file was called when it was tokenised."""
        return f"{self.file_names[self.files[sample]]}:{self.lines[sample]}" if self.file_names else f"sample {sample}"


def _map(file: Path, dtype: Any) -> np.ndarray:
    return np.memmap(file, dtype, mode="r") if file.exists() and file.stat().st_size else np.empty(0, dtype)


@dataclass
class Prepared:
    """What `prepare` leaves behind."""

    folder: Path
    fingerprint: str
    train: TokenStore
    validation: TokenStore | None
    report: list[str]
    """Short lines for people."""


def open_prepared(folder: str | Path) -> Prepared:
    """What another rank, or an earlier run, has prepared."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    stores = {name: TokenStore(folder / name, **about) for name, about in meta["stores"].items()}
    return Prepared(folder, meta["fingerprint"], stores["train"], stores.get("validation"), meta["report"])


def prepare(
    data: Data, batch: Batch, tokenizer: TextTokenizer, template: Template, root: Path, progress: Progress | None = None
) -> Prepared:
    """Tokenise what `data` names into `root/FINGERPRINT`, unless that is there already. UserError if the data cannot be used."""
    train = find_sources(data.path, "data.path")
    apart = find_sources(data.validation, "data.validation") if _is_path(data.validation) else []
    hashes = [_hashes(train), _hashes(apart)]
    fingerprint = _fingerprint(hashes, data, batch.seq_len, tokenizer, template)
    folder = Path(root) / fingerprint
    if not (folder / "meta.json").exists():
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{fingerprint}-", dir=root))
        except OSError as error:
            why = f"the tokenised data cannot be kept there: {error}.\nUse  data.cache=FOLDER"
            raise UserError("the data cannot be prepared", [Problem(f"data.cache={root}", why)]) from None
        try:
            # each store has its own: to name a held-out file, or another, changes nothing about what is trained on
            parts = {
                "train": _fingerprint([hashes[0], []], data, batch.seq_len, tokenizer, template),
                "validation": f"{fingerprint}-validation",
            }
            Preparation(data, batch.seq_len, tokenizer, template, aside, progress).run(train, apart, fingerprint, parts)
            _commit(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return open_prepared(folder)


def _commit(aside: Path, folder: Path) -> None:
    aside.chmod(0o755)  # mkdtemp's folder is for its owner only, the cache is shared
    try:
        os.replace(aside, folder)
    except OSError:
        if not (folder / "meta.json").exists():  # else another run was faster, with the same content
            raise


def _is_path(validation: Any) -> bool:
    return validation is not None and not isinstance(validation, int | float)


def _hashes(sources: list[Source]) -> list:
    """Of what the files hold; with several sources, their names too, which the records of a run go by."""
    return [[source.name if len(sources) > 1 else "", [content_hash(file) for file in source.files]] for source in sources]


def _fingerprint(hashes: list, data: Data, seq_len: int, tokenizer: TextTokenizer, template: Template) -> str:
    share = None if _is_path(data.validation) else data.validation  # of the training files, held out
    options = [data.format, data.fields, data.loss_on, data.too_long, data.on_error, seq_len, share]
    parts = [CODE_VERSION, options, hashes, tokenizer.fingerprint, template.source]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()


class StoreWriter:
    """Appends samples to the files of a store."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in COLUMNS}  # noqa: SIM115
        self.longest = 0
        self.by_source: Counter[tuple[int, str]] = Counter()
        """How many samples, tokens and supervised tokens of each source: {(source, "tokens"): 5}."""

    def total(self, what: str) -> int:
        """Samples, tokens or supervised tokens of all sources."""
        return sum(count for (_, counted), count in self.by_source.items() if counted == what)

    def write(self, samples: list[Sample], source: int = 0, file: int = 0, lines: Sequence[int] | int = 0) -> None:
        """Append, in order. source, file: places among their names; lines: of the file, one for each sample."""
        if not samples:
            return
        lengths = np.array([len(s.tokens) for s in samples])
        supervised = np.array([np.count_nonzero(s.weights) for s in samples])
        columns = {
            "tokens": np.concatenate([s.tokens for s in samples]),
            "weights": np.concatenate([s.weights for s in samples]),
            "lengths": lengths,
            "weight_sums": np.array([s.weights.sum(dtype=np.float64) for s in samples]),
            "supervised": supervised,
            "sources": np.full(len(samples), source),
            "files": np.full(len(samples), file),
            "lines": np.broadcast_to(lines, len(samples)),
        }
        for name, dtype in COLUMNS.items():
            columns[name].astype(dtype).tofile(self._files[name])
        counts = {"samples": len(samples), "tokens": int(lengths.sum()), "supervised": int(supervised.sum())}
        self.by_source.update({(source, what): count for what, count in counts.items()})
        self.longest = max(self.longest, int(lengths.max()))

    def close(self) -> None:
        """Everything is on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


class Preparation:
    """One pass over the data: rows → conversations → samples → files, in bounded memory."""

    def __init__(self, data: Data, seq_len: int, tokenizer: TextTokenizer, template: Template, folder: Path, progress: Progress | None):
        self.data, self.seq_len, self.tokenizer, self.template = data, seq_len, tokenizer, template
        self.folder, self.progress = folder, progress or (lambda rows, tokens: None)
        self.report: list[str] = []
        self.rows = 0
        self.files: list[str] = []

    def run(self, train: list[Source], apart: list[Source], fingerprint: str, fingerprints: dict[str, str]) -> None:
        """Write the stores, and last of all meta.json."""
        share = self.data.validation if isinstance(self.data.validation, int | float) else 0.0
        self.writers = {name: StoreWriter(self.folder / name) for name in (("train", "validation") if apart or share else ("train",))}
        self._read(train, lambda row: "validation" if share and _place(row) < share else "train")
        self._read(apart, lambda row: "validation")
        sources = {"train": train, "validation": apart or train}
        about = {
            name: {
                "fingerprint": fingerprints[name],
                "source_names": [source.name for source in sources[name]],
                "files": self.files,
            }
            for name in self.writers
        }
        for name, writer in self.writers.items():
            writer.close()
            self._check(name, writer, sources[name])
        self.report += [f"note: {note}" for note in sorted(self.template.adapted)]
        meta = {"fingerprint": fingerprint, "stores": about, "report": self.report}
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=2, ensure_ascii=False), encoding="utf-8")

    def _read(self, sources: list[Source], store_of: Callable[[Conversation | Document], str]) -> None:
        """Tokenise all files, each row into the store that it belongs to."""
        self.found: dict[str, list[tuple[str, int]]] = {}  # format → files and their rows
        problems = Problems(self.data.on_error)
        builder = SampleBuilder(self.data, self.seq_len, self.tokenizer, self.template)
        for i, file in ((i, file) for i, source in enumerate(sources) for file in source.files):
            texts = self._texts(file, builder, problems, store_of)
            self.files.append(file)
            while chunk := list(islice(texts, CHUNK)):
                samples: dict[str, list[Sample]] = {name: [] for name in self.writers}
                lines: dict[str, list[int]] = {name: [] for name in self.writers}
                for (name, line, _), made in zip(chunk, builder.tokenize([text for *_, text in chunk]), strict=True):
                    samples[name] += made
                    lines[name] += [line] * len(made)
                for name, writer in self.writers.items():
                    writer.write(samples[name], i, len(self.files) - 1, lines[name])
                self.progress(self.rows, sum(writer.total("tokens") for writer in self.writers.values()))
            problems.raise_if_failing()
        for format, found in self.found.items():
            named = found[0][0] if len(found) == 1 else f"{len(found):,} files"
            self.report.append(f"{named}: {sum(rows for _, rows in found):,} rows, {format}")
        self.report += problems.report() + [sentence.format(count) for sentence, count in builder.counts.items()]

    def _texts(
        self, file: str, builder: SampleBuilder, problems: Problems, store_of: Callable[[Conversation | Document], str]
    ) -> Iterator[tuple[str, int, Rendered]]:
        """(store, line, text) for every text of a file; after a problem that will be raised, only further problems are looked for."""
        reader, before = None, self.rows
        for row in read_rows(file):
            self.rows += 1
            try:
                if row.error:
                    raise RowError(row.error)
                if reader is None:
                    reader = self._reader(row.columns, file)
                    self._check_split(reader.format, file)
                read = reader.read(row)
                texts, name = builder.render(read), store_of(read)
            except (RowError, RecursionError) as e:
                problems.add(row.where, str(e) if isinstance(e, RowError) else "is nested too deeply")
                continue
            if not problems.will_raise:
                yield from ((name, row.where[1], text) for text in texts)
        if self.rows == before:
            problems.add((file, 1), "the file holds no rows")
        self.found.setdefault(str(reader or "of no known format"), []).append((file, self.rows - before))

    def _reader(self, columns: dict[str, Any], file: str) -> Reader:
        try:
            return make_reader(columns, self.data.format, self.data.fields, file)
        except UserError as error:
            if self.data.on_error == "fail":
                raise
            raise RowError(error.problems[0].why.splitlines()[0]) from None  # the next row may tell

    def _check_split(self, format: str, file: str) -> None:
        if self.data.too_long == "split" and format != "text":
            beside = "data.packing=best_fit " if self.data.packing == "stream" else ""  # a stream of anything must be split
            use = f"Use  {beside}data.too_long=drop  or  {beside}data.too_long=truncate"
            why = f"only text can be cut into pieces, and {file} holds conversations.\n{use}"
            raise UserError("the data cannot be used", [Problem("data.too_long=split", why)])

    def _check(self, name: str, writer: StoreWriter, sources: list[Source]) -> None:
        """Something must be left to learn; then a line about it, and one about each of several sources."""
        samples, tokens = writer.total("samples"), writer.total("tokens")
        if not samples:
            key, value = ("data.validation", self.data.validation) if name == "validation" else ("data.path", self.data.path)
            why = "the share is so small that no sample is in it" if isinstance(value, float) else "there is nothing in it to learn:"
            raise UserError("the data cannot be used", [Problem(f"{key}={value}", "\n".join([why, *self.report]))])
        learnt = 100 * writer.total("supervised") / tokens
        self.report.append(f"{name}: {samples:,} samples, {tokens:,} tokens, {learnt:.1f}% learnt, longest {writer.longest:,}")
        for i, source in enumerate(sources if len(sources) > 1 else []):
            of = {what: writer.by_source[i, what] for what in ("samples", "tokens", "supervised")}
            learnt = 100 * of["supervised"] / max(1, of["tokens"])
            share = f"{100 * of['tokens'] / tokens:.1f}% of the tokens"
            self.report.append(f"    {source.name}: {of['samples']:,} samples, {of['tokens']:,} tokens ({share}), {learnt:.1f}% learnt")


def _place(row: Conversation | Document) -> float:
    """Of a row's content, evenly spread over [0, 1): which rows are held out depends on nothing else, least of all on their order."""
    content = row.text if isinstance(row, Document) else json.dumps([row.messages, row.tools], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64
