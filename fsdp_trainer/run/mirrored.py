"""A run and its mirror: what it fetches from there at its start, and what its end waits for."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.checkpoint.bucket import Bucket, Torn, mirror_error
from fsdp_trainer.checkpoint.store import link_best
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.paths import (
    BEST,
    MANIFEST,
    TRAINER_STATE,
    checkpoint_name,
    committed_checkpoints,
    find_checkpoint,
    step_of,
)
from fsdp_trainer.data.files.remote_files import Unreachable
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.run.run_lock import lock_folder
from fsdp_trainer.training.trainer import Trainer

MIRROR_LOCK = ".mirror"
"""Held by the group of ranks that fetches, while others that share the run wait."""

Say = Callable[[str], None]


@dataclass
class Mirror:
    """The place of a run in checkpoint.mirror, as its start sees it. group: replicas.id, if any."""

    url: str
    name: str
    run: Path
    group: int | None
    patience: float
    """Seconds to wait for other ranks."""
    say: Say

    def begin(self, resume: str, overwrite: bool, progress: Say) -> None:
        """Check that the mirror can be used, and fetch what a run that resumes needs from it.

        Called by rank 0. resume: checkpoint.resume. overwrite: run.overwrite. Raises UserError, and
        RunFailed if the mirror may be there at the next start.
        """
        with self.opened() as bucket, ExitStack() as files:
            bucket.require_writable()
            if self.group is not None:
                files.enter_context(lock_folder(self.run, MIRROR_LOCK, self.patience))
            if resume == "never":
                empty_mirror(bucket, overwrite)
            elif resume == "auto" or not is_within(resume, self.run):
                newest = committed_checkpoints(self.run)[-1:]
                fetch_newer(
                    bucket, self.run, step_of(newest[0]) if newest else -1, self.say, progress
                )

    def fetch_again(self, world: World, step: int) -> None:
        """Fetch a checkpoint of a later step than that of the newest intact one. Collective."""

        def fetch_on_main() -> None:
            if world.main:
                with self.opened() as bucket:
                    fetch_newer(bucket, self.run, step, self.say, lambda _: world.heartbeat())

        world.rank0_then_nodes_then_all("fetching a checkpoint", fetch_on_main, self.patience)

    def opened(self) -> AbstractContextManager[Bucket]:
        return opened(self.url, self.name)


@contextmanager
def opened(url: str, name: str, key: str = "checkpoint.mirror") -> Iterator[Bucket]:
    """Yield the bucket of a run; report errors of the file system's package as ours.

    key: that of the configuration which has the address.
    """
    try:
        yield Bucket(url, name)
    except (UserError, RunFailed, Stopped):
        raise
    except Exception as error:  # of any package
        failure = mirror_error(url, error, key)
        if isinstance(failure, Unreachable):
            problem = failure.problems[0]
            raise RunFailed(f"{failure.title}: {problem.what} {problem.reason}") from error
        raise failure from error


def is_within(resume: str, run: Path) -> bool:
    named = find_checkpoint(resume)
    return named is not None and named.resolve().is_relative_to(run.resolve())


def empty_mirror(bucket: Bucket, overwrite: bool) -> None:
    """Delete an earlier run in the mirror. Raises UserError unless run.overwrite allows it."""
    listed = bucket.checkpoints()
    if listed and not overwrite:
        reason = (
            "holds an earlier run of this name. Use  run.name=NEW,  run.overwrite=true  to delete "
            "it,  or  checkpoint.resume=auto  to resume"
        )
        raise UserError("the mirror is in use", bucket.address, reason)
    for name in listed:
        bucket.delete(name)


def fetch_newer(bucket: Bucket, run: Path, above: int, say: Say, progress: Say) -> None:
    """Fetch the newest whole checkpoint of a later step than `above`, and the best one.

    The run's records are fetched too, if the folder has none. Raises OSError.
    """
    for name, files in reversed(bucket.checkpoints().items()):
        if int(name.removeprefix("step-")) <= above:
            return
        if MANIFEST not in files:
            continue  # its upload was cut short
        try:
            newest = bucket.fetch(name, run, progress)
        except Torn as error:
            say(f"mirror {bucket.address}/checkpoints/{name} is damaged and not used: {error}")
            continue
        say(f"mirror {bucket.address}: fetched {newest}")
        fetch_best(bucket, newest, say, progress)
        bucket.get_records(run)
        return


def fetch_best(bucket: Bucket, newest: Path, say: Say, progress: Say) -> None:
    """Fetch the checkpoint with the lowest validation loss before `newest`, if the mirror has it.

    Otherwise the run looks for a lowest loss from here on.
    """
    best_step = json.loads((newest / TRAINER_STATE).read_text()).get("best_step")
    if best_step is None:
        return
    name, run = checkpoint_name(best_step), newest.parent.parent
    if name != newest.name and MANIFEST in bucket.checkpoints().get(name, {}):
        try:
            bucket.fetch(name, run, progress)
        except Torn as error:
            say(f"mirror {bucket.address}/checkpoints/{name} is damaged and not used: {error}")
            return
    if (newest.parent / name / MANIFEST).is_file():
        link_best(newest.parent / BEST, newest.parent / name)


def end_with_mirror(trainer: Trainer, world: World, code: int) -> None:
    """Wait until the last checkpoint is in the mirror. Collective.

    Raises RunFailed if it is not in the end, unless the run was stopped and will go on.
    """
    if trainer.runner.cfg.checkpoint.mirror is None:
        return
    phases.enter("export")
    wait = partial(wait_for_mirror, trainer, world)
    # at a stop another signal ends the wait, and the process with it
    work = wait if code else partial(trainer.signals.stoppable, wait)
    limit = parse_duration(trainer.runner.cfg.launch.data_timeout)
    own = world.rank0_then_nodes_then_all("uploading the last checkpoint", work, limit)
    late = run_on_rank_0("delete old checkpoints", partial(finish_mirror, trainer, own))
    if late and code == 0:
        raise RunFailed(late)
    if late:
        trainer.observer.say(late)


def wait_for_mirror(trainer: Trainer, world: World) -> str:
    """Wait for the uploads of rank 0; return "" or why they are not complete."""
    mirror = trainer.checkpoints.store.mirror
    if mirror is None:
        return ""
    mirror.look()
    trainer.observer.say(f"mirror waits for the upload to {mirror.bucket.address}")
    return mirror.wait(parse_duration(trainer.runner.cfg.checkpoint.patience), world.heartbeat)


def finish_mirror(trainer: Trainer, late: str) -> str:
    """Delete what was not to be deleted before the uploads. Called by rank 0; returns `late`."""
    store, progress = trainer.checkpoints.store, trainer.progress
    if late and store.mirror:
        store.mirror.close()  # so that it is not waited for again
    elif trainer.runner.groups.leads:
        best_step = progress.best_step if trainer.runner.cfg.checkpoint.best else None
        store.finish_deleting(progress.step, best_step)
    return late
