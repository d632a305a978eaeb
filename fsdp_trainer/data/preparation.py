"""One component's stores: split into tasks, tokenised into parts, and merged into a folder of the cache."""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.cache import clear_leftovers, held
from fsdp_trainer.data.findings import told
from fsdp_trainer.data.fingerprint import Content, fingerprint
from fsdp_trainer.data.remote import nothing
from fsdp_trainer.data.samples import EXAMPLES
from fsdp_trainer.data.sources import SHOWN, Problems, Source
from fsdp_trainer.data.store import Damaged, TokenStore, add_totals, merge, read_meta, write_meta
from fsdp_trainer.data.tokenise import SKIPPED, TRAIN, VALIDATION, Done, How, Piece, Task
from fsdp_trainer.data.units import Lines, split_units
from fsdp_trainer.data.workers import Job, cores, in_processes, in_this_process
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.observe.console import duration, short

SMALLEST, LARGEST, FEWEST = (
    4 << 20,
    256 << 20,
    512,
)  # bytes of a task, and how many a large data set has
WORTH_PROCESSES = 8 << 20  # bytes below which starting processes takes longer than they save


@dataclass
class Told:
    """Receivers of messages.

    progress: called again and again while there is progress; say: for lines that stay.
    """

    progress: Callable[[str], None] = nothing
    say: Callable[[str], None] = nothing


@dataclass
class ComponentSources:
    """The sources of a part of the data that is tokenised, packed and ordered by itself.

    share: of its rows, held out for validation; key: the one that names it.
    """

    name: str
    sources: list[Source]
    share: float = 0.0
    key: str = "data.path"

    @property
    def files(self) -> list[str]:
        """The files of all sources, in order."""
        return [file for source in self.sources for file in source.files]


