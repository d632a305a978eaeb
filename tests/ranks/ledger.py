"""Small runs that are executed once, whoever asks first, and asked by many tests.

A test that needs some finished run, and changes nothing in its folder, asks for one by its name in
`named_runs.py`, or by its own words:

    run = ledger.run("pipeline")                                # a name
    run = ledger.run(words=["optim=lion", "train.steps=2"], ranks=2)
    run = ledger.copy("plain", tmp_path / "run")                # to resume, change or damage it

Results lie in build/ledger/DIGEST, where DIGEST is that of all sources a run depends on. Processes
of one pytest run and later pytest runs share them; a changed source begins a new folder.
"""

import contextlib
import fcntl
import hashlib
import os
import pickle
import re
import shutil
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import recorded_step
from heads import write_classes, write_even, write_queries, write_tags
from named_runs import ROW, RUNS, NamedRun
from pairs import write_labelled, write_pairs
from world import SMALL, Run, split, write_chats, write_lines

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "fsdp_trainer", "conf", "recipes", "hydra_plugins", "tests/ranks/ledger.py",
    "tests/ranks/world.py", "tests/inputs/pairs.py", "tests/inputs/heads.py", "tests/inputs/rows",
    "tests/measures/recorded_step.py",
]  # fmt: skip
"""Files, and folders of files, that decide a run's results beside its words."""
BASE = [*SMALL, "tokenizer.path=demo:bytes", "launch.device=cpu"]
ROWS = 96
"""Documents of rows.jsonl, each of which fills a row of ROW tokens."""


@dataclass
class LedgerRun(Run):
    """A finished run that others read too. words: its overrides, without BASE and its place."""

    words: tuple[str, ...] = ()
    size: int = 1
    """Its number of ranks."""

    @cached_property
    def steps(self):
        """Return the collectives, the peak and the work of each rank in its second step."""
        return recorded_step.recorded(self.folder.with_suffix(".step"), self.size)


class Ledger:
    """Executes runs once, in this process's pool of ranks, and returns them."""

    def __init__(self, world, folder=None):
        self.world = world
        self.folder = folder or ROOT / "build/ledger" / digest_of_sources()
        self.data = self.folder / "data"
        with self.once("data") as is_done:
            if not is_done():
                forget_others(self.folder)
                write_data(self.data)

    def run(self, name="", *, words=(), ranks=1):
        """Return a run by its name in RUNS, or by its words and ranks.

        DATA in a word is the folder of data. Raises AssertionError if the run fails.
        """
        return self.execute(RUNS[name] if name else NamedRun(ranks, tuple(split(words))))

    def copy(self, name, folder):
        """Return a copy of a run, as its own folder, which the caller may change."""
        shutil.copytree(self.run(name).folder, folder)
        return Run(folder)

    def words_of(self, one):
        """Return all overrides of a run but its place."""
        is_from_folder = any(word.startswith("model.init_from") for word in one.words)
        base = [word for word in BASE if not (is_from_folder and word.startswith("model"))]
        given = " ".join(one.words)
        data = "" if "data.path" in given else "data=pretrain data.path=DATA/rows.jsonl"
        words = [*base, f"data.cache={self.folder / 'cache'}", *data.split(), *one.words]
        return [self.with_places(word) for word in words]

    def with_places(self, word):
        """Return a word in which DATA and RUN(name) are folders."""
        word = re.sub(r"RUN\((.*?)\)", lambda name: str(self.run(name[1]).folder), word)
        return word.replace("DATA", str(self.data))

    def execute(self, one):
        """Return the run, which is trained if nobody has."""
        words = self.words_of(one)
        folder = self.folder / "runs" / key_of(one, words)
        with self.once(f"runs/{folder.name}") as is_done:
            if not is_done():
                shutil.rmtree(folder, ignore_errors=True)
                self.train(one, words, folder)
        run = LedgerRun(folder, words=one.words, size=one.ranks)
        run.ranks = pickle.loads(folder.with_suffix(".ranks").read_bytes())
        return run

    def train(self, one, words, folder):
        """Train a run into its folder, and record its second step if it says so."""
        seam = None
        if one.records:
            limits = {}
            for kind in self.comparison(one).rehearsal.kinds:
                # gloo's threads hold what a pipeline passes on for a while after it has arrived
                limits[kind.kind.rank] = 1.01 * kind.peak + recorded_step.passed(kind.step)
            seam = recorded_step.recording(folder.with_suffix(".step"), limits)
        run = self.world.train(folder, *words, ranks=one.ranks, seam=seam, base=[])
        folder.with_suffix(".ranks").write_bytes(pickle.dumps(run.ranks))

    def comparison(self, one):
        """Return the rehearsal and the plan of a run, on a CPU and as many fake ranks."""
        one = RUNS[one] if isinstance(one, str) else one
        words = self.words_of(one)
        file = self.folder / "rehearsals" / key_of(one, words)
        with self.once(f"rehearsals/{file.name}") as is_done:
            if not is_done():
                file.parent.mkdir(exist_ok=True)
                compared = recorded_step.rehearsal_of(words, one.ranks)
                file.write_bytes(pickle.dumps(compared))
        return pickle.loads(file.read_bytes())

    @contextlib.contextmanager
    def once(self, name):
        """Hold a lock on `name`; yield a function that returns True if it was done before.

        It counts as done when the block ends without an exception.
        """
        lock = self.folder / "locks" / name.replace("/", "-")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield lambda: lock.stat().st_size > 0
            if not lock.stat().st_size:
                file.write("done")


def key_of(one, words):
    """Return the name of a run's files. words: its overrides, with the folders of other runs."""
    return hashlib.sha256(repr((one, words)).encode()).hexdigest()[:16]


def write_data(folder):
    """Write the data that words of runs name: DATA/chats.jsonl and the others."""
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "chats.jsonl", 100)
    write_pairs(folder / "pairs.jsonl", 40)
    write_labelled(folder / "labelled.jsonl", 40)
    write_classes(folder)
    write_tags(folder)
    write_queries(folder)
    write_even(folder)
    rows = [
        {"text": "".join(chr(97 + (i * j * j + i) % 26) for j in range(ROW - 1))}
        for i in range(ROWS)
    ]
    write_lines(folder / "rows.jsonl", rows)


def forget_others(folder):
    """Delete the results of other sources, but for those of the last two."""
    others = sorted(folder.parent.glob("*/"), key=os.path.getmtime)
    for other in others[:-3]:
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


@cache
def digest_of_sources():
    """Return the digest of all files that decide what a run computes, and of torch's version."""
    digest = hashlib.sha256(f"{version('torch')} {ROOT}".encode())
    for source in SOURCES:
        files = [ROOT / source, *sorted((ROOT / source).rglob("*"))]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
