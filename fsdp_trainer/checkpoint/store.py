"""The checkpoints of one run: committed by rename, and verified before they are used."""

import json
import math
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather, run_on_all_ranks, run_on_rank_0
from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.base.torch_private import bounded_copies
from fsdp_trainer.checkpoint.atomic_files import (
    commit,
    damage,
    describe,
    files_below,
    make_empty,
    manifest_text,
    sync,
    unfinished,
    write_durably,
)
from fsdp_trainer.checkpoint.formats.description import Description, read_description
from fsdp_trainer.checkpoint.linked_files import LinkedFiles, link
from fsdp_trainer.checkpoint.shards import ShardWriter, linked_file_of, write_file
from fsdp_trainer.checkpoint.state import parameter_of
from fsdp_trainer.checkpoint.uploads import Uploads
from fsdp_trainer.config.paths import (
    BEST,
    LAG_SECONDS,
    MANIFEST,
    checkpoint_folders,
    checkpoint_name,
    committed_checkpoints,
    step_of,
)
from fsdp_trainer.config.schema import Checkpoint
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.version import __version__

PROGRESS = "trainer.json"
NOTHING_PENDING: Future[None] = Future()
NOTHING_PENDING.set_result(None)


class CheckpointStore:
    """The checkpoints `folder`/step-00000100/ and so on. Methods are collective unless noted."""

    def __init__(
        self,
        run: Path,
        cfg: Checkpoint,
        timeout: float,
        write_assets: Callable[[Path, Json], None],
        on_commit: Callable[[Json], None],
        mirror: Uploads | None = None,
    ):
        """Create the background thread and, with cfg.mode=async, its process group.

        write_assets: writes a checkpoint's files except tensors and progress; it gets the folder
        and the progress. on_commit: gets the details of a committed checkpoint. Rank 0 calls both,
        with cfg.mode=async in the background thread. timeout: of a collective, in seconds. mirror:
        uploads what is committed; None: nothing is uploaded, or rank 0 does it.
        """
        self.run = run
        self.folder = run / "checkpoints"
        self.cfg = cfg
        self.write_assets = write_assets
        self.on_commit = on_commit
        self.mirror = mirror
        self.longest_save = 0.0
        """Seconds that the longest save took, from the decision to save."""
        self._commits = 0
        self._pending = NOTHING_PENDING
        self._background = cfg.mode == "async"
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self.group: dist.ProcessGroup | None = None
        if self._background:
            # on the default group the thread's collectives would meet training's
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._shard = ShardWriter(self.group, whole=self._background)

    def save(
        self,
        step: int,
        state: dict[str, Tensor],
        progress: Json,
        started: float,
        linked: LinkedFiles | None = None,
    ) -> None:
        """Commit a checkpoint of `state` (tensors and DTensors) and `progress`.

        With mode=async it is written in the background, once `state` is copied; `wait` must have
        been called for the previous one. started: time.perf_counter() at the decision to save.
        linked: files with some of the tensors, which the checkpoint links. Raises RunFailed on
        every rank if any rank could not write it.
        """
        self._shard.plan(state, linked.places() if linked else None)
        windows = self._shard.windows(state)
        snapshot: list[Path] = []
        if linked:
            every = run_on_all_ranks("link the optimizer's states", linked.snapshot)
            snapshot = every[dist.get_rank()]
        write = partial(self._save, step, progress, started, snapshot)
        if self._background:
            staged = list(windows)
            stall = time.perf_counter() - started
            self._pending = self._thread.submit(write, staged, stall)
        else:
            write(windows)

    @property
    def failed(self) -> bool:
        """True if the save in the background failed on this rank; others may not know yet."""
        return self._pending.done() and self._pending.exception() is not None

    def wait(self) -> float:
        """Wait for the save in the background and return the seconds waited.

        Raises the exception that the save failed with.
        """
        pending = self._pending
        self._pending = NOTHING_PENDING
        started = time.perf_counter()
        busy = not pending.done()
        pending.result()
        return time.perf_counter() - started if busy else 0.0

    def _save(
        self,
        step: int,
        progress: Json,
        started: float,
        snapshot: list[Path],
        windows: Iterable[Tensor],
        stall: float | None = None,
    ) -> None:
        """Write and commit a checkpoint.

        snapshot: links to this rank's linked files; stall: seconds that training waited, None:
        throughout.
        """
        target = self.folder / checkpoint_name(step)
        half = unfinished(target)
        what = f"write the checkpoint {target}"

        def write_shard() -> dict[str, dict[str, int]]:
            phases.enter("shards", step)
            files = {self._shard.file: write_file(half / self._shard.file, windows)}
            for number in self._shard.linked:
                name = linked_file_of(dist.get_rank(), number)
                files[name] = link(snapshot[number], half / name)
            for path in snapshot:
                path.unlink()
            return files

        def finish() -> None:
            phases.enter("rename")
            commit(half, target)
            self._commits += 1
            seconds = round(time.perf_counter() - started, 3)
            waited = seconds if stall is None else round(stall, 3)
            event = {"step": step, "path": str(target), "seconds": seconds, "stall_seconds": waited}
            best = {"best": progress["best_step"] == step} if self.cfg.best else {}
            self.on_commit(event | best)

        try:
            run_on_rank_0(what, lambda: make_empty(half), self.group)
            shards = run_on_all_ranks(what, write_shard, self.group)
            phases.enter("manifest")
            run_on_rank_0(what, lambda: self._complete(half, step, progress, shards), self.group)
            if self.cfg.keep == 1:
                self._require_readable(half)
            run_on_rank_0(what, finish, self.group)
        except RunFailed:
            delete = partial(shutil.rmtree, half, ignore_errors=True)
            run_on_rank_0("clear up", delete, self.group)
            raise
        if dist.get_rank() == 0:
            phases.enter("prune")
            # the new one is committed; what cannot be deleted now is deleted at the next save
            with suppress(OSError):
                self._retain(progress["best_step"] if self.cfg.best else None)
            if self.mirror:
                self.mirror.look()
        self.longest_save = max(self.longest_save, time.perf_counter() - started)

    def _complete(self, half: Path, step: int, progress: Json, shards: list[dict]) -> None:
        self.write_assets(half, progress)
        write_durably(half / PROGRESS, json.dumps(progress, indent=1))
        for name, content in self._shard.descriptions.items():
            (half / name).write_bytes(content)
        files = dict(chain.from_iterable(shard.items() for shard in shards))
        files |= describe(half, [name for name in files_below(half) if name not in files])
        manifest = {
            "step": step,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "world_size": dist.get_world_size(),
            "data": progress["data"],
            "versions": {
                "fsdp_trainer": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "configuration": "config.yaml",
            "files": files,
        }
        write_durably(half / MANIFEST, manifest_text(manifest))

    def _require_readable(self, half: Path) -> None:
        """Read the new checkpoint back from the disk before the only other one is deleted.

        Raises RunFailed if it is not what was written.
        """
        if problems := damage_anywhere(half, self.group):
            damaged = f"{problems[0].what} {problems[0].reason}"
            raise RunFailed(
                f"the checkpoint just written is damaged, the one before stays: {damaged}"
            )

    def _retain(self, best_step: int | None) -> None:
        """Delete all but the newest checkpoints and the best one, and link `best` to that one.

        Those that are not in the mirror yet, nor any newer one, stay.
        """
        committed = committed_checkpoints(self.run)
        best = None if best_step is None else self.folder / checkpoint_name(best_step)
        if best in committed:
            link_best(self.folder / BEST, best)
        for old in committed[: -self.cfg.keep]:
            if old != best and (self.mirror is None or self.mirror.covers(old)):
                old.rename(unfinished(old))  # no longer committed, should the deletion be cut short
                shutil.rmtree(unfinished(old))
        if self._commits >= self.cfg.keep:
            for aside in self.folder.glob("step-*.left"):
                shutil.rmtree(aside)
        unlink_if_dangling(self.folder / BEST)
        sync(self.folder)

    def droppable(self) -> Path | None:
        def oldest() -> Path | None:
            best = (self.folder / BEST).resolve()
            older = [p for p in committed_checkpoints(self.run)[:-1] if p.resolve() != best]
            return older[0] if older else None

        return run_on_rank_0("list the checkpoints", oldest)

    def drop(self, checkpoint: Path) -> None:
        delete = partial(shutil.rmtree, checkpoint, ignore_errors=True)
        run_on_rank_0("delete a checkpoint", delete)

    def newest_good(
        self, on_damage: Callable[[Path, list[Problem]], None], before: float = math.inf
    ) -> Path | None:
        """Return the newest undamaged checkpoint, the same one on all ranks. Collective.

        on_damage: called with each newer, damaged one and its problems. before: only checkpoints of
        steps earlier than this are considered.
        """
        for candidate in reversed(self.listed(checkpoint_folders)):
            if step_of(candidate) < before:
                problems = damage_anywhere(candidate)
                if not problems:
                    return candidate
                on_damage(candidate, problems)
        return None

    def finish_deleting(self, step: int, best_step: int | None) -> None:
        """Delete what a run whose last save was cut short would have deleted. Called by rank 0.

        Nothing is deleted if the last save was not that of `step`, as for a run that somebody has
        taken back to an earlier checkpoint.
        """
        if [step_of(path) for path in committed_checkpoints(self.run)[-1:]] == [step]:
            with suppress(OSError):
                self._delete_halves()
                self._retain(best_step)

    def _delete_halves(self) -> None:
        for half in self.folder.glob(unfinished(self.folder / "step-*").name):
            shutil.rmtree(half)

    def clear_up(self, step: int) -> None:
        """Rename checkpoints of later steps, which a run that continues from `step` will replace.

        They are damaged or belong to another branch, and are deleted when the run has committed
        checkpoint.keep new ones. Checkpoints that a crash left half written or half deleted are
        deleted now. Called by rank 0 only.
        """
        self._delete_halves()
        for later in checkpoint_folders(self.run):
            if step_of(later) > step:
                rename_aside(later)
                self._commits = 0
        unlink_if_dangling(self.folder / BEST)
        if self.mirror:
            self.mirror.go_back(step)

    def listed(self, folders: Callable[[Path], list[Path]] = committed_checkpoints) -> list[Path]:
        """Return the run's checkpoints, oldest first, as rank 0 sees them. Collective."""
        return run_on_rank_0("list the checkpoints", lambda: folders(self.run))


def damage_anywhere(checkpoint: Path, group: dist.ProcessGroup | None = None) -> list[Problem]:
    """Return the problems that any rank finds in a checkpoint, to all ranks. Collective.

    Each rank checks a part of the large files. A rank on another node may see files on a shared
    disk later than rank 0, so it waits up to LAG_SECONDS for the manifest.
    """
    manifest = checkpoint / MANIFEST
    deadline = time.monotonic() + LAG_SECONDS
    there = gather(manifest.exists(), group)[0]
    while there and not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    problems = damage(checkpoint, dist.get_rank(), dist.get_world_size())
    return list(dict.fromkeys(chain.from_iterable(gather(problems, group))))


def load(checkpoint: Path, state: Json, vocabulary: Collection[str], alone: bool = False) -> None:
    """Fill `state` in place from a verified checkpoint that any number of ranks wrote.

    vocabulary: names of the parameters that may have another number of rows there. Collective,
    unless this process is `alone` in it. Raises UserError for a damaged checkpoint, and RunFailed
    for a disk that cannot be read.
    """
    planner = VocabularyPlanner(vocabulary)
    try:
        description = read_description(checkpoint)
        description.require_within_files(checkpoint)
    except OSError as error:
        raise RunFailed(f"cannot read the checkpoint {checkpoint}: {error}") from None
    for name in state.keys() & description.tensors.keys():
        tensor = description.tensors[name]
        rows = min((*tensor.shape[:1], *state[name].shape[:1]), default=1)
        tensor.require_rows(rows, name, checkpoint)
    reader = DescribedReader(checkpoint, description)
    with warnings.catch_warnings(), bounded_copies():
        # that is intended if `alone`
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)
        except CheckpointException as error:  # a BaseException, raised on all ranks together
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, OSError):
                raise RunFailed(f"cannot read the checkpoint {checkpoint}: {cause}") from None
            line = str(cause).partition("\n")[0]
            reason = f"is damaged, or not as its files describe it: {line}"
            raise UserError("cannot read the checkpoint", str(checkpoint), reason) from None


