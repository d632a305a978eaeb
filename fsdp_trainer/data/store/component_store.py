"""The stores of one component of the data.

A component is split into tasks, tokenized into parts, and merged into a folder of the cache.
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.parts.own_parts import identity_of
from fsdp_trainer.data.files.file_splits import Lines, split_units
from fsdp_trainer.data.files.media_files import changed_files
from fsdp_trainer.data.files.remote_files import nothing
from fsdp_trainer.data.files.sources import SHOWN, Problems, Source
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.records.labelled_texts import LABELLED, TAGGED
from fsdp_trainer.data.records.preference_records import PROMPTS, UNPAIRED
from fsdp_trainer.data.records.prompts import QUESTION_VERSION
from fsdp_trainer.data.records.record_formats import OF_HEADS
from fsdp_trainer.data.store.cache_folders import clear_leftovers, locked_folder
from fsdp_trainer.data.store.findings import list_findings
from fsdp_trainer.data.store.fingerprint import Content, fingerprint
from fsdp_trainer.data.store.token_store import (
    Damaged,
    TokenStore,
    add_totals,
    divide,
    group_digests,
    merge,
    read_meta,
    share_of_each,
    write_meta,
)
from fsdp_trainer.data.store.tokenize_tasks import (
    SKIPPED,
    TRAIN,
    VALIDATION,
    Job,
    Task,
    TaskResult,
    TaskUnit,
    do_job,
    read_result,
)
from fsdp_trainer.data.store.tokenize_workers import cores, do_jobs
from fsdp_trainer.data.tokens.records_to_samples import TokenizeOptions
from fsdp_trainer.data.tokens.samples import EXAMPLES
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.observe.console import duration, short

SMALLEST, LARGEST, FEWEST = 4 << 20, 256 << 20, 512
"""Minimum and maximum bytes of a task, and the minimum number of tasks of a large data set."""
WORTH_PROCESSES = 8 << 20  # with fewer bytes, starting processes takes longer than it saves


@dataclass
class Reporter:
    """Receivers of messages.

    progress: called repeatedly with the current state. say: called with lines that stay on screen.
    """

    progress: Callable[[str], None] = nothing
    say: Callable[[str], None] = nothing


@dataclass
class ComponentSources:
    """The sources of a component, which is tokenized, packed and ordered independently of others.

    share: fraction of its rows that is held out for validation. key: configuration key that names
    it.
    """

    name: str
    sources: list[Source]
    share: float = 0.0
    key: str = "data.path"

    @property
    def files(self) -> list[str]:
        return [file for source in self.sources for file in source.files]


class ComponentStores:
    """Makes and opens the stores of one component, as folders of the cache."""

    def __init__(
        self,
        component: ComponentSources,
        options: TokenizeOptions,
        content: dict[str, Content],
        root: Path,
        reporter: Reporter,
    ):
        self.component, self.options, self.root = component, options, root
        self.reporter = reporter
        self.stamps = {file: content[file].stamp for file in component.files}
        self.digests = {file: content[file].digest for file in component.files}
        self.meta: Json = {}
        self.report: list[str] = []
        """Short lines for people."""
        self.unused: list[str] = []
        """Lines that name the columns of each file that are not used."""
        read = [
            [source.format, source.fields, [content[file].digest for file in source.files]]
            for source in component.sources
        ]
        data = options.data
        format = identity_of("format", data.format)
        keys = [format, data.fields, data.loss_on, data.too_long, data.on_error]
        decisive: list[Any] = [read, [*keys, options.seq_len, options.share]]
        decisive += [options.kind] if options.kind in (UNPAIRED, PROMPTS, *OF_HEADS) else []
        decisive += [data.prompts] if options.kind in OF_HEADS else []
        decisive += ["share of each label"] if options.kind == LABELLED and options.share else []
        decisive += [data.step_separator] if options.kind == TAGGED else []
        decisive += [QUESTION_VERSION] if options.kind == PROMPTS else []
        if options.media:  # paths of media are relative to the folder of the file
            folders = [os.path.dirname(os.path.abspath(file)) for file in component.files]
            decisive += [options.media.processor.fingerprint, folders]
        decisive += options.separator_of(component.files)
        name = fingerprint([*decisive, options.tokenizer.fingerprint, options.template.decides])
        self.folder, self.parts = root / name, root / f".{name}"

    def stores(self) -> dict[str, TokenStore]:
        """Return the open stores by name; make them first if they are missing or incomplete."""
        meta = read_complete(self.folder, self.reporter.say)
        if meta and self.options.media and self._media_changed(meta):
            shutil.rmtree(self.folder, ignore_errors=True)
            meta = None
        while not meta:
            self._make()
            meta = read_complete(self.folder, self.reporter.say)
        self.meta, files = meta, self.component.files
        renamed = dict(zip(meta["files"], files, strict=True))
        examples = {
            key: [_renamed(where, renamed) for where in places]
            for key, places in meta["examples"].items()
        }
        self.report = self._lines(meta, renamed)
        self.unused = self._unused_lines(meta)
        sources = [source.name for source in self.component.sources]
        stores = {}
        for name, about in meta["stores"].items():
            # few rows are held out: the counts of the training store include them
            counted = (meta["counts"], examples) if name == TRAIN else ()
            folder = self.folder / name
            stores[name] = TokenStore(folder, about["fingerprint"], sources, files, *counted)
        return stores

    def _media_changed(self, meta: Json) -> bool:
        """Return True, after a message, if a file of an image is not what was tokenized.

        Only the first rank of a node looks; the others read what it has prepared.
        """
        if int(os.environ.get("LOCAL_RANK", 0)):
            return False
        stores = [TokenStore(self.folder / name, "") for name in meta["stores"]]
        files = {one.file for store in stores for one in store.all_media()}
        changed = changed_files(files)
        if changed:
            self.reporter.say(
                f"data   changed: {counted(len(changed), READ.name)}, so all is tokenized again:"
                f" {', '.join(changed[:EXAMPLES])}"
            )
        return bool(changed)

    def shard(self, index: int, count: int) -> list[int]:
        """Make every part of shard `index` of `count`; merge all parts when no shard is missing.

        Returns the indices of the shards that still lack parts.
        """
        if read_complete(self.folder, self.reporter.say):
            return []
        tasks = self._tasks()
        with self._locked_parts(shared=True):
            if not read_complete(self.folder):  # while this one waited, another may have made it
                self._tokenize(tasks, range(index, len(tasks), count))
        done = [read_result(self._part(i), task) for i, task in enumerate(tasks)]
        missing = sorted({i % count for i, result in enumerate(done) if result is None})
        if not missing or read_complete(self.folder):
            self.stores()
            return []
        return missing

    def _make(self) -> None:
        tasks = self._tasks()
        with self._locked_parts(shared=False) as alone:
            # another process may have made it while this one waited for the lock
            if not read_complete(self.folder, self.reporter.say):
                for leftover in self.parts.glob("tmp-*") if alone else ():
                    shutil.rmtree(leftover, ignore_errors=True)
                clear_leftovers(self.root, self.parts)
                done = self._tokenize(tasks, range(len(tasks)))
                whole = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.parts))
                self._merge([done[i] for i in range(len(tasks))], whole)
                whole.chmod(0o755)
                if not read_complete(self.folder):  # without locks another run may have been faster
                    shutil.rmtree(self.folder, ignore_errors=True)
                    commit(whole, self.folder)
            shutil.rmtree(self.parts, ignore_errors=True)

    @contextmanager
    def _locked_parts(self, shared: bool) -> Iterator[bool]:
        """Lock the folder of the parts; yield True if no other process can hold it.

        Raises RunFailed if something cannot be written.
        """
        waiting = False

        def waits() -> None:
            nonlocal waiting
            if not waiting:
                self.reporter.say(
                    f"data   another process is preparing the same data in {self.root}: this one"
                    " waits for it"
                )
            waiting = True
            self.reporter.progress("data   waiting for another process that prepares the same data")

        try:
            with locked_folder(self.parts, shared, waits) as alone:
                try:
                    yield alone
                except BaseException as error:
                    # other data or options make other parts: these would never be reused
                    useless = isinstance(error, UserError) or not any(self.parts.glob("[0-9]*"))
                    if alone and useless:
                        shutil.rmtree(self.parts, ignore_errors=True)
                    raise
        except OSError as error:
            # without locks another process may have finished the store and deleted the parts
            if not read_complete(self.folder):
                reason = (
                    f"the tokenized data cannot be written to {self.root}:"
                    f" {error.strerror or error}. Use  data.cache=FOLDER"
                )
                raise RunFailed(reason) from None

    def _part(self, i: int) -> Path:
        return self.parts / f"{i:06}"

    def _tasks(self) -> list[Task]:
        """Split all files into tasks of about equal size, depending on the files alone."""
        sizes = {file: stamp[0] if stamp else 0 for file, stamp in self.stamps.items()}
        each = min(max(sum(sizes.values()) // FEWEST, SMALLEST), LARGEST)
        tasks: list[Task] = []
        self.bytes: list[float] = []
        number, room = 0, 0.0
        separator = self.options.separator
        for place, source in enumerate(self.component.sources):
            format, fields = source.columns(self.options.data)
            for file in source.files:
                units = split_units(file, each, self.stamps[file], separator)
                size = sizes[file] / len(units)
                for unit in units:
                    if room <= 0 or unit.start:
                        tasks.append([])
                        self.bytes.append(0.0)
                        room = float(each)
                    items = tuple((fields or {}).items())
                    tasks[-1].append(TaskUnit(unit, place, number, 0, format, items))
                    self.bytes[-1], room = self.bytes[-1] + size, room - size
                number += 1
        return tasks

    def _tokenize(self, tasks: list[Task], wanted: range) -> dict[int, TaskResult]:
        """Make the wanted parts that are missing, and return the results of all wanted parts.

        Raises UserError with the first bad rows if data.on_error=fail.
        """
        stored = {i: read_result(self._part(i), tasks[i]) for i in wanted}
        done = {i: result for i, result in stored.items() if result}
        missing = [i for i in wanted if i not in done]
        if done:
            self.reporter.say(f"data   {len(done):,} of {len(wanted):,} parts are there already")
        total, before = (sum(self.bytes[i] for i in these) for these in (wanted, done))
        pace = Pace(total, before, self.reporter)
        on_error, last = self.options.data.on_error, len(tasks)

        def jobs() -> Iterator[Job]:
            lines = Lines()
            for i in takewhile(lambda i: i <= last, missing):
                task = [replace(one, lines_before=lines.before(one.unit)) for one in tasks[i]]
                yield i, task, self._part(i)

        workers = 1
        if sum(self.bytes[i] for i in missing) >= WORTH_PROCESSES:
            workers = min(self.options.data.workers or cores(), len(missing))
        handler = partial(do_job, self.options)
        results = do_jobs(jobs(), handler, pace.tick, workers, ". What is finished is kept")
        with closing(results):  # closing it also stops the workers after an error
            for i, result in results:
                done[i] = result
                pace.finished(self.bytes[i])
                if result.bad_rows and on_error == "fail":  # later files need not be started
                    last = min(last, _last_of_file(tasks, i))
        read = [done[i] for i in sorted(done) if i <= last]
        problems = [problem for result in read for problem in result.problems][:SHOWN]
        bad_rows = sum(result.bad_rows for result in read)
        Problems(on_error, bad_rows, problems).raise_if_failing()
        return done

    def _merge(self, done: list[TaskResult], into: Path) -> None:
        parts = [self._part(i) for i in range(len(done))]
        stores = {}
        for name in done[0].totals:
            folders = [part / name for part in parts]
            digest = merge(folders, into / name, self._report_merging)
            totals: dict[str, dict[str, int]] = {}
            for result in done:
                add_totals(totals, result.totals[name])
            stores[name] = {"fingerprint": digest, "totals": totals}
        meta = self._description(done, into) | {"stores": stores}
        if not stores[TRAIN]["totals"]:
            self._refuse(meta)
        if self.options.share and self.options.kind == LABELLED:
            stores |= self._divided(into)
        if meta["problems"] and self.options.data.on_error == "skip":
            with open(into / SKIPPED, "wb") as out:
                out.writelines((part / SKIPPED).read_bytes() for part in parts)
        write_meta(into, meta)

    def _divided(self, into: Path) -> Json:
        whole = into / TRAIN
        held_out = share_of_each(TokenStore(whole, ""), self.options.share)
        with tempfile.TemporaryDirectory(dir=into) as aside:
            folders = {False: Path(aside) / TRAIN, True: Path(aside) / VALIDATION}
            totals = divide(whole, held_out, folders)
            stores = {}
            for is_held_out, name in ((False, TRAIN), (True, VALIDATION)):
                shutil.rmtree(into / name)
                digest = merge([folders[is_held_out]], into / name, self._report_merging)
                stores[name] = {"fingerprint": digest, "totals": totals[is_held_out]}
        return stores

    def _report_merging(self) -> None:
        self.reporter.progress("data   merging the parts")

    def _description(self, done: list[TaskResult], merged: Path) -> Json:
        """Return counts and problems of all parts, and the duplicates among the merged samples."""
        rows: Counter[tuple[int, str]] = Counter()
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        unused: dict[int, dict[str, None]] = {}
        for result in done:
            for number, names in result.unused:
                unused.setdefault(number, {}).update(dict.fromkeys(names))
            counts.update(result.counts)
            for key, places in result.examples.items():
                examples[key] = [*examples.get(key, []), *places][:EXAMPLES]
            for number, format, n in result.rows:
                rows[number, format] += n
        problems = [problem for result in done for problem in result.problems][:SHOWN]
        if bad := sum(result.bad_rows for result in done):
            counts["unreadable"] = bad
            examples["unreadable"] = [problem.what for problem in problems[:EXAMPLES]]
        train = TokenStore(merged / TRAIN, "", files=self.component.files)
        firsts, digests = group_digests(train)
        order = np.argsort(digests, kind="stable")
        alike = digests[order[1:]] == digests[order[:-1]]
        if len(again := firsts[np.sort(order[1:][alike])]):
            counts["duplicate"] = len(again)
            examples["duplicate"] = [train.where(i) for i in again[:EXAMPLES].tolist()]
        return {
            "files": self.component.files,
            "rows": [[number, format, n] for (number, format), n in sorted(rows.items())],
            "unused": [[number, list(names)] for number, names in sorted(unused.items())],
            "problems": [{"what": each.what, "why": each.reason} for each in problems],
            "counts": dict(counts),
            "examples": examples,
        }

    def _refuse(self, meta: Json) -> None:
        """Raise UserError because no token is supervised, with an account of all rows."""
        key, name, data = self.component.key, self.component.name, self.options.data
        path = data.path if key == "data.path" else data.validation
        which = f" of {name}" if name not in (TRAIN, VALIDATION, path) else ""
        answer = self.options.answer
        seq_len = self.options.seq_len + answer
        findings = list_findings(meta["counts"], meta["examples"], 0, 0, seq_len, answer)
        lines = [f"no token{which} is supervised: there is nothing to learn"]
        if answer:
            lines = [f"no prompt{which} can be answered"]
        lines += [*self._lines(meta, {}), *map(str, findings)]
        raise UserError("the data cannot be used", f"{key}={path}", "\n".join(lines))

    def _unused_lines(self, meta: Json) -> list[str]:
        """Return one line for each set of unused columns, with the files that have them.

        Prompts have no unused columns: rewards receive all of them.
        """
        if self.options.kind == PROMPTS:
            return []
        by_names: dict[str, list[int]] = {}
        for number, names in meta["unused"]:
            by_names.setdefault(", ".join(names), []).append(number)
        return [
            f"{self._files_called(numbers)}: columns not used: {names}"
            for names, numbers in by_names.items()
        ]

    def _files_called(self, numbers: list[int]) -> str:
        return self.component.files[numbers[0]] if len(numbers) == 1 else f"{len(numbers):,} files"

    def _lines(self, meta: Json, renamed: dict[str, str]) -> list[str]:
        """Return lines about the data for people, with the current names of the files."""
        by_format: dict[str, list[tuple[int, int]]] = {}
        for number, format, rows in meta["rows"]:
            by_format.setdefault(format, []).append((number, rows))
        lines = []
        for format, amounts in by_format.items():
            files = self._files_called([number for number, _ in amounts])
            lines.append(f"{files}: {counted(sum(rows for _, rows in amounts), 'row')}, {format}")
        if bad := meta["counts"].get("unreadable"):
            skipped = self.folder / SKIPPED
            listed = f", listed in {skipped}" if skipped.exists() else ""
            lines.append(f"skipped {counted(bad, 'row')} that cannot be read{listed}:")
            lines += [
                f"    {_renamed(problem['what'], renamed)}  {problem['why'].splitlines()[0]}"
                for problem in meta["problems"]
            ]
        return lines


class Pace:
    """The line that shows progress and the remaining time.

    total: bytes of all files. before: bytes of the parts that an earlier process had finished.
    """

    def __init__(self, total: float, before: float, reporter: Reporter):
        self.total, self.done, self.before, self.reporter = total, before, before, reporter
        self.rows = self.tokens = 0
        self.began = time.monotonic()

    def tick(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        self.reporter.progress(str(self))

    def finished(self, size: float) -> None:
        """Add the size of a finished task in bytes."""
        self.done += size
        self.reporter.progress(str(self))

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-3)
        size = f"{self.total / 2**20:.1f} MiB"
        if self.total >= 2**30:
            size = f"{self.total / 2**30:,.1f} GiB"
        parts = [
            f"{self.rows:,} rows",
            f"{short(self.tokens)} tokens",
            f"{short(self.tokens / seconds)} tok/s",
            f"{self.done / max(1.0, self.total):.0%} of {size}",
        ]
        if self.done > self.before:
            remaining = seconds * (self.total - self.done) / (self.done - self.before)
            parts.append(f"eta {duration(remaining)}")
        return "data   " + "  ".join(parts)


def _last_of_file(tasks: list[Task], i: int) -> int:
    file = tasks[i][-1].number
    return max(k for k in range(i, len(tasks)) if tasks[k][0].number <= file)


def _renamed(where: str, renamed: dict[str, str]) -> str:
    """Return FILE:LINE with the current name of the file."""
    file, _, line = where.rpartition(":")
    return f"{renamed.get(file, file)}:{line}"


def read_complete(folder: Path, say: Callable[[str], None] = nothing) -> Json | None:
    """Return the description of a folder's stores; None if they are missing or incomplete."""
    if not folder.exists():
        return None
    try:
        return read_meta(folder)
    except Damaged as error:
        say(f"data   the cache is damaged and will be rebuilt: {error}")
        return None


def commit(aside: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    try:
        os.replace(aside, folder)
    except OSError:
        if not read_complete(folder):  # otherwise another run was faster and wrote the same content
            raise
