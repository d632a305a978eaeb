"""Where a run goes on, and whether it may: what is trained must be what was trained."""

import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
import yaml

from fsdp_trainer.checkpoint.files import put_back, read_manifest, replaced
from fsdp_trainer.checkpoint.store import CheckpointStore, damage_anywhere, read_progress
from fsdp_trainer.config.check import show
from fsdp_trainer.config.paths import LAG_SECONDS, checkpoint_folders, find_checkpoint
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.training.progress import Progress

LOCK = ".lock"
LOCK_SECONDS = 120.0  # a rank 0 of the attempt before, on a host that was cut off, holds the lock until its torchrun gives up
COMPARED = ("model", "data", "tokenizer", "batch", "loss", "optim", "schedule")
# How something is read or computed, not what; the data's and the tokenizer's content is in the fingerprint.
FREE = {
    "data.cache",
    "data.pad_to_multiple",
    "data.path",
    "data.prefetch",
    "data.validation",
    "data.workers",
    "loss.chunk_mib",
    "model.attention",
    "model.attention_kernel",
    "optim.implementation",
    "tokenizer.path",
}
OLDER = "the checkpoint is from a version that named data otherwise: it may be the same"
OF_THE_RESUME = {"checkpoint.resume", "checkpoint.allow_changes", "run.overwrite"}


@dataclass
class Claim:
    """Whose a run's folder is. launchers: of all nodes, see World; attempt: how often these, or some of them, had started the run before."""

    launchers: list[str]
    attempt: int = 0

    @classmethod
    def of(cls, run: Path) -> "Claim":
        """The last one on a run's folder."""
        try:
            told = json.loads((run / LOCK).read_text())
            return cls(told["launchers"], told["attempt"])
        except (OSError, ValueError, TypeError, KeyError):
            return cls([])

    def reaches(self, run: Path, timeout: float) -> bool:
        """Whether it is seen on a run's folder here. What another node has written may come late."""
        deadline = time.monotonic() + min(LAG_SECONDS, timeout)
        while not (seen := Claim.of(run) == self) and time.monotonic() < deadline:
            time.sleep(0.1)
        return seen


def claim_folder(cfg: TrainConfig, run: Path, claim: Claim) -> TextIO:
    """Make the run's folder; with checkpoint.resume=never refuse or empty a used one. Rank 0's task, before anyone writes. Raises UserError.

    Returns the lock, with the claim in it. It keeps a second run out while it is open; the system lets go of it whatever ends the process.
    """
    deadline = time.monotonic() + (LOCK_SECONDS if claim.attempt else 0)
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / LOCK).open("a")  # not yet ours to empty
        while not _locked(lock, wait=time.monotonic() < deadline):
            time.sleep(0.1)
        if cfg.checkpoint.resume == "never":
            try:
                empty_folder(cfg, run)
            except BaseException:
                lock.close()  # a notebook's process lives on, and may try again
                raise
        for before in (run / "checkpoints").glob(replaced(Path("step-*")).name):
            put_back(before.with_name(before.name[1 : -len(before.suffix)]))
        lock.truncate(0)
        lock.write(json.dumps(asdict(claim) | holder()))
        lock.flush()
        os.fsync(
            lock.fileno()
        )  # NFS shows it to the other nodes, which look whether they share the folder
        return lock
    except BlockingIOError:
        raise UserError(
            "the run's folder is in use",
            [Problem(str(run), f"{who_holds(run)}. Use  run.name=NEW  or wait")],
        ) from None
    except OSError as error:
        why = f"{error}. Use  run.root=FOLDER"
        raise UserError(
            "the run's folder cannot be used", [Problem(f"run.root={cfg.run.root}", why)]
        ) from None


