"""Answers of `plan`, stored by what they depend on. Imports no torch."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import fsdp_trainer
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.devices import has_gpus
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.extensions import IMPORTS
from fsdp_trainer.version import __version__

MOST_FILES = 200
"""Answers that stay; the oldest are deleted."""
READ = attrgetter("model", "tokenizer", "objective", "adapter", "launch.hosts")
"""The parts of a configuration that name files which a plan reads."""
PACKAGES = ("torch", "transformers", "torchao", "flash-linear-attention")
"""Packages that a rehearsal runs, or that decide whether it can run."""
FEW = 50
"""Files of a folder, such as a model's, whose changes are noticed."""


class Store:
    """A folder of answers. One that cannot be read or written is as good as an empty one."""

    def __init__(self, cfg: PlanConfig):
        self.folder = Path(cfg.run.root) / ".data" / "plan"
        self._failed = False
        files = {*states_of_files(READ(cfg)), *states_of_imports()}
        self._depends = [sources(), [installed(name) for name in PACKAGES], sorted(files)]

    def get(self, key: Any, make: Callable[[], Json]) -> Json:
        file = self.file(key)
        answer = self.stored(file)
        if answer is None:
            answer = make()
            self.write(file, answer)
        return answer

    def distrust(self) -> None:
        """Do not store what is printed: a rehearsal failed, and the next one may succeed."""
        self._failed = True

    def file(self, key: Any) -> Path:
        text = json.dumps([key, self._depends])
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def stored(self, file: Path) -> Json | None:
        with contextlib.suppress(OSError, ValueError):
            held = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(held, dict) and held.get("file") == file.name:
                return held.get("answer")
        return None

    def write(self, file: Path, answer: Json) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"file": file.name, "answer": answer}), encoding="utf-8")
            part.replace(file)
            files = sorted(self.folder.glob("*.json"), key=os.path.getmtime)
            for old in files[:-MOST_FILES]:
                old.unlink()

    def printed(self, cfg: PlanConfig, run: Callable[[], int]) -> int:
        is_quick = not (cfg.plan.rehearse or cfg.plan.table)
        is_of_this_machine = not (cfg.plan.gpu or cfg.plan.memory_gib)  # whose memory changes
        counts_gpus = cfg.plan.world_size is None and has_gpus(cfg.launch)
        if is_quick or is_of_this_machine or counts_gpus:
            return run()

        def record() -> Json:
            with contextlib.redirect_stdout(PrintedLater(sys.stdout.isatty())) as out:
                code = run()
            return {"code": code, "text": out.getvalue()}

        looks = [sys.stdout.isatty(), shutil.get_terminal_size().columns]
        looks += [os.environ.get(name, "") for name in ("NO_COLOR", "TERM", "COLUMNS")]
        file = self.file(["printed", repr(cfg), looks])
        answer = self.stored(file)
        if answer is None:
            answer = record()
            if not self._failed:
                self.write(file, answer)
        sys.stdout.write(answer["text"])
        return answer["code"]


class PrintedLater(io.StringIO):
    """Text that is printed later, in colour if it is for a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@cache
def sources() -> str:
    """Return the digest of the version and of all files of the package, by sizes and times."""
    root = Path(fsdp_trainer.__file__).parent
    folders = [folder for folder in (root, root.parent / "conf") if folder.is_dir()]
    names = (file for folder in folders for file in folder.rglob("*"))
    files = sorted(file for file in names if file.suffix in (".py", ".yaml", ".jinja"))
    # the version, too: images of containers may give all files the same time
    lines = [__version__, *map(state, files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@cache
def installed(package: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


def state(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        info = file.stat()
        return f"{file} {info.st_size} {info.st_mtime_ns}"
    return str(file)


def states_of_imports() -> Iterator[str]:
    """Yield the states of the user's own modules, whose objective a rehearsal may run."""
    for name in os.environ.get(IMPORTS, "").split(","):
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield state(Path(file))


def states_of_files(value: Any) -> Iterator[str]:
    if is_dataclass(value):
        for each in fields(value):
            yield from states_of_files(getattr(value, each.name))
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from states_of_files(one)
    elif isinstance(value, str) and value:
        with contextlib.suppress(OSError, ValueError):
            # of a run its newest checkpoint, of an adapter its base
            for path in {Path(value).expanduser().absolute(), model_folder(value).absolute()}:
                inside = sorted(path.iterdir())[:FEW] if path.is_dir() else []
                yield from map(state, (path, *inside) if path.exists() else ())
