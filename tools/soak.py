"""`make soak MINUTES=10 SEED=0`: runs of every method and layout, broken at random.

Each episode takes one training of tools/same.py or MORE, starts it as a user would, and disturbs
it: ranks are killed, stopped and signalled, disks fill up, files are damaged, a second start
competes, another layout takes over. The same command is given until it ends with exit code 0. Then
metrics, weights and what lies on the disk are compared with a run that nothing disturbed.

Everything in episode N follows from the number N: SEED=N begins with that episode. Faults wait for
a condition (a phase of a step on a rank, a file, an event), so that the speed of the machine hardly
matters.
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/ranks"))

from same import RUNS, SMALL, TIMES, write_data
from soak_faults import (
    DAMAGE,
    EVERY,
    INSIDE,
    OUTSIDE,
    QUIET,
    Done,
    Outside,
    inside_fault,
    read_safely,
    watched_launch,
)
from world import alive, read_lines, write_lines

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8
KEEP = 2
"""Newest checkpoints that stay."""
PATIENCE = 240.0
"""Seconds for one start of a run; one that takes longer hangs."""
STREAMED = "data.streaming=true data.workers=1"
TEXTS = "data=pretrain data.path=texts.jsonl"
MORE = {
    "streamed 2": STREAMED,
    "streamed texts 1": f"{TEXTS} {STREAMED}",
    "texts 2": TEXTS,
    "mixture 2": "data.path=[{path:chats.jsonl,weight:2},{path:more.jsonl,weight:1}]",
    "best 2": "data.validation=0.2 train.validate_every=2 checkpoint.best=true",
    "unsharded 2": "sharding.accumulate=unsharded",
    "offload 2": "sharding.cpu_offload=true",
    "lion 2": "optim=lion",
    "sgd 2": "optim=sgd",
    "lamb 2": "optim=lamb",
    "normuon tensor 2": "optim=normuon sharding.tensor=2",
    "adamw_bf16 2": "optim=adamw_bf16",
    "8-bit 2": "optim=adamw_8bit",
    "fp16 2": "precision=fp16",
    "freeze 2": "train.freeze=[model.embed_tokens.*]",
    "qlora 2": "adapter=qlora",
    "merged lora 2": "adapter=lora checkpoint.merge=true",
}
"""Trainings beside those of tools/same.py: overrides by a name that ends in the number of ranks."""
TRAININGS = RUNS | {name: (int(name[-1]), words.split()) for name, words in MORE.items()}
LAYOUTS = [(1, []), (2, []), (2, ["sharding.strategy=ddp"]), (2, ["sharding.tensor=2"])]
"""Other worlds and layouts that a run may have at its next attempt."""
ROUNDED = {"bf16": 0.05, "fp16": 0.05, "8-bit": 0.05, "adamw_bf16": 0.05, "grpo": 0.05}
"""Largest relative difference of a loss after a change of the layout, by a word of the name."""
EXACT = 1e-3
"""The same for all other trainings, in float32."""
LEFTOVERS = ("*.partial", "*.tmp", "*.replaced", ".hf*", ".adapter*", "tmp-*")


@dataclass
class Episode:
    """One disturbed run and what became of it. exact: its ranks were arranged the same each time.

    problems: what differs from the undisturbed run; none if all is well.
    """

    number: int
    name: str
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    exact: bool = True
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        """Return a line about it."""
        result = "; ".join(self.problems) or ("equal" if self.exact else "equal but for rounding")
        faults = ", ".join(self.faults) or "none"
        return (
            f"{self.number:4}  {self.name:20}  {self.starts} starts {self.seconds:4.0f} s  "
            f"{faults}  →  {result}"
        )


class Soak:
    """A folder with data, undisturbed runs by training, and disturbed ones."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_data(folder)
        texts = [{"text": f"{i:04d}" + "x" * (i * i % 150)} for i in range(80)]
        more = [{"prompt": "z" * (1 + i % 5), "completion": f"{i}?"} for i in range(40)]
        for name, rows in (("texts", texts), ("more", more)):
            write_lines(folder / f"{name}.jsonl", rows)
        self.whole: dict[str, dict[str, Any]] = {}

    def words(self, name: str, run: str, layout: tuple[int, list[str]] | None = None) -> list[str]:
        """Return the command line of a training into runs/RUN. layout: another one, or None."""
        ranks, overrides = TRAININGS[name]
        if layout:
            ranks, sharding = layout
            overrides = [*(o for o in overrides if not o.startswith("sharding.")), *sharding]
        places = ["data.path=chats.jsonl", f"data.cache=cache-{run}", f"run.name={run}"]
        own = [
            f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"checkpoint.keep={KEEP}",
            "launch.watchdog=true", "launch.timeout=60s", f"launch.nproc_per_node={ranks}",
        ]  # fmt: skip
        keys = {word.partition("=")[0] for word in [*overrides, *own]}
        first = [word for word in [*SMALL, *places] if word.partition("=")[0] not in keys]
        return ["train", *first, *own, *overrides]

    def prepare(self) -> None:
        """Make the teacher of distillation."""
        words = [*self.words("sft 1", "teacher"), "model.hidden_size=16", "run.seed=7"]
        done = watched_launch(words, self.folder, PATIENCE, "teacher", 1)
        assert done.code == 0, done.text
        (self.folder / "runs/teacher/hf").rename(self.folder / "teacher")

    def undisturbed(self, name: str, mode: str) -> dict[str, Any]:
        """Return the end of a training that nothing disturbs, made at the first call."""
        if name not in self.whole:
            words = [*self.words(name, "whole"), f"checkpoint={mode}"]
            done = watched_launch(words, self.folder, PATIENCE, "whole", TRAININGS[name][0])
            if done.code:
                raise Unexpected(f"{name} fails undisturbed\n{done.text}")
            self.whole[name] = end_of(self.folder / "runs/whole")
            self.clear("whole")
        return self.whole[name]

    def clear(self, run: str) -> None:
        """Delete all files of a run."""
        for folder in (f"runs/{run}", f"cache-{run}", f"faults-{run}", f"tmp-{run}"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def episode(self, number: int) -> Episode:
        """Do one episode. Its files are kept if anything differs."""
        draw = random.Random(number)
        order = sorted(TRAININGS)
        random.Random(number // len(order)).shuffle(order)
        episode = Episode(number, order[number % len(order)])
        mode = draw.choice(["sync", "async"])
        run = Disturbed(self, episode, draw, mode)
        began = time.monotonic()
        try:
            whole = self.undisturbed(episode.name, mode)
            began = time.monotonic()
            run.disturb()
            tolerance = None if episode.exact else tolerance_of(episode.name)
            episode.problems += differences(whole, end_of(run.folder), tolerance)
            episode.problems += leftovers(self.folder, run.name)
            episode.problems += [f"left {file}" for file in shared_memory(run.pids)]
        except (Unexpected, ValueError) as error:  # ValueError: a record that is no JSON
            episode.problems.append(str(error))
        episode.seconds = time.monotonic() - began
        if not episode.problems:
            self.clear(run.name)
        return episode


class Unexpected(Exception):
    """A start ended as none should: with a traceback, a wrong exit code, or not at all."""


class Disturbed:
    """The run of one episode, with the random choices of its faults."""

    def __init__(self, soak: Soak, episode: Episode, draw: random.Random, mode: str):
        self.soak, self.episode, self.draw = soak, episode, draw
        self.mode = [f"checkpoint={mode}"]
        self.name = f"episode-{episode.number}"
        self.folder = soak.folder / "runs" / self.name
        self.cache = soak.folder / f"cache-{self.name}"
        self.pids: set[int] = set()
        """Process ids of all ranks so far."""

    def disturb(self) -> None:
        """Start the run one to three times, each time with faults, then without until it ends.

        Raises Unexpected.
        """
        for _ in range(self.draw.randint(1, 3)):
            if self.episode.starts > 0:
                self.damage()
            layout = None
            if self.episode.starts > 0 and self.draw.random() < 0.3:
                layout = self.draw.choice(LAYOUTS)
            done = self.start(layout, armed=True)
            if done.code == 0:
                return
        self.end()

    def damage(self) -> None:
        """Perhaps damage a file between two starts."""
        if self.draw.random() >= 0.5:
            return
        kind = self.draw.choice(sorted(DAMAGE))
        if description := DAMAGE[kind](self.folder, self.cache, self.draw):
            self.episode.faults.append(kind)
            self.log(f"{kind}: {description}")

    def start(self, layout: Any, armed: bool) -> Done:
        """Start the command once, with faults if `armed`. Raises Unexpected."""
        newest = len(read_safely(self.folder / "metrics.jsonl"))
        ranks = (layout or TRAININGS[self.episode.name])[0]
        inside, outside = self.choose(newest, ranks) if armed else ([], [])
        words = [*self.soak.words(self.episode.name, self.name, layout), *self.mode]
        if layout:
            self.log(f"another layout: {layout}")
        notes = self.soak.folder / f"faults-{self.name}"
        done = watched_launch(
            words, self.soak.folder, PATIENCE, self.name, ranks, inside, outside,
            notes / str(self.episode.starts),
        )  # fmt: skip
        self.pids |= done.pids
        self.episode.starts += 1
        self.log(
            f"start {self.episode.starts}: exit code {done.code}, {inside} {outside}\n{done.text}"
        )
        names = [*done.names]
        refused = layout and done.code == 2 and not names
        if layout and not refused:
            names.append("another layout")
            self.episode.exact = False
        self.episode.faults += names
        if not refused:
            self.check(done, names)
        return done

    def choose(self, newest: int, ranks: int) -> tuple[list[tuple[str, str]], list[Outside]]:
        """Return the faults of a start, inside ranks and from outside: one that ends it, and
        perhaps a quiet one before.

        newest: the last step on record.
        """
        every = [*INSIDE, *OUTSIDE]
        names = [self.draw.choice([name for name in every if name not in QUIET])]
        if self.draw.random() < 0.5:
            names.append(self.draw.choice(QUIET))
        method = self.episode.name.split()[0]
        inside = [
            inside_fault(self.draw, name, newest, ranks, STEPS, method)
            for name in names
            if name in INSIDE
        ]
        outside = [Outside.draw(self.draw, name, newest) for name in names if name in OUTSIDE]
        return inside, outside

    def check(self, done: Done, names: list[str]) -> None:
        """Raise Unexpected if a start did not end as it may after its faults."""
        log = f"{self.soak.folder}/faults-{self.name}/log"
        if done.code is None:
            raise Unexpected(f"start {self.episode.starts} hangs, see {log}")
        if "Traceback (most recent call last)" in done.text:
            raise Unexpected(f"start {self.episode.starts} prints a traceback, see {log}")
        allowed = {0, 1} if names else {0}
        signals = [name for name in names if name.startswith("SIG")]
        allowed |= {75} if signals else set()
        allowed |= {130, 138, 143} if len(signals) > 1 else set()
        if any("killed" in name for name in names):
            allowed.add(-9)  # of the launcher, or of a process that trains alone
        if done.code not in allowed:
            raise Unexpected(f"start {self.episode.starts} has exit code {done.code}, see {log}")
        if done.code == 1 and not done.text.strip():
            raise Unexpected(f"start {self.episode.starts} fails without a word, see {log}")

    def end(self) -> None:
        """Give the same command, without faults, until it ends. Raises Unexpected."""
        for _ in range(3):
            if self.start(None, armed=False).code == 0:
                return
        raise Unexpected("does not end")

    def log(self, text: str) -> None:
        """Append a text to the episode's log."""
        file = self.soak.folder / f"faults-{self.name}" / "log"
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as opened:
            opened.write(f"{text}\n")


def end_of(run: Path) -> dict[str, Any]:
    """Return what must be the same at the end of two runs."""
    lines = read_lines(run / "metrics.jsonl")
    files = [path for path in sorted(run.glob("*/*")) if path.suffix == ".safetensors"]
    events = read_lines(run / "events.jsonl")
    best = run / "checkpoints/best"
    return {
        "metrics": [{k: v for k, v in line.items() if not TIMES.search(k)} for line in lines],
        "files": {
            str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in files
        },
        "checkpoints": sorted(path.name for path in (run / "checkpoints").glob("step-*[0-9]")),
        "best": os.readlink(best) if best.is_symlink() else None,
        "end": [events[-1].get(key) for key in ("event", "exit_code")],
    }


def tolerance_of(name: str) -> float:
    """Return the largest relative difference of a loss after a change of the layout."""
    return next((value for word, value in ROUNDED.items() if word in name.split()), EXACT)


def differences(whole: dict[str, Any], run: dict[str, Any], tolerance: float | None) -> list[str]:
    """Return how the end of a run differs from an undisturbed one.

    tolerance: of losses after a change of the layout; None: all must be equal.
    """
    steps = [line["step"] for line in run["metrics"]]
    if steps != [line["step"] for line in whole["metrics"]]:
        return [f"steps {steps}"]
    if run["end"] != ["end", 0]:
        return [f"the last event is {run['end']}"]
    if tolerance is None:
        pairs = zip(whole["metrics"], run["metrics"], strict=True)
        other = [f"step {a['step']}: {a} → {b}" for a, b in pairs if a != b]
        other += [key for key in ("files", "best") if whole[key] != run[key]]
        other += ["checkpoints"] if run["checkpoints"] != checkpoints_due(whole, run) else []
        return [f"differ: {'; '.join(other)}"] if other else []
    problems = [] if whole["files"].keys() == run["files"].keys() else ["other files are exported"]
    for a, b in zip(whole["metrics"], run["metrics"], strict=True):
        loss = next(key for key in ("objective", "loss") if key in a)
        if abs(a[loss] - b[loss]) > tolerance * max(1.0, abs(a[loss])):
            problems.append(f"step {a['step']}: {loss} {a[loss]} → {b[loss]}")
    return problems


def checkpoints_due(whole: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return the undisturbed run's checkpoints, with those that a stop saved between two of them.

    The newest ones stay, and the best.
    """
    at_a_stop = [name for name in run["checkpoints"] if int(name.rpartition("-")[2]) % EVERY]
    newest = sorted({*whole["checkpoints"], *at_a_stop})[-KEEP:]
    return sorted({*newest, *filter(None, [whole["best"]])})


def shared_memory(pids: set[int]) -> list[str]:
    """Return the files of ranks in shared memory that a watchdog has not deleted in 10 s."""
    deadline = time.monotonic() + 10
    while True:
        files = [path for pid in pids for path in Path("/dev/shm").glob(f"fsdp_trainer-{pid}-*")]
        if not files or time.monotonic() > deadline:
            return sorted(map(str, files))
        time.sleep(0.2)


def leftovers(folder: Path, run: str) -> list[str]:
    """Return what a finished run should not have left: temporary files, and processes."""
    paths = [
        path
        for place in (f"runs/{run}", f"cache-{run}")
        for pattern in LEFTOVERS
        for path in (folder / place).rglob(pattern)
    ]
    temporary = (folder / f"tmp-{run}").glob("*")
    paths += (path for path in temporary if not path.name.startswith("torchinductor_"))
    processes = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"run.name={run}".encode() in words.split(b"\0") and alive(pid):
            processes.append(f"process {pid} stays")
    return [f"left {path.relative_to(folder)}" for path in paths] + processes


def table(episodes: list[Episode]) -> str:
    """Return a table of the faults, and a summary."""
    counts = Counter(fault for episode in episodes for fault in episode.faults)
    lines = ["| fault | times |", "|---|---|"]
    lines += [f"| {fault} | {count} |" for fault, count in sorted(counts.items())]
    bad = [episode for episode in episodes if episode.problems]
    lines += [
        "",
        f"{len(episodes)} episodes of {len({e.name for e in episodes})} trainings, "
        f"{counts.total()} faults, {sum(e.starts for e in episodes)} starts; "
        f"{sum(not e.exact for e in episodes)} with another layout on the way; "
        f"{len(bad)} differ from the undisturbed run",
        *(f"again:  make soak MINUTES=0 SEED={episode.number}" for episode in bad),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    soak, episodes = Soak(ROOT / "build" / "soak"), []
    deadline = time.monotonic() + 60 * given.minutes
    try:
        soak.prepare()
        while not episodes or time.monotonic() < deadline:
            episodes.append(soak.episode(given.seed + len(episodes)))
            print(episodes[-1].line(), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(f"\n{table(episodes)}")
    return 1 if any(episode.problems for episode in episodes) else 0


if __name__ == "__main__":
    sys.exit(main())
