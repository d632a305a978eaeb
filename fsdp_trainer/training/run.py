"""One rank's life: join, prepare data, build, train, leave with the right exit code."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
import yaml

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.export import export_checkpoint, is_export_of
from fsdp_trainer.checkpoint.store import everywhere, gather
from fsdp_trainer.config.check import show
from fsdp_trainer.config.paths import (
    BEST,
    committed_checkpoints,
    find_checkpoint,
    is_hub_id,
    step_of,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.data.build import build_data
from fsdp_trainer.data.preparation import Told
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.launch.facts import look_over
from fsdp_trainer.launch.watchdog import watched
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.models.hub import fetch
from fsdp_trainer.observe.console import Console, time_line
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.stragglers import Straggler, comparing
from fsdp_trainer.observe.trackers import Trackers
from fsdp_trainer.parallel.compile import told_in_short
from fsdp_trainer.parallel.fit import checkpoint_bytes
from fsdp_trainer.training.build import Material, build, check_room, resolve_architecture
from fsdp_trainer.training.out_of_memory import is_out_of_memory, tell
from fsdp_trainer.training.resume import Claim, claim_folder
from fsdp_trainer.training.rewind import rewind
from fsdp_trainer.training.stop import StopRequests
from fsdp_trainer.training.trainer import Outcome, Trainer

BEAT_SECONDS = 1.0


def run_rank(cfg: TrainConfig) -> int:
    """Train as one rank. Returns the exit code; raises UserError and RunFailed for the front door to tell."""
    waiting = parse_duration(cfg.launch.data_timeout)
    env = environment_of_ranks(os.environ) or os.environ
    console = Console(quiet=env.get("RANK", "0") != "0")
    stop = StopRequests(
        parse_duration(cfg.train.time_limit) if cfg.train.time_limit else None, console.say
    )
    run = Path(cfg.run.root).expanduser() / str(cfg.run.name)
    records, watch, lock, trainer, reason, code = (
        Records(run, console.say),
        None,
        None,
        None,
        "failed",
        1,
    )
    world: World | None = None
    try:
        with stop.waiting(limits=False):  # for ranks that may never start
            world = join(env, cfg.launch.device, parse_duration(cfg.launch.timeout))
        stop.connect(world.store, world.main)
        launchers = world.launchers(waiting)
        # rank 0 alone looks: it is about to claim the folder for this attempt
        attempt, left = world.from_main(
            "earlier attempt", lambda: earlier_attempt(run, launchers), waiting
        )
        if left is not None:
            world.linger("earlier attempt")
            return left
        if attempt:
            cfg = replace(
                cfg, checkpoint=replace(cfg.checkpoint, resume="auto")
            )  # restarted by the launcher: what is there is our own
        watch = watched(cfg.launch, run, world)

        def claim() -> TextIO | None:
            with stop.waiting(limits=False):  # a stop that came before is on record in the folder
                return claim_folder(cfg, run, Claim(launchers, attempt)) if world.main else None

        lock = world.node_by_node("claiming the run's folder", claim, waiting)
        if lock:
            stop.last_words = lambda why, code: records.event("end", reason=why, exit_code=code)
            if cfg.launch.slurm_time_limit:
                stop.ask_slurm()
        material = world.node_by_node(
            "preparing the data",
            lambda: stop.stoppable(lambda: prepare(cfg, run, console, world)),
            waiting,
        )
        checkpoint = checkpoint_bytes(
            resolve_architecture(cfg, material).parameters(), cfg.precision, cfg.optim
        )
        timeout = parse_duration(cfg.launch.timeout)
        shared = world.from_main("claim", lambda: Claim(launchers, attempt), waiting).reaches(
            run, timeout / 2
        )
        for line in look_over(
            cfg, world, run, shared, material.data.fingerprint, checkpoint, timeout
        ):
            console.say(f"note   {line}")
        connect(world, timeout)
        stop.watch(pids_of_node(world))
        if early := stop.agreed(limits=False).reason:
            raise Stopped(early)
        trainer = build(cfg, material, world, run, stop)
        reason, code = train(trainer, world, run, attempt)
    except Stopped as stopped:
        reason, code = stopped.args[0], stopped.exit_code
        console.say(f"stopped by {reason}, with nothing more to save: {how_to_go_on(cfg)}")
    except UserError as error:
        reason, code = error.title, error.exit_code
        raise
    except RunFailed as error:
        reason = error.args[0]
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        if world and is_out_of_memory(error):
            failure = tell(error, trainer, world, records, stop)
            reason = failure.args[0].partition("\n")[0]
            raise failure from None
        if isinstance(error, RuntimeError) and (told := stop.failure()):
            reason = told.partition("\n")[0]
            raise RunFailed(told) from None
        if isinstance(error, RuntimeError) and (gone := stop.ended()):  # as collectives fail
            reason = f"{' and '.join(f'rank {rank}' for rank in gone)} ended before its time, and the others cannot go on without it"
            raise RunFailed(reason) from None
        raise
    finally:
        stop.leaving = True
        leave(
            trainer,
            (trainer.observer.records or records) if trainer else records,
            lock is not None,
            reason,
            code,
            bool(stop.gone),
        )
        stop.close()
        if lock:
            lock.close()
        if watch:
            watch.close()
    return code


def pids_of_node(world: World) -> dict[int, int]:
    """Of the ranks that share this node and its process ids, by rank. Collective."""
    mine = world.node, phases.here()
    return {
        rank: pid for rank, (place, pid) in enumerate(gather((mine, os.getpid()))) if place == mine
    }


def how_to_go_on(cfg: TrainConfig) -> str:
    """After a stop."""
    return (
        "the same command goes on"
        if cfg.checkpoint.resume == "auto"
        else "go on with  checkpoint.resume=auto"
    )


def earlier_attempt(run: Path, launchers: list[str]) -> tuple[int, int | None]:
    """How many attempts of this launch had the folder before, and the code with which the last one stopped in order, if it is to stay so.

    torchrun restarts every exit that is not 0, those of runs that stopped in order too. But where a node has come or gone since, it is
    for that node that its ranks were stopped.
    """
    before = Claim.of(run)
    if not set(before.launchers) & set(launchers):
        return 0, None
    last = Records(run).last_event()
    stopped = last.get("event") == "end" and (
        last["exit_code"] == 2
        or (last["exit_code"] == 75 and set(before.launchers) == set(launchers))
    )
    return before.attempt + 1, last["exit_code"] if stopped else None


def prepare(cfg: TrainConfig, run: Path, console: Console, world: World) -> Material:
    """Fetch the model and tokenise the data; what an earlier rank or run did is found on disk."""
    own = find_checkpoint(run) if cfg.checkpoint.resume == "auto" else None
    if (
        own
        and cfg.model.init_from
        and not is_hub_id(cfg.model.init_from)
        and not Path(cfg.model.init_from).exists()
    ):
        console.say(
            f"model  {cfg.model.init_from} is not there; the run goes on with configuration and tokenizer of its own {own}"
        )
        cfg = replace(cfg, model=replace(cfg.model, init_from=str(own)))
    init_from = fetch(cfg.model.init_from) if cfg.model.init_from else None
    if world.local_rank == 0:  # whose word all hear; what is free changes from moment to moment
        check_room(cfg, init_from, world)
    return Material(*build_data(cfg, Told(beating(console, world), console.say)), init_from)


def beating(console: Console, world: World) -> Callable[[str], None]:
    """Tells how far the data is, from time to time, and all ranks that wait for it that it goes on."""
    progress, beat = console.paced(), time.monotonic()

    def tell(line: str) -> None:
        nonlocal beat
        progress(line)
        if (now := time.monotonic()) - beat > BEAT_SECONDS:
            world.beat()
            beat = now

    return tell


def train(trainer: Trainer, world: World, run: Path, attempt: int) -> Outcome:
    """Open the records where the run stands, fit, and export at the end. Collective."""
    observer, step = trainer.observer, trainer.progress.step
    if trainer.finished and trainer.saves.newest == step and not trainer.progress.cut_short:
        observer.console.say(already_finished(trainer, run))
        export_hf(trainer, world, run)
        return "already finished", 0
    reached = everywhere(
        "open the run's records", lambda: open_records(trainer, run) if world.main else {}
    )[0]
    details = {
        "step": step,
        "rows": trainer.progress.rows,
        "world_size": world.size,
        "attempt": attempt,
    }
    seconds = round(sum(phases.seconds().values()), 3)
    observer.event(
        "resume" if step else "start",
        **details,
        seconds=seconds,
        about=observer.about,
        **({"changes": trainer.changes} | reached if step else {}),
    )
    if step:
        observer.console.say(f"goes on after step {step:,}")
        for key, (then, now) in sorted(trainer.changes.items()):
            observer.console.say(f"       {key} was {show(then)}, is {show(now)}")

    def straggler(found: Straggler, until: int) -> None:
        observer.event("straggler", step=until, **asdict(found))
        observer.console.say(
            f"rank {found.rank} on {found.host} is slow in {found.phase}: {found.seconds:.3f} s a step, the others {found.others:.3f} s; "
            f"all wait for it in {found.lost:.0%} of the time"
        )

    every = trainer.cfg.logging.stragglers
    compared = comparing(
        parse_duration(every) if every else None,
        world.store,
        world.rank,
        world.size,
        socket.gethostname(),
        trainer.optimizer,
        straggler,
    )
    with told_in_short(), compared:
        while not (outcome := trainer.fit()):
            rewind(trainer)
    if outcome[1] == 0:
        tell_end(trainer, outcome[0])
        export_hf(trainer, world, run)
    observer.console.say(time_line(phases.seconds()))
    if outcome[1] == 0:
        observer.console.say(f"done: {run}")
    else:
        kept = "checkpoint committed" if trainer.progress.step else "nothing to save yet"
        observer.console.say(
            f"stopped by {outcome[0]} after step {trainer.progress.step:,}, {kept}: {how_to_go_on(trainer.cfg)}"
        )
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
    progress, order = trainer.progress, trainer.batches.order
    since = " since the data was changed" if len(progress.segments) > 1 else ""
    for of in order.report(progress.rows) if len(order.components) > 1 else []:
        asked, got = f"{of['share_asked']:.2%}", f"{of['share']:.2%}"
        trainer.observer.console.say(
            f"data   {of['name']}: {got} of the tokens{since}, asked for {asked}; {of['tokens']:,} tokens, {of['epochs']:.2f} epochs in all"
        )
    if reason == "early_stop":
        trainer.observer.console.say(
            f"stopped early: {progress.stale} validations in a row without a lower loss"
        )
    if trainer.cfg.checkpoint.best and progress.best_step is not None:
        trainer.observer.console.say(
            f"best   validation loss {progress.best_loss:.4f} after step {progress.best_step:,}: {trainer.saves.store.folder / BEST}"
        )


def open_records(trainer: Trainer, run: Path) -> dict[str, Any]:
    """Bring the run's files to where it stands; how far it had come before, which the report reckons with. Rank 0's task."""
    cfg, observer, step = trainer.cfg, trainer.observer, trainer.progress.step
    assert observer.records
    last = observer.records.last_line()
    observer.records.cut_after(step)
    trainer.saves.store.clear_up(step)
    try:
        (run / "config.yaml").write_text(
            yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
        )
    except OSError as error:  # each checkpoint has its own
        observer.console.say(f"{run / 'config.yaml'} cannot be written: {error}; training goes on")
    observer.trackers = Trackers(cfg.logging, run, asdict(cfg), observer.console.say, step)
    return {"reached": {name: last.get(name) for name in ("step", "time")}}


def export_hf(trainer: Trainer, world: World, run: Path) -> None:
    """checkpoint.export_hf: the finished run as a Hugging Face folder, unless it is one already."""
    cfg, out = trainer.cfg.checkpoint, run / "hf"
    if not cfg.export_hf:
        return

    def export() -> None:
        best = trainer.saves.store.folder / BEST
        checkpoint = (
            best.resolve() if cfg.best and best.exists() else committed_checkpoints(run)[-1]
        )
        if not world.main or is_export_of(out, checkpoint, cfg.export_dtype):
            return
        began = time.monotonic()
        try:
            export_checkpoint(checkpoint, out, cfg.export_dtype)
        except OSError as error:
            raise RunFailed(f"cannot write the export {out}: {error}") from None
        trainer.observer.event(
            "export",
            step=step_of(checkpoint),
            path=str(out),
            seconds=round(time.monotonic() - began, 3),
        )

    phases.enter("export")
    # outside any collective: a large model takes longer than launch.timeout
    world.node_by_node(
        "exporting the model",
        lambda: trainer.stop.stoppable(export),
        parse_duration(trainer.cfg.launch.data_timeout),
    )
    dist.barrier()  # the store ends with rank 0: all must have heard


def leave(
    trainer: Trainer | None, records: Records, ours: bool, reason: str, code: int, alone: bool
) -> None:
    """A checkpoint on its way committed, trackers closed, the last line of events.jsonl, the process group gone.

    ours: whether this process may write into the run's folder; alone: whether another rank has ended, for which nothing waits.
    """
    phases.enter("end")
    if trainer and not alone:
        try:
            trainer.saves.store.wait()
        except BaseException as error:  # beside what ended the run, which is told by the front door
            trainer.observer.console.say(f"the checkpoint on its way was lost: {error}")
    if trainer:
        trainer.profiler.close(alone=True)
    if trainer and trainer.observer.trackers:
        trainer.observer.trackers.close(code)
    if ours:
        records.event("end", reason=reason, exit_code=code, phases=phases.lately())
        records.close()
    if dist.is_initialized():
        dist.destroy_process_group()