class DescribedReader(FileSystemReader):
    """Reads the tensors of a description; torch's own reader would run what `.metadata` names."""

    def __init__(self, checkpoint: Path, description: Description):
        super().__init__(checkpoint)
        self._metadata = description.as_metadata()

    def read_metadata(self, *_: Any, **_options: Any) -> Metadata:
        return self._metadata


class VocabularyPlanner(DefaultLoadPlanner):
    """A load planner that accepts another number of vocabulary rows, here and in optimizer state.

    It reads the rows that both have, the checkpoint and the model. All other shapes must be equal.
    """

    def __init__(self, vocabulary: Collection[str]):
        super().__init__()
        self.vocabulary = vocabulary

    def set_up_planner(
        self,
        state_dict: Json,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        entries = dict(metadata.state_dict_metadata)
        for name in state_dict.keys() & entries.keys():
            if parameter_of(name) in self.vocabulary:
                entries[name] = replace(entries[name], size=state_dict[name].size())
        resized = replace(metadata, state_dict_metadata=entries)
        super().set_up_planner(state_dict, resized, is_coordinator)


def read_progress(checkpoint: Path) -> Json:
    """Return the trainer's progress at the time of a checkpoint, the content of trainer.json.

    Raises OSError if there is no such file, UserError if it cannot be read.
    """
    path = checkpoint / PROGRESS
    path.stat()
    return read_object(path, "the checkpoint cannot be read")


def rename_aside(checkpoint: Path) -> None:
    """Rename a checkpoint so that it no longer counts as one."""
    aside = checkpoint.with_name(checkpoint.name + ".left")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def link_best(link: Path, best: Path) -> None:
    # in a copy of the run, made by a tool that follows links, it is a folder
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    fresh = unfinished(link)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(best.name)
    fresh.replace(link)


def unlink_if_dangling(link: Path) -> None:
    if not link.exists():
        link.unlink(missing_ok=True)


def require_whole(checkpoint: Path) -> None:
    """Raise UserError if files of a checkpoint are damaged. Collective: ranks divide the work."""
    if problems := damage_anywhere(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)
