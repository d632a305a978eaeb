"""The checkpoints of one run: written under another name, committed by rename, verified before they are trusted."""

import json
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_trainer import __version__, phases
from fsdp_trainer.checkpoint.files import (
    commit,
    damage,
    describe,
    files_below,
    sync,
    unfinished,
    write_durably,
    write_manifest,
)
from fsdp_trainer.checkpoint.shards import METADATA, Shard, write_file
from fsdp_trainer.checkpoint.state import WEIGHTS
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
from fsdp_trainer.errors import Problem, RunFailed
from fsdp_trainer.models.initialize import VOCABULARY

PROGRESS = "trainer.json"


class CheckpointStore:
    """`folder`/step-00000100/ and so on. Its methods are collective: every rank calls them."""

    def __init__(
        self,
        run: Path,
        cfg: Checkpoint,
        timeout: float,
        write_assets: Callable[[Path], None],
        committed: Callable[[dict[str, Any]], None],
    ):
        """write_assets fills a folder with what a checkpoint holds besides tensors and progress; `committed` hears of each that is.

        Rank 0 calls both; with cfg.mode=async in the thread that writes. timeout: of one collective, in seconds.
        """
        self.run, self.folder, self.cfg, self.write_assets, self.committed = (
            run,
            run / "checkpoints",
            cfg,
            write_assets,
            committed,
        )
        self.group: dist.ProcessGroup | None = None
        self.longest_save = 0.0
        """Seconds that a checkpoint took, from the decision to the commit."""
        self._commits = 0
        self._on_its_way: Future | None = None
        if cfg.mode == "async":
            # on the default group the thread's collectives would meet training's
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._shard = Shard(self.group, whole=cfg.mode == "async")

    def save(
        self,
        step: int,
        state: dict[str, Tensor],
        progress: dict[str, Any],
        started: float | None = None,
    ) -> None:
        """Commit a checkpoint of `state` (tensors and DTensors) and `progress`; in the background, once `state` is copied, with mode=async.

        The one before must have been waited for. started: time.perf_counter() when this one was decided on. Raises RunFailed on every rank if any
        rank could not write it.
        """
        started = time.perf_counter() if started is None else started
        self._shard.plan(state)
        windows: Iterable[Tensor] = self._shard.windows(state)
        if self.group is None:
            self._save(step, windows, progress, started)
        else:
            staged = list(windows)
            stall = time.perf_counter() - started
            self._on_its_way = self._writer.submit(
                self._save, step, staged, progress, started, stall
            )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in the background failed. The other ranks may not know yet; not collective."""
        return (
            self._on_its_way is not None
            and self._on_its_way.done()
            and self._on_its_way.exception() is not None
        )

    def wait(self) -> float:
        """Return when no save is on its way; for how many seconds that took. Raises what the last one failed with."""
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is None:
            return 0.0
        started, busy = time.perf_counter(), not on_its_way.done()
        on_its_way.result()
        return time.perf_counter() - started if busy else 0.0

    def _save(
        self,
        step: int,
        windows: Iterable[Tensor],
        progress: dict[str, Any],
        started: float,
        stall: float | None = None,
    ) -> None:
        target = self.folder / checkpoint_name(step)
        half = unfinished(target)
        main = dist.get_rank() == 0

        def write() -> dict[str, dict[str, int]]:
            phases.enter("shards", step)
            return {self._shard.file: write_file(half / self._shard.file, windows)}

        def finish() -> None:
            phases.enter("rename")
            commit(half, target)
            self._commits += 1
            seconds = time.perf_counter() - started
            # stall: how long training waited
            told = {
                "step": step,
                "path": str(target),
                "seconds": round(seconds, 3),
                "stall_seconds": round(stall or seconds, 3),
            }
            self.committed(
                told | ({"best": progress["best_step"] == step} if self.cfg.best else {})
            )

        what = f"write the checkpoint {target}"
        try:
            everywhere(what, lambda: remake(half) if main else None, self.group)
            parts = everywhere(what, write, self.group)
            phases.enter("manifest")
            everywhere(
                what,
                lambda: self._complete(half, step, progress, parts) if main else None,
                self.group,
            )
            if self.cfg.keep == 1:
                self._require_readable(half)
            everywhere(what, lambda: finish() if main else None, self.group)
        except RunFailed:
            everywhere(
                "clear up",
                lambda: shutil.rmtree(half, ignore_errors=True) if main else None,
                self.group,
            )
            raise
        if main:
            phases.enter("prune")
            with suppress(
                OSError
            ):  # the new one is committed; what cannot be deleted now is the next time
                self._retain(progress["best_step"] if self.cfg.best else None)
        self.longest_save = max(self.longest_save, time.perf_counter() - started)

    def _complete(self, half: Path, step: int, progress: dict[str, Any], parts: list[dict]) -> None:
        self.write_assets(half)
        write_durably(half / PROGRESS, json.dumps(progress, indent=1))
        (half / METADATA).write_bytes(self._shard.metadata)
        files = {name: told for part in parts for name, told in part.items()}
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
        write_manifest(half / MANIFEST, manifest)

    def _require_readable(self, half: Path) -> None:
        """Before the only other checkpoint goes, read the new one back from the disk. Raises RunFailed if it is not what was written."""
        if problems := damage_anywhere(half, self.group):
            raise RunFailed(
                f"the checkpoint just written is damaged, the one before stays: {problems[0].what} {problems[0].why}"
            )

    def _retain(self, best_step: int | None) -> None:
        """Delete all but the newest checkpoints and the best one, which `best` is made to name."""
        committed = committed_checkpoints(self.run)
        best = self.folder / checkpoint_name(best_step) if best_step is not None else None
        if best in committed:
            name_best(self.folder / BEST, best)
        for old in committed[: -self.cfg.keep]:
            if old != best:
                old.rename(unfinished(old))  # no longer committed, should the deletion be cut short
                shutil.rmtree(unfinished(old))
        if self._commits >= self.cfg.keep:
            for left in self.folder.glob("step-*.left"):
                shutil.rmtree(left)
        unlink_if_dangling(self.folder / BEST)
        sync(self.folder)

    def newest_good(
        self, tell: Callable[[Path, list[Problem]], None], before: int | None = None
    ) -> Path | None:
        """The newest checkpoint whose files are all as they were written, of a step `before` that if given; `tell` hears of each that is not.

        All ranks get the same answer.
        """
        for candidate in reversed(
            [
                path
                for path in self.listed(checkpoint_folders)
                if before is None or step_of(path) < before
            ]
        ):
            found = damage_anywhere(candidate)
            if not found:
                return candidate
            tell(candidate, found)
        return None

    def clear_up(self, step: int) -> None:
        """Rename checkpoints of later steps, which a run that goes on from `step` replaces: damaged ones, or another branch's. Rank 0's task.

        They go for good when the run has committed checkpoint.keep new ones. What a crash left half written or half deleted goes now.
        """
        for half in self.folder.glob(unfinished(self.folder / "step-*").name):
            shutil.rmtree(half)
        for later in checkpoint_folders(self.run):
            if step_of(later) > step:
                set_aside(later)
                self._commits = 0
        unlink_if_dangling(self.folder / BEST)

    def listed(self, found: Callable[[Path], list[Path]] = committed_checkpoints) -> list[Path]:
        """The run's checkpoints, oldest first, as rank 0 sees them. Collective."""
        return everywhere(
            "list the checkpoints", lambda: found(self.run) if dist.get_rank() == 0 else []
        )[0]


