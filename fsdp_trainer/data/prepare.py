"""The cache: what `data` names is tokenised once, into a folder that is named by all that decides it, and found there by every run."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.config.data_files import entries, is_mixture
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.sources import Source, content_hash, find_sources
from fsdp_trainer.data.store import TokenStore, merge, read_meta, write_meta
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenise import TRAIN, VALIDATION, Done, How, Task, tokenise
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError

CODE_VERSION = 5

Progress = Callable[[int, int], None]
"""Called with (rows read, tokens written) so far."""


@dataclass
class Prepared:
    """What `prepare` finds or leaves behind."""

    train: list[TokenStore]
    """One for each component: of a mixture each of its entries, else everything together."""
    names: list[str]
    """Of the components."""
    validation: TokenStore | None
    report: list[str]
    """Short lines for people."""

    @property
    def fingerprint(self) -> str:
        """Of all samples, those held out too."""
        stores = [*self.train, *([self.validation] if self.validation else [])]
        return "-".join(store.fingerprint for store in stores)


@dataclass
class Component:
    """What is tokenised, packed and ordered by itself. share: of its rows, held out for validation; key: the one that names it."""

    name: str
    sources: list[Source]
    share: float = 0.0
    key: str = "data.path"

    @property
    def files(self) -> list[str]:
        """Of all sources, in order."""
        return [file for source in self.sources for file in source.files]


def components(data: Data) -> tuple[list[Component], Component | None]:
    """What `data` trains on, and what it names to be validated on. UserError if there is nothing there."""
    sources, named = find_sources(data.path, "data.path"), entries(data.path)
    share = data.validation if isinstance(data.validation, int | float) else 0.0
    if is_mixture(data.path) and len(named) > 1:
        train = [Component(source.name, [source], share) for source in sources]
    else:
        train = [Component(named[0].name or TRAIN, sources, share)]
    if data.validation is None or share:
        return train, None
    return train, Component(VALIDATION, find_sources(data.validation, "data.validation"), key="data.validation")


def prepare(
    data: Data, batch: Batch, tokenizer: TextTokenizer, template: Template, root: Path, progress: Progress | None = None
) -> Prepared:
    """Tokenise what `data` names into folders of `root`, unless that is there already. UserError if the data cannot be used."""
    train, apart = components(data)
    how = How(data, batch.seq_len, 0.0, tokenizer, template)
    made = [Preparation(component, replace(how, share=component.share), Path(root), progress).run() for component in train]
    validation, report = None, [line for one in made for line in one.report]
    if apart:
        held_out = Preparation(apart, how, Path(root), progress).run()
        validation, report = held_out.stores[TRAIN], report + held_out.report
    elif train[0].share:
        validation = _together(made, Path(root))
        if not len(validation):
            why = "the share is so small that no sample is in it"
            raise UserError("the data cannot be used", [Problem(f"data.validation={data.validation}", why)])
    return Prepared([one.stores[TRAIN] for one in made], [component.name for component in train], validation, report)


def _together(made: list["Preparation"], root: Path) -> TokenStore:
    """What the components hold out, as one store."""
    stores = [one.stores[VALIDATION] for one in made]
    if len(made) == 1:
        return stores[0]
    key = hashlib.blake2b("/".join(one.folder.name for one in made).encode(), digest_size=10).hexdigest()
    if not (root / key / "meta.json").exists():
        with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=root, ignore_cleanup_errors=True) as aside:
            whole = Path(aside) / "whole"
            whole.mkdir()
            about = merge([store.folder for store in stores], whole / VALIDATION, lambda: None, use_up=False)
            places = np.cumsum([0, *(len(one.component.files) for one in made)])
            np.concatenate([np.full(len(store), i, np.int32) for i, store in enumerate(stores)]).tofile(whole / VALIDATION / "sources.bin")
            np.concatenate([store.files + np.int32(at) for store, at in zip(stores, places, strict=False)]).tofile(
                whole / VALIDATION / "files.bin"
            )
            write_meta(whole, {"stores": {VALIDATION: about}})
            _commit(whole, root / key)
    files = [file for one in made for file in one.component.files]
    about = read_meta(root / key)["stores"][VALIDATION]
    return TokenStore(root / key / VALIDATION, about["fingerprint"], [one.component.name for one in made], files)


class Preparation:
    """One component's stores: opened, after they have been made if they are not there."""

    def __init__(self, component: Component, how: How, root: Path, progress: Progress | None):
        self.component, self.how, self.root = component, how, root
        self.progress = progress or (lambda rows, tokens: None)
        self.rows = self.tokens = 0
        self.report: list[str] = []
        self.stores: dict[str, TokenStore] = {}
        hashes = [[source.format, source.fields, [content_hash(file) for file in source.files]] for source in component.sources]
        self.folder = root / fingerprint(hashes, how)

    def run(self) -> "Preparation":
        """Open the stores."""
        if not (self.folder / "meta.json").exists():
            self._make()
        meta = read_meta(self.folder)
        names, renamed = [source.name for source in self.component.sources], dict(zip(meta["files"], self.component.files, strict=True))
        examples = {what: [_renamed(where, renamed) for where in places] for what, places in meta["examples"].items()}
        for name, about in meta["stores"].items():
            self.stores[name] = TokenStore(self.folder / name, about["fingerprint"], names, self.component.files, meta["counts"], examples)
        self.report = self._lines(meta, renamed)
        return self

    def _make(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.root))
        except OSError as error:
            why = f"the tokenised data cannot be kept there: {error}.\nUse  data.cache=FOLDER"
            raise UserError("the data cannot be prepared", [Problem(f"data.cache={self.root}", why)]) from None
        try:
            tasks = self._tasks()
            parts = [aside / f"{i:06}" for i in range(len(tasks))]
            done = []
            for task, part in zip(tasks, parts, strict=True):
                done.append(tokenise(task, part, self.how, self._tick))
                self._raise_problems(done[-1])
            whole = aside / "whole"
            whole.mkdir()
            self._finish(tasks, done, parts, whole)
            whole.chmod(0o755)
            _commit(whole, self.folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _tick(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        self.progress(self.rows, self.tokens)

    def _tasks(self) -> list[Task]:
        data = self.how.data
        tasks: list[Task] = []
        for i, source in enumerate(self.component.sources):
            how = source.format or data.format, source.fields or data.fields
            tasks += [Task(file, i, len(tasks) + k, *how) for k, file in enumerate(source.files)]
        return tasks

    def _raise_problems(self, done: Done) -> None:
        if done.bad_rows and self.how.data.on_error == "fail":
            title = "rows of the data cannot be read. Mend them, or leave them out with  data.on_error=skip"
            raise UserError(title, done.problems)

    def _finish(self, tasks: list[Task], done: list[Done], parts: list[Path], into: Path) -> None:
        """Merge the parts, and write last of all what is known of them."""
        stores = {name: merge([part / name for part in parts], into / name, lambda: self._tick(0, 0)) for name in done[0].totals}
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        by_source: dict[str, list[Counter[str]]] = {name: [Counter() for _ in self.component.sources] for name in stores}
        files: dict[tuple[int, str], int] = {}
        for task, one in zip(tasks, done, strict=True):
            counts.update(one.counts)
            for what, places in one.examples.items():
                examples[what] = [*examples.get(what, []), *places][:3]
            files[task.number, one.format] = files.get((task.number, one.format), 0) + one.rows
            for name, totals in one.totals.items():
                at = by_source[name][task.source]
                longest = max(at["longest"], totals.get("longest", 0))
                at.update(totals)
                at["longest"] = longest
        meta = {
            "files": self.component.files,
            "rows": [[number, format, rows] for (number, format), rows in files.items()],
            "bad_rows": sum(one.bad_rows for one in done),
            "problems": [asdict(problem) for one in done for problem in one.problems][:5],
            "counts": dict(counts),
            "examples": examples,
            "notes": sorted({note for one in done for note in one.notes}),
            "stores": {name: about | {"sources": [dict(of) for of in by_source[name]]} for name, about in stores.items()},
        }
        report = self._lines(meta, {})
        if not sum(of["samples"] for of in by_source[TRAIN]):
            why = "there is nothing in it to learn:"
            path = self.how.data.path if self.component.key == "data.path" else self.how.data.validation
            raise UserError("the data cannot be used", [Problem(f"{self.component.key}={path}", "\n".join([why, *report]))])
        write_meta(into, meta)

    def _lines(self, meta: dict[str, Any], renamed: dict[str, str]) -> list[str]:
        """What people are told of it, with the files called as they are now."""
        by_format: dict[str, list[tuple[int, int]]] = {}
        for number, format, rows in meta["rows"]:
            by_format.setdefault(format, []).append((number, rows))
        lines = []
        for format, found in by_format.items():
            named = self.component.files[found[0][0]] if len(found) == 1 else f"{len(found):,} files"
            lines.append(f"{named}: {sum(rows for _, rows in found):,} rows, {format}")
        if meta["bad_rows"]:
            lines.append(f"skipped {meta['bad_rows']:,} rows that cannot be read:")
            lines += [f"    {_renamed(p['what'], renamed)}  {p['why'].splitlines()[0]}" for p in meta["problems"]]
        lines += [sentence.format(count) for sentence, count in meta["counts"].items()]
        for name, about in meta["stores"].items():
            lines += self._about(self.component.name if name == TRAIN else name, about["sources"])
        return lines + [f"note: {note}" for note in meta["notes"]]

    def _about(self, name: str, sources: list[dict[str, int]]) -> list[str]:
        """A line about a store, and one about each of several sources."""
        tokens = sum(of.get("tokens", 0) for of in sources)
        if not tokens:
            return []
        samples, learnt = (sum(of.get(what, 0) for of in sources) for what in ("samples", "supervised"))
        longest = max(of.get("longest", 0) for of in sources)
        lines = [f"{name}: {samples:,} samples, {tokens:,} tokens, {100 * learnt / tokens:.1f}% learnt, longest {longest:,}"]
        for source, of in zip(self.component.sources, sources, strict=True) if len(sources) > 1 else []:
            n, samples, learnt = (of.get(what, 0) for what in ("tokens", "samples", "supervised"))
            share = f"{100 * n / tokens:.1f}% of the tokens"
            lines.append(f"    {source.name}: {samples:,} samples, {n:,} tokens ({share}), {100 * learnt / max(1, n):.1f}% learnt")
        return lines


def _renamed(where: str, renamed: dict[str, str]) -> str:
    """FILE:LINE, with the file as it is called now."""
    file, _, line = where.rpartition(":")
    return f"{renamed.get(file, file)}:{line}"


def _commit(aside: Path, folder: Path) -> None:
    try:
        os.replace(aside, folder)
    except OSError:
        if not (folder / "meta.json").exists():  # else another run was faster, with the same content
            raise


def fingerprint(hashes: list, how: How) -> str:
    """Of all that decides a component's tokens."""
    data = how.data
    options = [data.format, data.fields, data.loss_on, data.too_long, data.on_error, how.seq_len, how.share]
    parts = [CODE_VERSION, options, hashes, how.tokenizer.fingerprint, how.template.source]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()