def holder() -> dict[str, Any]:
    """Who this process is, for those who find the folder locked."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def who_holds(run: Path) -> str:
    """What the lock says of the process that holds it."""
    try:
        told = json.loads((run / LOCK).read_text())
        return f"process {told['pid']} on {told['host']} trains in it, since {told['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # it is about to write it
        return "another process trains in it"


def _locked(lock: TextIO, wait: bool) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if wait:
            return False
        raise


def empty_folder(cfg: TrainConfig, run: Path) -> None:
    """Delete what an earlier run left, if run.overwrite allows it."""
    used = [
        path
        for path in run.iterdir()
        if path.name not in (LOCK, "jobs", "sweep.jsonl", "output.log")
    ]  # a sweep is no earlier run
    if used and not cfg.run.overwrite:
        why = "holds an earlier run. Use  run.name=NEW,  run.overwrite=true  to delete it,  or  checkpoint.resume=auto  to go on"
        raise UserError("the run's folder is in use", [Problem(str(run), why)])
    for path in used:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def find_start(cfg: TrainConfig, store: CheckpointStore, observer: Observer) -> Path | None:
    """The checkpoint to go on from: the one asked for, else the newest good one, else None. Collective.

    A path outside this run is where the run began; once it has checkpoints of its own, the same command goes on from those.
    """
    if cfg.checkpoint.resume == "never":
        return None
    if cfg.checkpoint.resume != "auto":
        asked = _asked_for(cfg.checkpoint.resume)
        if asked.resolve().is_relative_to(store.run.resolve()) or not store.listed():
            require_whole(asked)
            return asked
    good = store.newest_good(partial(tell_damaged, observer))
    if good is None and store.listed(checkpoint_folders):
        observer.console.say("no checkpoint of this run is whole: it begins anew")
    return good


def tell_damaged(observer: Observer, checkpoint: Path, found: list[Problem]) -> None:
    """On record, that a checkpoint is not gone on from."""
    observer.event("damaged", path=str(checkpoint), problems=[f"{p.what} {p.why}" for p in found])
    observer.console.say(f"{checkpoint} is damaged and left aside: {found[0].what} {found[0].why}")


def _asked_for(path: str) -> Path:
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise UserError(
            "there is no checkpoint to go on from",
            [Problem(f"checkpoint.resume={path}", "is neither a checkpoint nor a run with one")],
        )
    return checkpoint


def require_whole(checkpoint: Path) -> None:
    """Raise UserError naming the damaged files of a checkpoint. Collective: each rank looks at its part of them."""
    if problems := damage_anywhere(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)


def check_unchanged(cfg: TrainConfig, order: Mixture, checkpoint: Path) -> dict[str, list[Any]]:
    """Every key that is not as in the checkpoint, with its value then and now, the number of ranks among them.

    Raises UserError listing those that change what is trained and are not in allow_changes.
    """
    before, now = (
        _flat(yaml.safe_load((checkpoint / "config.yaml").read_text())),
        _flat(asdict(cfg)),
    )
    kept = read_progress(checkpoint)
    before["data.fingerprint"], now["data.fingerprint"] = kept["data"], order.fingerprint
    before["world_size"], now["world_size"] = (
        read_manifest(checkpoint)["world_size"],
        dist.get_world_size(),
    )
    # a key that is younger than the checkpoint had its default
    changes = {
        key: [old, new]
        for key, new in now.items()
        if (old := before.get(key, DEFAULTS.get(key))) != new and key not in OF_THE_RESUME
    }
    allowed = set(cfg.checkpoint.allow_changes)
    if "data.path" in allowed:
        allowed.add("data.fingerprint")
    refused = {
        key: change
        for key, change in changes.items()
        if (key.split(".")[0] in COMPARED or key == "run.seed")
        and key not in FREE
        and not {key, key.split(".")[0]} & allowed
    }
    if refused:
        problems = [
            Problem(f"{key}={show(new)}", f"the checkpoint was trained with {show(old)}")
            for key, (old, new) in sorted(refused.items())
        ]
        if "data.fingerprint" in refused:
            told = (
                [f"{name} {what}" for name, what, _ in becomes(order, kept["segments"]) if what]
                if kept.get("segments")
                else [OLDER]
            )
            if not order.components:
                told = [
                    "another list of files, other content, or another tokenizer: a stream begins anew with them"
                ]
            problem = next(
                problem for problem in problems if problem.what.startswith("data.fingerprint=")
            )
            problem.why = "\n".join(
                [
                    problem.why,
                    *(told or ["the same sources are in another order, or mixed otherwise"]),
                ]
            )
        ways = f"run.name=NEW  or go on all the same with  'checkpoint.allow_changes=[{','.join(sorted(refused))}]'"
        problems[-1].why += f"\nStart another run with  {ways}"
        raise UserError(f"this is not the run that {checkpoint} belongs to", problems)
    return changes


def becomes(order: Mixture, segments: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Of each component, and of those that are gone: its name, what has changed since a checkpoint, and where it goes on. Sets its start.

    segments: the checkpoint's.
    """
    gone, told = list(segments[-1]["sources"]) if segments else [], []
    left_out_before = {
        source["key"]: source for segment in segments[:-1] for source in segment["sources"]
    }
    known = []
    for c in order.components:
        known.append(next((s for s in gone if s["key"] == c.key), None))
        gone = [s for s in gone if s is not known[-1]]
    for c, before in zip(order.components, known, strict=True):
        before, c.start, c.start_tokens = before or left_out_before.get(c.key), 0, 0
        if before:
            c.start, c.start_tokens = before["rows"], before["tokens"]
            what = (
                f"was asked for {before['asked']:g}, is for {c.asked:g}"
                if before["asked"] != c.asked
                else ""
            )
            epoch, row = divmod(c.start, c.order.rows_per_epoch)
            told.append(
                (
                    c.name,
                    what,
                    f"goes on at epoch {epoch + 1}, row {row:,} of {c.order.rows_per_epoch:,}",
                )
            )
        elif before := next((s for s in gone if s["name"] == c.name), None):
            gone.remove(before)
            same = before["key"].split("/")[0] == c.key.split("/")[0]
            what = "is the same, in other rows or another order" if same else "has other content"
            told.append(
                (
                    c.name,
                    what,
                    "begins at the first row of what it is now; what was seen of it may come again",
                )
            )
        else:
            told.append((c.name, "is new", "begins at its first row"))
    return told + [
        (s["name"], "is left out", f"was seen for {s['rows'] / s['rows_per_epoch']:.2f} epochs")
        for s in gone
    ]