def damage_anywhere(checkpoint: Path, group: dist.ProcessGroup | None = None) -> list[Problem]:
    """What any rank finds wrong with a checkpoint, all ranks alike. Collective; the ranks share the large files.

    A rank of another node may see later than others what was written to a shared disk.
    """
    manifest, deadline = checkpoint / MANIFEST, time.monotonic() + LAG_SECONDS
    there = gather(manifest.exists(), group)[0]
    while there and not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    found = gather(
        [(p.what, p.why) for p in damage(checkpoint, dist.get_rank(), dist.get_world_size())], group
    )
    return [Problem(*problem) for problem in dict.fromkeys(chain.from_iterable(found))]


def load(checkpoint: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Fill `state` in place from a verified checkpoint, whatever number of ranks wrote it. Collective, unless this process is `alone` in it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # which `alone` says already
        try:
            dcp.load(state, checkpoint_id=checkpoint, planner=_Planner(), no_dist=alone)
        except CheckpointException as error:  # a BaseException, raised on all ranks together
            cause = next(iter(error.failures.values()), error)
            raise RunFailed(
                f"cannot read the checkpoint {checkpoint}: {cause[0] if isinstance(cause, tuple) else cause}"
            ) from None


class _Planner(DefaultLoadPlanner):
    """Vocabularies may have more or fewer rows than were stored: what both have is read. All else must fit."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        entries = dict(metadata.state_dict_metadata)
        for name in (f"{WEIGHTS}{vocabulary}" for vocabulary in VOCABULARY):
            if name in entries and name in state_dict:
                entries[name] = replace(entries[name], size=state_dict[name].size())
        super().set_up_planner(
            state_dict, replace(metadata, state_dict_metadata=entries), is_coordinator
        )


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What the trainer had done when the checkpoint was written."""
    return json.loads((checkpoint / PROGRESS).read_text())


def remake(folder: Path) -> None:
    """An empty folder, whatever a crash left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def set_aside(checkpoint: Path) -> None:
    """Rename it to what no longer counts as one."""
    aside = checkpoint.with_name(checkpoint.name + ".left")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def name_best(link: Path, best: Path) -> None:
    """Make `link` beside `best` a symbolic link to it, at once."""
    if (
        link.is_dir() and not link.is_symlink()
    ):  # a copy of the run, made by a tool that follows links
        shutil.rmtree(link)
    fresh = unfinished(link)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(best.name)
    fresh.replace(link)


def unlink_if_dangling(link: Path) -> None:
    """Remove a link to what is no longer there."""
    if not link.exists():
        link.unlink(missing_ok=True)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def everywhere(
    what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Do `work` on every rank and gather the results; if it fails on one, all raise RunFailed."""
    try:
        outcome: tuple[Any, str | None] = (work(), None)
    except OSError as error:
        outcome = (None, f"cannot {what}: {error}")
    outcomes = gather(outcome, group)
    if failures := [
        f"rank {rank} {failure}" for rank, (_, failure) in enumerate(outcomes) if failure
    ]:
        raise RunFailed("\n".join(failures))
    return [value for value, _ in outcomes]