class Preparation:
    """One component's stores, as folders of the cache."""

    def __init__(
        self,
        component: ComponentSources,
        how: How,
        content: dict[str, Content],
        root: Path,
        told: Told,
    ):
        self.component, self.how, self.root, self.told = component, how, root, told
        self.stamps = {file: content[file].stamp for file in component.files}
        self.digests = {file: content[file].digest for file in component.files}
        self.meta: dict[str, Any] = {}
        self.report: list[str] = []
        """Short lines for people."""
        self.unused: list[str] = []
        """Lines that name the columns of each file that are not used."""
        data = how.data
        read = [
            [source.format, source.fields, [content[file].digest for file in source.files]]
            for source in component.sources
        ]
        options = [
            data.format,
            data.fields,
            data.loss_on,
            data.too_long,
            data.on_error,
            how.seq_len,
            how.share,
        ]
        name = fingerprint([read, options, how.tokenizer.fingerprint, how.template.decides])
        self.folder, self.parts = root / name, root / f".{name}"

    def stores(self) -> dict[str, TokenStore]:
        """Open the stores, after they have been made if they are not there, or not whole."""
        while not (meta := read_whole(self.folder, self.told.say)):
            self._make()
        self.meta, files = meta, self.component.files
        renamed = dict(zip(meta["files"], files, strict=True))
        examples = {
            what: [_renamed(where, renamed) for where in places]
            for what, places in meta["examples"].items()
        }
        found = {
            TRAIN: (meta["counts"], examples)
        }  # what is held out is so few that it is told with the rest
        self.report = self._lines(meta, renamed)
        self.unused = self._unused_lines(meta)
        names = [source.name for source in self.component.sources]
        return {
            name: TokenStore(
                self.folder / name, about["fingerprint"], names, files, *found.get(name, ())
            )
            for name, about in meta["stores"].items()
        }

    def shard(self, index: int, of: int) -> list[int]:
        """Make every `of`-th part, from `index` on, and everything when the others are there.

        Returns the shards with parts that are not.
        """
        if read_whole(self.folder, self.told.say):
            return []
        tasks = self._tasks()
        with self._held(shared=True):
            self._tokenise(tasks, range(index, len(tasks), of))
        missing = sorted(
            {i % of for i, task in enumerate(tasks) if Done.of(self._part(i), task) is None}
        )
        if not missing or read_whole(self.folder):
            self.stores()
            return []
        return missing

    def _make(self) -> None:
        tasks = self._tasks()
        with self._held(shared=False) as alone:
            if not read_whole(
                self.folder, self.told.say
            ):  # another may have made it while this one waited
                for left in self.parts.glob("tmp-*") if alone else ():
                    shutil.rmtree(left, ignore_errors=True)
                clear_leftovers(self.root, self.parts)
                done = self._tokenise(tasks, range(len(tasks)))
                whole = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.parts))
                self._merge([done[i] for i in range(len(tasks))], whole)
                whole.chmod(0o755)
                if not read_whole(self.folder):  # without locks another may have been faster
                    shutil.rmtree(self.folder, ignore_errors=True)
                    commit(whole, self.folder)
            shutil.rmtree(self.parts, ignore_errors=True)

    @contextmanager
    def _held(self, shared: bool) -> Iterator[bool]:
        """Hold the folder of the parts; whether no other can.

        Raises RunFailed if something cannot be written.
        """
        waiting = False

        def waits() -> None:
            nonlocal waiting
            if not waiting:
                self.told.say(
                    f"data   another process prepares the same in {self.root}: this one waits"
                    " for it"
                )
            waiting = True
            self.told.progress("data   waiting for another process, which prepares the same")

        try:
            with held(self.parts, shared, waits) as alone:
                try:
                    yield alone
                except BaseException as error:
                    # other data, or other options, make other parts
                    if alone and (
                        isinstance(error, UserError) or not any(self.parts.glob("[0-9]*"))
                    ):
                        shutil.rmtree(self.parts, ignore_errors=True)
                    raise
        except OSError as error:
            if not read_whole(
                self.folder
            ):  # without locks another may have been through with it, and have tidied up
                reason = (
                    f"the tokenised data cannot be written to {self.root}:"
                    f" {error.strerror or error}. Use  data.cache=FOLDER"
                )
                raise RunFailed(reason) from None

    def _part(self, i: int) -> Path:
        return self.parts / f"{i:06}"

    def _tasks(self) -> list[Task]:
        """All files in pieces of about one size, which depends on the files alone."""
        data, sizes = (
            self.how.data,
            {file: stamp[0] if stamp else 0 for file, stamp in self.stamps.items()},
        )
        each = min(max(sum(sizes.values()) // FEWEST, SMALLEST), LARGEST)
        tasks: list[Task] = []
        self.bytes: list[float] = []
        number, room = 0, 0.0
        for place, source in enumerate(self.component.sources):
            for file in source.files:
                units = split_units(file, each, self.stamps[file])
                for unit in units:
                    if room <= 0 or unit.start:
                        tasks.append([])
                        self.bytes.append(0.0)
                        room = float(each)
                    fields = tuple((source.fields or data.fields or {}).items())
                    tasks[-1].append(
                        Piece(unit, place, number, 0, source.format or data.format, fields)
                    )
                    size = sizes[file] / len(units)
                    self.bytes[-1], room = self.bytes[-1] + size, room - size
                number += 1
        return tasks

    def _tokenise(self, tasks: list[Task], wanted: range) -> dict[int, Done]:
        """Those of the wanted parts that are not there.

        Raises UserError with the first bad rows, if they are to end it.
        """
        done = {i: found for i in wanted if (found := Done.of(self._part(i), tasks[i]))}
        pace = Pace(sum(self.bytes[i] for i in wanted), sum(self.bytes[i] for i in done), self.told)
        if done:
            self.told.say(f"data   {len(done):,} of {len(wanted):,} parts are there already")
        missing = [i for i in wanted if i not in done]
        count = min(self.how.data.workers or cores(), len(missing))
        last = [len(tasks)]  # a task behind this one need not be begun

        def jobs() -> Iterator[Job]:
            lines = Lines()
            for i in takewhile(lambda i: i <= last[0], missing):
                yield (
                    i,
                    [replace(piece, lines_before=lines.before(piece.unit)) for piece in tasks[i]],
                    self._part(i),
                )

        several = count > 1 and sum(self.bytes[i] for i in missing) >= WORTH_PROCESSES
        ends = (
            in_processes(jobs(), self.how, pace.tick, count)
            if several
            else in_this_process(jobs(), self.how, pace.tick)
        )
        with closing(ends):  # at once, whatever comes
            for i, found in ends:
                done[i] = found
                pace.finished(self.bytes[i])
                if found.bad_rows and self.how.data.on_error == "fail":
                    last[0] = min(last[0], _last_of_file(tasks, i))
        read = [done[i] for i in sorted(done) if i <= last[0]]
        problems = [problem for one in read for problem in one.problems][:SHOWN]
        Problems(
            self.how.data.on_error, sum(one.bad_rows for one in read), problems
        ).raise_if_failing()
        return done

    def _merge(self, done: list[Done], into: Path) -> None:
        """All parts as one, and last of all what is known of them."""
        parts = [self._part(i) for i in range(len(done))]
        tick = lambda: self.told.progress("data   merging the parts")  # noqa: E731
        stores = {
            name: {"fingerprint": merge([part / name for part in parts], into / name, tick)}
            for name in done[0].totals
        }
        rows: Counter[tuple[int, str]] = Counter()
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        totals: dict[str, dict[str, dict[str, int]]] = {name: {} for name in stores}
        unused: dict[int, dict[str, None]] = {}
        for one in done:
            for number, names in one.unused:
                unused.setdefault(number, {}).update(dict.fromkeys(names))
            counts.update(one.counts)
            for what, places in one.examples.items():
                examples[what] = [*examples.get(what, []), *places][:EXAMPLES]
            for number, format, n in one.rows:
                rows[number, format] += n
            for name, found in one.totals.items():
                add_totals(totals[name], found)
        problems = [problem for one in done for problem in one.problems][:SHOWN]
        if bad := sum(one.bad_rows for one in done):
            counts["unreadable"], examples["unreadable"] = (
                bad,
                [problem.what for problem in problems[:EXAMPLES]],
            )
        train = TokenStore(into / TRAIN, "", files=self.component.files)
        if len(again := _duplicates(train.digests)):
            counts["duplicate"], examples["duplicate"] = (
                len(again),
                [train.where(i) for i in again[:EXAMPLES].tolist()],
            )
        meta = {
            "files": self.component.files,
            "rows": [[number, format, n] for (number, format), n in sorted(rows.items())],
            "unused": [[number, list(names)] for number, names in sorted(unused.items())],
            "problems": [asdict(problem) for problem in problems],
            "counts": dict(counts),
            "examples": examples,
            "stores": {name: about | {"totals": totals[name]} for name, about in stores.items()},
        }
        if not totals[TRAIN]:
            self._refuse(meta)
        if bad and self.how.data.on_error == "skip":
            with open(into / SKIPPED, "wb") as out:
                out.writelines((part / SKIPPED).read_bytes() for part in parts)
        write_meta(into, meta)

    def _refuse(self, meta: dict[str, Any]) -> None:
        """Nothing is left to learn: say what became of the rows. Raises UserError."""
        key, name = self.component.key, self.component.name
        path = self.how.data.path if key == "data.path" else self.how.data.validation
        which = f" of {name}" if name not in (TRAIN, VALIDATION, path) else ""
        sentences = [
            str(finding)
            for finding in told(meta["counts"], meta["examples"], 0, 0, self.how.seq_len)
        ]
        reason = "\n".join(
            [
                f"no token{which} is supervised: there is nothing to learn",
                *self._lines(meta, {}),
                *sentences,
            ]
        )
        raise UserError("the data cannot be used", [Problem(f"{key}={path}", reason)])

    def _unused_lines(self, meta: dict[str, Any]) -> list[str]:
        """Return a line for all files with the same columns that are not used."""
        by_names: dict[str, list[int]] = {}
        for number, names in meta["unused"]:
            by_names.setdefault(", ".join(names), []).append(number)
        return [
            f"{self._files_called(numbers)}: columns not used: {names}"
            for names, numbers in by_names.items()
        ]

    def _files_called(self, numbers: list[int]) -> str:
        return self.component.files[numbers[0]] if len(numbers) == 1 else f"{len(numbers):,} files"

    def _lines(self, meta: dict[str, Any], renamed: dict[str, str]) -> list[str]:
        """Lines about the data for people, with the files' present names."""
        by_format: dict[str, list[tuple[int, int]]] = {}
        for number, format, rows in meta["rows"]:
            by_format.setdefault(format, []).append((number, rows))
        lines = []
        for format, found in by_format.items():
            named = self._files_called([number for number, _ in found])
            lines.append(f"{named}: {sum(rows for _, rows in found):,} rows, {format}")
        if bad := meta["counts"].get("unreadable"):
            listed = (
                f", listed in {self.folder / SKIPPED}" if (self.folder / SKIPPED).exists() else ""
            )
            lines.append(f"skipped {bad:,} rows that cannot be read{listed}:")
            lines += [
                f"    {_renamed(p['what'], renamed)}  {p['why'].splitlines()[0]}"
                for p in meta["problems"]
            ]
        return lines


class Pace:
    """The line that tells how far it is, and how long it will take."""

    def __init__(self, total: float, before: float, told: Told):
        self.total, self.done, self.before, self.told = total, before, before, told
        self.rows = self.tokens = 0
        self.began = time.monotonic()

    def tick(self, rows: int, tokens: int) -> None:
        """So many more were read and written."""
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        self.told.progress(str(self))

    def finished(self, size: float) -> None:
        """So many more bytes of the files."""
        self.done += size
        self.told.progress(str(self))

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-3)
        parts = [
            f"{self.rows:,} rows",
            f"{short(self.tokens)} tokens",
            f"{short(self.tokens / seconds)} tok/s",
        ]
        size = (
            f"{self.total / 2**30:,.1f} GiB"
            if self.total >= 2**30
            else f"{self.total / 2**20:.1f} MiB"
        )
        parts.append(f"{self.done / max(1.0, self.total):.0%} of {size}")
        if self.done > self.before:
            parts.append(
                f"eta {duration(seconds * (self.total - self.done) / (self.done - self.before))}"
            )
        return "data   " + "  ".join(parts)


def _last_of_file(tasks: list[Task], i: int) -> int:
    """The last task with a piece of the file that task i ends with."""
    file = tasks[i][-1].number
    return max(k for k in range(i, len(tasks)) if tasks[k][0].number <= file)


def _duplicates(digests: np.ndarray) -> np.ndarray:
    """Samples that are the same as one before, in order."""
    order = np.argsort(digests, kind="stable")
    alike = digests[order[1:]] == digests[order[:-1]]
    return np.sort(order[1:][alike])


def _renamed(where: str, renamed: dict[str, str]) -> str:
    """FILE:LINE, with the file as it is called now."""
    file, _, line = where.rpartition(":")
    return f"{renamed.get(file, file)}:{line}"


def read_whole(folder: Path, say: Callable[[str], None] = nothing) -> dict[str, Any] | None:
    """The description of a folder's stores, if they are there, and as they were written."""
    if not folder.exists():
        return None
    try:
        return read_meta(folder)
    except Damaged as error:
        say(f"data   the cache is damaged, and is made anew: {error}")
        return None


def commit(aside: Path, folder: Path) -> None:
    try:
        os.replace(aside, folder)
    except OSError:
        if not read_whole(folder):  # else another run was faster, with the same content
            raise