def take_up_data(order: Mixture, progress: Progress, fingerprint: str) -> list[str]:
    """Let the data go on where a checkpoint stands. Returns what that means, if it is not the data that the checkpoint's was."""
    segments = progress.segments
    if (
        not segments and fingerprint == order.fingerprint
    ):  # a checkpoint from before there were segments
        return []
    if segments and segments[-1]["key"] == order.key:
        order.start = segments[-1]["start"]
        for component, source in zip(order.components, segments[-1]["sources"], strict=True):
            component.start, component.start_tokens = source["start"], source["start_tokens"]
        return []
    told = [
        f"data   {name} {f'{what}: ' if what else ''}{where}"
        for name, what, where in becomes(order, segments)
    ]
    if not segments and progress.rows:
        segments = [
            {
                "key": fingerprint,
                "start": 0,
                "rows_per_epoch": order.state(0)["rows_per_epoch"],
                "sources": [],
            }
        ]
        told = [
            f"data   {OLDER}: its rows begin anew, in another order; what was seen may come again"
        ]
    order.start, progress.left_out = progress.rows, []  # rows of the data before
    progress.segments = [*segments, order.state(progress.rows)]
    return told


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{group}.{key}": value for group, keys in config.items() for key, value in keys.items()
    }


DEFAULTS = _flat(asdict(TrainConfig()))
