"""The checkpoints of one run: written under another name, committed by rename, verified before they are trusted."""

import json
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_trainer.checkpoint.files import commit, damage, describe, files_below, sync_folder, write_durably
from fsdp_trainer.checkpoint.state import WEIGHTS
from fsdp_trainer.config.paths import MANIFEST, committed_checkpoints
from fsdp_trainer.errors import Problem, RunFailed
from fsdp_trainer.models.initialize import VOCABULARY

PROGRESS = "trainer.json"


class CheckpointStore:
    """`folder`/step-00000100/ and so on. Its methods are collective: every rank calls them."""

    def __init__(self, run: Path, keep: int, write_assets: Callable[[Path], None]):
        """write_assets fills a folder with what a checkpoint holds besides tensors and progress; rank 0 calls it."""
        self.run, self.folder, self.keep, self.write_assets = run, run / "checkpoints", keep, write_assets

    def save(self, step: int, state: dict[str, Any], progress: dict[str, Any]) -> Path:
        """Commit a checkpoint of `state` (tensors and DTensors) and `progress`. Raises RunFailed on every rank if any rank could not write."""
        target = self.folder / f"step-{step:08d}"
        partial = self.folder / f".{target.name}.partial"
        main = dist.get_rank() == 0
        everywhere("make the checkpoint's folder", lambda: remake(partial) if main else None)
        try:
            dcp.save(state, checkpoint_id=partial)
        except CheckpointException as error:  # a BaseException, raised on all ranks together
            cause = next(iter(error.failures.values()), error)
            everywhere("clear up after a failed checkpoint", lambda: shutil.rmtree(partial, ignore_errors=True) if main else None)
            raise RunFailed(f"cannot write the checkpoint {target}: {cause[0] if isinstance(cause, tuple) else cause}") from None
        mine = sorted(path.name for path in partial.glob(f"__{dist.get_rank()}_*.distcp"))
        parts = everywhere("read back the checkpoint", lambda: describe(partial, mine))
        everywhere("commit the checkpoint", lambda: self._commit(partial, target, step, progress, parts) if main else None)
        return target

    def _commit(self, partial: Path, target: Path, step: int, progress: dict[str, Any], parts: list[dict]) -> None:
        self.write_assets(partial)
        write_durably(partial / PROGRESS, json.dumps(progress, indent=1))
        files = {name: told for part in parts for name, told in part.items()}
        files |= describe(partial, [name for name in files_below(partial) if name not in files])
        manifest = {
            "step": step,
            "world_size": dist.get_world_size(),
            "torch": torch.__version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": files,
        }
        write_durably(partial / MANIFEST, json.dumps(manifest, indent=1))
        commit(partial, target)
        for old in committed_checkpoints(self.run)[: -self.keep]:
            (old / MANIFEST).unlink()  # no longer committed, should the deletion be cut short
            shutil.rmtree(old)
        sync_folder(self.folder)

    def newest_good(self, tell: Callable[[Path, list[Problem]], None]) -> Path | None:
        """The newest checkpoint whose files are all as they were written; `tell` hears of each that is not. All ranks get the same answer."""
        for candidate in reversed(self._candidates()):
            found = [p for part in gather(damage(candidate, dist.get_rank(), dist.get_world_size())) for p in part]
            if not found:
                return candidate
            tell(candidate, found)
        return None

    def leave_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, which a run that goes on from `step` replaces: damaged ones, or another branch's. Rank 0's task."""
        for later in committed_checkpoints(self.run):
            if int(later.name.removeprefix("step-")) > step:
                aside = later.with_name(later.name + ".left")
                shutil.rmtree(aside, ignore_errors=True)
                later.rename(aside)

    def _candidates(self) -> list[Path]:
        """Rank 0's listing: another node's view of a shared disk may lag."""
        listing = [committed_checkpoints(self.run) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(listing)
        return listing[0] or []


def load(checkpoint: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Fill `state` in place from a verified checkpoint, whatever number of ranks wrote it. Collective, unless this process is `alone` in it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which `alone` says already
        dcp.load(state, checkpoint_id=checkpoint, planner=_Planner(), no_dist=alone)


class _Planner(DefaultLoadPlanner):
    """Vocabularies may have more or fewer rows than were stored: what both have is read. All else must fit."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        entries = dict(metadata.state_dict_metadata)
        for name in (f"{WEIGHTS}{vocabulary}" for vocabulary in VOCABULARY):
            if name in entries and name in state_dict:
                entries[name] = replace(entries[name], size=state_dict[name].size())
        super().set_up_planner(state_dict, replace(metadata, state_dict_metadata=entries), is_coordinator)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What the trainer had done when the checkpoint was written."""
    return json.loads((checkpoint / PROGRESS).read_text())


def remake(folder: Path) -> None:
    """An empty folder, whatever a crash left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def everywhere(what: str, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on every rank and gather the results; if it fails on one, all raise RunFailed."""
    try:
        outcome: tuple[Any, str | None] = (work(), None)
    except OSError as error:
        outcome = (None, f"cannot {what}: {error}")
    outcomes = gather(outcome)
    if failures := [f"rank {rank} {failure}" for rank, (_, failure) in enumerate(outcomes) if failure]:
        raise RunFailed("\n".join(failures))
    return [value for value, _ in outcomes]
