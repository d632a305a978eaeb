"""One rank's life: join, prepare data, build, train, leave with the right exit code."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist
import yaml

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.export import export_checkpoint, is_export_of
from fsdp_trainer.checkpoint.store import everywhere
from fsdp_trainer.config.check import show
from fsdp_trainer.config.paths import BEST, committed_checkpoints, find_checkpoint, is_hub_id, step_of
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.data.build import build_data
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.facts import look_over
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.models.hub import fetch
from fsdp_trainer.observe.console import Console, short
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.trackers import Trackers
from fsdp_trainer.parallel.compile import told_in_short
from fsdp_trainer.parallel.fit import checkpoint_bytes
from fsdp_trainer.training.build import Material, build, check_room, resolve_architecture
from fsdp_trainer.training.resume import claim_folder, claimed_by
from fsdp_trainer.training.stop import StopRequests
from fsdp_trainer.training.trainer import Outcome, Trainer

TELL_EVERY_SECONDS = 5.0


def run_rank(cfg: TrainConfig) -> int:
    """Train as one rank. Returns the exit code; raises UserError and RunFailed for the front door to tell."""
    waiting = parse_duration(cfg.launch.data_timeout)
    world = join(environment_of_ranks(os.environ) or os.environ, cfg.launch.device, parse_duration(cfg.launch.timeout))
    run = Path(cfg.run.root).expanduser() / str(cfg.run.name)
    # rank 0 alone looks: it is about to claim the folder for this attempt
    ours, code = world.from_main("earlier attempt", lambda: earlier_attempt(run, world), waiting)
    if code is not None:
        return code
    if ours:
        cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, resume="auto"))  # restarted by the launcher: what is there is our own
    console = Console(quiet=not world.main)
    stop = StopRequests(parse_duration(cfg.train.time_limit) if cfg.train.time_limit else None, console.say)
    lock, trainer, reason, code = None, None, "failed", 1
    try:
        lock = world.node_by_node(
            "claiming the run's folder", lambda: claim_folder(cfg, run, world.launch) if world.main else None, waiting
        )
        material = world.node_by_node("preparing the data", lambda: prepare(cfg, run, console, world), waiting)
        checkpoint = checkpoint_bytes(resolve_architecture(cfg, material).parameters(), cfg.precision, cfg.optim)
        shared, fingerprint = claimed_by(run, world.launch), material.data.fingerprint
        for line in look_over(cfg, world, run, shared, fingerprint, checkpoint, parse_duration(cfg.launch.timeout)):
            console.say(f"note   {line}")
        connect(world, parse_duration(cfg.launch.timeout))
        trainer = build(cfg, material, world, run, stop)
        reason, code = train(trainer, world, run)
    except UserError as error:
        reason, code = error.title, error.exit_code
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        leave(trainer, Records(run) if lock else None, reason, code)
        stop.close()
        if lock:
            lock.close()
    return code


def earlier_attempt(run: Path, world: World) -> tuple[bool, int | None]:
    """Whether an attempt of this launch had the folder before, and the code with which it stopped in order, if it did.

    torchrun restarts every exit that is not 0, those of runs that stopped in order too.
    """
    ours = world.attempt > 0 and claimed_by(run, world.launch)
    last = Records(run).last_event() if ours else {}
    return ours, last["exit_code"] if last.get("event") == "end" and last["exit_code"] in (75, 2) else None


def prepare(cfg: TrainConfig, run: Path, console: Console, world: World) -> Material:
    """Fetch the model and tokenise the data; what an earlier rank or run did is found on disk."""
    own = find_checkpoint(run) if cfg.checkpoint.resume == "auto" else None
    if own and cfg.model.init_from and not is_hub_id(cfg.model.init_from) and not Path(cfg.model.init_from).exists():
        console.say(f"model  {cfg.model.init_from} is not there; the run goes on with configuration and tokenizer of its own {own}")
        cfg = replace(cfg, model=replace(cfg.model, init_from=str(own)))
    init_from = fetch(cfg.model.init_from) if cfg.model.init_from else None
    if world.local_rank == 0:  # whose word all hear; what is free changes from moment to moment
        check_room(cfg, init_from, world)
    return Material(*build_data(cfg, tokenising(console)), init_from)


def tokenising(console: Console) -> Callable[[int, int], None]:
    """Tells how far the data is, from time to time."""
    told = time.monotonic()

    def tell(rows: int, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY_SECONDS:
            console.progress(f"data   {rows:,} rows read, {short(tokens)} tokens")
            told = time.monotonic()

    return tell


def train(trainer: Trainer, world: World, run: Path) -> Outcome:
    """Open the records where the run stands, fit, and export at the end. Collective."""
    observer, step = trainer.observer, trainer.progress.step
    if trainer.finished and trainer.saved == step:
        observer.console.say(already_finished(trainer, run))
        export_hf(trainer, world, run)
        return "already finished", 0
    everywhere("open the run's records", lambda: open_records(trainer, run) if world.main else None)
    details = {"step": step, "rows": trainer.progress.rows, "world_size": world.size, "attempt": world.attempt}
    observer.event("resume" if step else "start", **details, **({"changes": trainer.changes} if step else {}))
    if step:
        observer.console.say(f"goes on after step {step:,}")
        for key, (then, now) in sorted(trainer.changes.items()):
            observer.console.say(f"       {key} was {show(then)}, is {show(now)}")
    with told_in_short():
        outcome = trainer.fit()
    if outcome[1] == 0:
        tell_end(trainer, outcome[0])
        export_hf(trainer, world, run)
        observer.console.say(f"done: {run}")
    else:
        how = "the same command goes on" if trainer.cfg.checkpoint.resume == "auto" else "go on with  checkpoint.resume=auto"
        observer.console.say(f"stopped by {outcome[0]} after step {trainer.progress.step:,}, checkpoint committed: {how}")
    return outcome


def already_finished(trainer: Trainer, run: Path) -> str:
    """What to say, and how there would be more to do."""
    step, total = trainer.progress.step, trainer.total_steps
    if trainer.finished == "early_stop":
        why = f"stopped early after step {step:,}, {trainer.progress.stale} validations without a lower loss. More with  train.early_stop=null"
    else:
        why = f"{step:,} of {total:,} steps. More with  train.steps=…"
    return f"{run} is already finished: {why},  anew with  run.name=NEW"


def tell_end(trainer: Trainer, reason: str) -> None:
    """What validation said over the run."""
    progress = trainer.progress
    if reason == "early_stop":
        trainer.observer.console.say(f"stopped early: {progress.stale} validations in a row without a lower loss")
    if trainer.cfg.checkpoint.best and progress.best_step is not None:
        trainer.observer.console.say(
            f"best   validation loss {progress.best_loss:.4f} after step {progress.best_step:,}: {trainer.checkpoints.folder / BEST}"
        )


def open_records(trainer: Trainer, run: Path) -> None:
    """Bring the run's files to where it stands. Rank 0's task."""
    cfg, observer, step = trainer.cfg, trainer.observer, trainer.progress.step
    Records(run).cut_after(step)
    trainer.checkpoints.clear_up(step)
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))
    observer.trackers = Trackers(cfg.logging, run, asdict(cfg), observer.console.say)


def export_hf(trainer: Trainer, world: World, run: Path) -> None:
    """checkpoint.export_hf: the finished run as a Hugging Face folder, unless it is one already."""
    cfg, out = trainer.cfg.checkpoint, run / "hf"
    if not cfg.export_hf:
        return

    def export() -> None:
        best = trainer.checkpoints.folder / BEST
        checkpoint = best.resolve() if cfg.best and best.exists() else committed_checkpoints(run)[-1]
        if not world.main or is_export_of(out, checkpoint, cfg.export_dtype):
            return
        try:
            export_checkpoint(checkpoint, out, cfg.export_dtype)
        except OSError as error:
            raise RunFailed(f"cannot write the export {out}: {error}") from None
        trainer.observer.event("export", step=step_of(checkpoint), path=str(out))

    phases.enter("export")
    # outside any collective: a large model takes longer than launch.timeout
    world.node_by_node("exporting the model", export, parse_duration(trainer.cfg.launch.data_timeout))
    dist.barrier()  # the store ends with rank 0: all must have heard


def leave(trainer: Trainer | None, records: Records | None, reason: str, code: int) -> None:
    """A checkpoint on its way committed, trackers closed, the last line of events.jsonl, the process group gone."""
    phases.enter("end")
    if trainer:
        try:
            trainer.checkpoints.wait()
        except BaseException as error:  # beside what ended the run, which is told by the front door
            trainer.observer.console.say(f"the checkpoint on its way was lost: {error}")
        trainer.profiler.close()
    if trainer and trainer.observer.trackers:
        trainer.observer.trackers.close(code)
    if records:
        records.event("end", reason=reason, exit_code=code)
    if dist.is_initialized():
        dist.destroy_process_group()
