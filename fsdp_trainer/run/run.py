"""The run of one rank: join the other ranks, prepare data, build, train, and leave."""

import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_trainer.base import phases
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.base.folders import NewFolders
from fsdp_trainer.base.process import STOPPED, freed_memory_stays, pid_namespace
from fsdp_trainer.base.recorded import recorded
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint, is_export_of
from fsdp_trainer.checkpoint.frozen_weights import read_base
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.paths import (
    BEST,
    checkpoint_name,
    committed_checkpoints,
    find_checkpoint,
    is_hub_id,
    run_folder,
    step_of,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.yaml_text import dump_yaml
from fsdp_trainer.data.prepared_data import build_data, cache_root, require_most_tokens
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import RunFailed, Stopped, UserError, report
from fsdp_trainer.extensions import RunInfo
from fsdp_trainer.launch.facts import preflight
from fsdp_trainer.launch.rollout_link import RolloutLink, divided, require_training_ranks
from fsdp_trainer.launch.start import how_to_go_on
from fsdp_trainer.launch.watchdog import watched
from fsdp_trainer.launch.world import ELASTIC, World, connect, environment_of_ranks, join
from fsdp_trainer.methods.stored_teacher import digest_of_teacher
from fsdp_trainer.methods.teacher import fetch_second_model, require_same_vocabulary
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.observe.console import Console, time_line
from fsdp_trainer.observe.flops import trained_work
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.stragglers import Straggler, comparing
from fsdp_trainer.parallel.compile import summarize_compiler_errors
from fsdp_trainer.parallel.memory_check import CountedModel, checkpoint_bytes
from fsdp_trainer.run.build import Start, build
from fsdp_trainer.run.deterministic import deterministic_kernels
from fsdp_trainer.run.mirrored import Mirror, end_with_mirror
from fsdp_trainer.run.next_commands import next_commands
from fsdp_trainer.run.out_of_memory import is_out_of_memory, report_out_of_memory
from fsdp_trainer.run.rewind import rewind
from fsdp_trainer.run.rollout_rank import generate_as_rank
from fsdp_trainer.run.run_lock import RunLock, are_groups_beside, clear_unused
from fsdp_trainer.run.trained_model import check_room, resolve_for, resolve_setup
from fsdp_trainer.training.after_step.saving import CheckpointManager
from fsdp_trainer.training.progress import AMENDS_LINE, Progress
from fsdp_trainer.training.setup.run_inputs import RunInputs, progress_with_heartbeat
from fsdp_trainer.training.stopping.stop import Rewind, StopSignals
from fsdp_trainer.training.trainer import Outcome, Trainer

WITHOUT_VALUES = {"launch", "logging", "run", "checkpoint", "profile", "evaluation", "world_size"}
"""Groups of keys that may change without other values of the metrics."""


def run_rank(cfg: TrainConfig, new_folders: NewFolders) -> int:
    """Train as one rank.

    Returns the exit code; raises UserError and RunFailed, which the caller must print. new_folders:
    folders that did not exist when the command began.
    """
    rank = Rank(cfg, new_folders)
    reason, code = "failed", 1
    try:
        reason, code = rank.run()
    except Stopped as stopped:
        reason, code = stopped.args[0], stopped.exit_code
        advice = how_to_go_on(rank.cfg.checkpoint.resume)
        rank.console.say(f"stopped by {reason}, with nothing more to save: {advice}")
    except (UserError, RunFailed) as error:
        reason, code = error.args[0], error.exit_code
        rank.report(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        if failure := rank.explain(error):
            reason = failure.args[0].partition("\n")[0]
            rank.report(failure)
            raise failure from None
        raise
    finally:
        rank.leave(reason, code)
    return code


class Rank:
    """This process's part of a run, from start to end."""

    def __init__(self, cfg: TrainConfig, new_folders: NewFolders):
        self.cfg, self.run_folder = cfg, run_folder(cfg)
        self.is_new = self.run_folder in new_folders
        self.group = cfg.replicas.id if cfg.replicas.method != "none" else None
        self.env = environment_of_ranks(os.environ) or os.environ
        self.console = Console(quiet=self.env.get("RANK", "0") != "0")
        self.records = Records(self.run_folder, self.console.say)
        self.signals = StopSignals(cfg.train.time_limit, self.console.say, self._record_forced_exit)
        self.patience = parse_duration(cfg.launch.data_timeout)
        self.timeout = parse_duration(cfg.launch.timeout)
        self.open = ExitStack()
        """Resources to close when this rank leaves: the folder's lock, the watchdog."""
        self.world: World | None = None
        self.lock: ExitStack | None = None
        self.trainer: Trainer | None = None
        self.link: RolloutLink | None = None

    def run(self) -> Outcome:
        world = self.join()
        launchers = world.launchers(self.patience)
        # rank 0 reads it for all ranks, since it then overwrites it when it claims the folder
        attempt, stopped_code = world.from_main(
            "earlier attempt",
            lambda: earlier_attempt(self.run_folder, launchers, self.group),
            self.patience,
        )
        if stopped_code is not None:
            world.wait_until_heard("earlier attempt")
            return "stopped before", stopped_code
        if attempt:  # restarted by the launcher: the folder holds this run's own files
            self.cfg = replace(self.cfg, checkpoint=replace(self.cfg.checkpoint, resume="auto"))
        claim = RunLock(launchers, attempt, self.group)
        self.claim(world, claim)
        self.look_into_mirror(world)
        inputs = world.rank0_then_nodes_then_all(
            "preparing the data",
            lambda: self.signals.stoppable(lambda: self.prepare(world)),
            self.patience,
        )
        setup = resolve_setup(self.cfg, inputs)
        self.preflight(world, inputs, setup, claim)
        self.signals.watch_ranks(pids_of_node(world, self.patience))
        world, self.link = divided(world, self.cfg.launch.rollout_ranks, self.timeout)
        self.world = world
        connect(world, self.timeout)
        generates = self.link is not None and self.link.generates
        if not generates:
            self.signals.sync()
            self.signals.raise_if_agreed()
        records = self.records if world.main and not generates else None
        seq_len, work = self.cfg.batch.seq_len, trained_work(setup.model)
        observer = Observer(self.console, records, world.device, setup.config, seq_len, work)
        self.open.enter_context(deterministic_kernels(self.cfg.train.deterministic))
        if self.link and self.link.generates:
            code = generate_as_rank(
                self.cfg, setup, inputs, world, self.link, self.run_folder, self.signals, observer
            )
            return "the end of training", code
        self.trainer, start = build(
            self.cfg, setup, inputs, world, self.run_folder, self.signals, observer, self.link
        )
        return train_and_export(self.trainer, start, world, attempt)

    def join(self) -> World:
        with self.signals.waiting():  # some ranks may never start
            launch = self.cfg.launch
            world = join(self.env, launch.device, self.timeout, launch.ranks_per_gpu)
        self.world = world
        self.signals.connect(world.store, world.main)
        return world

    def claim(self, world: World, claim: RunLock) -> None:
        """Start the watchdog, then have rank 0 lock the run's folder against other runs."""
        training = replace(world, size=world.size - self.cfg.launch.rollout_ranks)
        # a rollout rank is idle while others train, which does not mean that it holds them up
        trains = world.rank < training.size
        watch = watched(self.cfg.launch, self.run_folder, training) if trains else None
        if watch:
            self.open.callback(watch.close)

        def claim_on_main() -> ExitStack | None:
            if not world.main:
                return None
            # unlike `stoppable`, this claims the folder even if a signal has arrived already, so
            # that the stop is recorded in it
            with self.signals.waiting():
                return claim.acquire(self.cfg.run, self.cfg.checkpoint.resume, self.run_folder)

        self.lock = world.rank0_then_nodes_then_all(
            "claiming the run's folder", claim_on_main, self.patience
        )
        if self.lock:
            self.open.enter_context(self.lock)
            if self.cfg.launch.slurm_time_limit:
                self.signals.limits.watch_slurm()

    def look_into_mirror(self, world: World) -> None:
        """Have rank 0 fetch from checkpoint.mirror what this machine lacks. Raises UserError."""
        cfg, say = self.cfg, self.console.say
        if cfg.checkpoint.mirror is None:
            return
        place = cfg.checkpoint.mirror, str(cfg.run.name), self.run_folder
        mirror = Mirror(*place, self.group, self.patience, say)
        progress = progress_with_heartbeat(self.console, world)

        def look_on_main() -> None:
            if world.main:
                mirror.begin(cfg.checkpoint.resume, cfg.run.overwrite, progress)

        world.rank0_then_nodes_then_all(
            "looking into the mirror",
            lambda: self.signals.stoppable(look_on_main),
            self.patience,
        )

    def prepare(self, world: World) -> RunInputs:
        """Fetch the models and tokenize the data, unless an earlier rank or run has done so."""
        cfg = self.cfg
        wanted = cfg.model.init_from
        gone = wanted and not is_hub_id(wanted) and not Path(wanted).exists()
        own = find_checkpoint(self.run_folder) if cfg.checkpoint.resume == "auto" else None
        if gone and own:
            self.console.say(
                f"model  {wanted} does not exist; the run resumes with configuration and tokenizer "
                f"of its own {own}"
            )
            cfg = replace(cfg, model=replace(cfg.model, init_from=str(own)))
        init_from = fetch(cfg.model.init_from) if cfg.model.init_from else None
        second_folder = fetch_second_model(cfg.second_model)
        # only one rank per node checks: free memory changes, so that ranks could disagree
        if world.local_rank == 0:
            require_training_ranks(world, cfg.launch.rollout_ranks)
            training = replace(world, size=world.size - cfg.launch.rollout_ranks)
            check_room(cfg, init_from, training, second_folder)

        def check(tokenizer: TextTokenizer) -> None:
            # before all data is tokenized, which may take hours
            resolve_for(cfg, init_from, tokenizer)
            if second_folder and world.local_rank == 0:
                require_same_vocabulary(cfg.second_model, tokenizer, second_folder)

        report = Reporter(progress_with_heartbeat(self.console, world), self.console.say)
        tokenizer, template, data = build_data(cfg, report, check)
        cache = cache_root(cfg.data, cfg.run)
        files = digest_of_teacher(cfg.second_model, second_folder, cache, report.progress)
        require_most_tokens(cfg.data, data)
        return RunInputs(tokenizer, template, data, init_from, second_folder, files)

    def preflight(self, world: World, inputs: RunInputs, setup: ModelSetup, claim: RunLock) -> None:
        """Check that the ranks agree and the disk has room, before building. Raises UserError."""
        cfg = self.cfg
        checkpoint = checkpoint_bytes(CountedModel.of(setup.model), cfg.precision, cfg.optim)
        claim_of_main = world.from_main("claim", lambda: claim, self.patience)
        shared = claim_of_main.is_visible_in(self.run_folder, self.timeout / 2)
        fingerprint = inputs.data.fingerprint
        notes = preflight(
            cfg, world, self.run_folder, shared, fingerprint, checkpoint, self.timeout
        )
        for note in notes:
            self.console.say(f"note   {note}")

    def explain(self, error: BaseException) -> RunFailed | None:
        """Return the actual cause of a failure if `error` is only its consequence, else None."""
        if self.world and is_out_of_memory(error):
            return report_out_of_memory(error, self.trainer, self.world, self.records, self.signals)
        if not isinstance(error, RuntimeError):  # the type raised by failed collectives
            return None
        if reported := self.signals.reported_failure():
            return RunFailed(reported)
        if ended := self.signals.wait_for_ended_ranks():
            names = " and ".join(f"rank {rank}" for rank in ended)
            return RunFailed(
                f"{names} ended unexpectedly, and the others cannot continue without it"
            )
        return None

    def report(self, error: UserError | RunFailed) -> None:
        """Print an error before leaving, which may take long if other ranks have failed too."""
        if self.world and self.world.size > 1:
            report(error)

    def leave(self, reason: str, code: int) -> None:
        """Finish a checkpoint in progress, write the last event, and leave the process group."""
        self.signals.leaving = True
        phases.enter("end")
        if self.trainer:
            self._close_trainer(self.trainer, code)
        refused = code == UserError.exit_code
        # with the lock, this process is the one that writes into the run's folder
        if self.lock and not (refused and self._clear_new_folder()):
            lately = phases.seconds_since_last_call()
            self.records.event("end", reason=reason, exit_code=code, phases=lately)
            self.records.close()
        if self.link:
            self.link.leave(reason, code)
        self._leave_groups(in_order=code in (0, STOPPED) and not self.signals.ended_ranks)
        self.signals.close()
        self.open.close()

    def _clear_new_folder(self) -> bool:
        """Empty the run's folder if this command created it and no run began; return True if so.

        The folder itself is deleted later by the code that created it, after the lock file is
        closed, since NFS keeps a file in the folder as long as it is open. Under torchrun the
        folder is kept: further attempts read in it that there is nothing to do.
        """
        return self.is_new and ELASTIC not in os.environ and clear_unused(self.run_folder)

    def _close_trainer(self, trainer: Trainer, code: int) -> None:
        if not self.signals.ended_ranks:  # otherwise this would wait for a rank that has ended
            try:
                trainer.checkpoints.store.wait()
            except BaseException as error:  # the error that ended the run is reported elsewhere
                self.console.say(f"the checkpoint on its way was lost: {error}")
        if mirror := trainer.checkpoints.store.mirror:
            if code not in (0, STOPPED) and not self.signals.ended_ranks:
                patience = parse_duration(self.cfg.checkpoint.patience)
                if late := mirror.wait(patience, phases.seconds):
                    self.console.say(late)
            mirror.close()
        trainer.runner.optimizer.close()
        trainer.runner.groups.leave()
        trainer.profiler.close(alone=True)
        if trainer.observer.trackers:
            trainer.observer.trackers.close(code)

    def _leave_groups(self, in_order: bool) -> None:
        """Destroy the process groups, unless that could wait for a rank that failed.

        NCCL's destroy waits for all collectives that have begun, and those of a failed run may
        never end; the groups are then closed when the process ends. A single rank has no others to
        wait for, and its process may continue, such as a notebook, so it always destroys them.
        """
        if not dist.is_initialized():
            return
        if in_order:
            dist.destroy_process_group()
        elif dist.get_world_size() == 1:
            with suppress(RuntimeError):  # caused by a device error that was reported already
                dist.destroy_process_group()

    def _record_forced_exit(self, reason: str, code: int) -> None:
        if self.lock:
            self.records.event("end", reason=reason, exit_code=code)


def pids_of_node(world: World, timeout: float) -> dict[int, int]:
    here = (world.node, pid_namespace())
    sent = world.to_main("process", (here, os.getpid()), timeout)
    places = world.from_main("processes", lambda: sent, timeout)
    return {rank: pid for rank, (place, pid) in enumerate(places) if place == here}


def earlier_attempt(
    run: Path, launchers: list[str], group: int | None = None
) -> tuple[int, int | None]:
    """Return the number of earlier attempts by this launch, and an exit code or None.

    The exit code is that of the last attempt if the run must not continue after it. torchrun
    restarts after every exit code except 0, also after a clean stop: such a run stays stopped.
    However, if a node has joined or left since, the ranks were stopped because of that node, and
    the run continues.
    """
    before = RunLock.read(run, group)
    if not set(before.launchers) & set(launchers):
        return 0, None
    code = Records(run).last_event().get("exit_code")  # only an attempt's last event has one
    same_nodes = set(before.launchers) == set(launchers)
    final = code == UserError.exit_code or (code == Stopped.exit_code and same_nodes)
    return before.attempt + 1, code if final else None


# --- training, from the first record to the export


def train_and_export(trainer: Trainer, start: Start, world: World, attempt: int) -> Outcome:
    """Open the records at the run's current step, train, and export at the end. Collective."""
    run, say = trainer.checkpoints.store.run, trainer.observer.say
    if trainer.finished and trainer.checkpoints.has(trainer.progress.step, complete=True):
        trainer.skip_limit.require_learnt(trainer.progress)
        say(already_finished(trainer))
        if trainer.runner.groups.leads or run_on_rank_0(
            "look for groups", partial(is_alone, trainer)
        ):
            if trainer.observer.records:
                trainer.observer.records.cut_after(math.inf)
                finish_deleting(trainer, start)
            export_hf(trainer, world)
            end_with_mirror(trainer, world, code=0)
            say_next(trainer, code=0)
        return "already finished", 0
    enter_groups(trainer, start, world, attempt)
    observer = trainer.observer
    observer.run = RunInfo(run, world.rank, world.size, trainer.runner.cfg, trainer.runner.model)
    observer.call("start")
    on_host = world.device.type == "cpu"
    memory = freed_memory_stays() if on_host else nullcontext()
    with summarize_compiler_errors(), comparing_ranks(trainer, world), memory:
        reason, code = fit_with_rewinds(trainer)
    if code == 0:
        trainer.skip_limit.require_learnt(trainer.progress)
    observer.call("end", reason, code)
    if code == 0:
        report_end(trainer, reason)
        if trainer.runner.groups.leads:
            export_hf(trainer, world)
        end_with_mirror(trainer, world, code)
        end = f"done: {run}"
    else:
        end_with_mirror(trainer, world, code)
        step = trainer.progress.step
        saved = "checkpoint committed" if step else "nothing to save yet"
        advice = how_to_go_on(trainer.runner.cfg.checkpoint.resume)
        end = f"stopped by {reason} after step {step:,}, {saved}: {advice}"
    say(time_line(phases.seconds()))
    say(end)
    say_next(trainer, code)
    return reason, code


def say_next(trainer: Trainer, code: int) -> None:
    """Print what can be done with a run that is finished, which it is if `code` is 0."""
    cfg, run = trainer.runner.cfg, trainer.checkpoints.store.run
    if code or not trainer.runner.groups.leads:
        return
    for line in next_commands(run, cfg.objective, cfg.data, cfg.adapter.name != "none"):
        trainer.observer.say(line)


def enter_groups(trainer: Trainer, start: Start, world: World, attempt: int) -> None:
    """Meet the other groups of a run. The one that leads opens its records. Collective."""
    lead = partial(record_start, trainer, start, world, attempt)
    trainer.runner.groups.enter(trainer.progress, lead, trainer.stop_check.stop_if_agreed)


def fit_with_rewinds(trainer: Trainer) -> Outcome:
    while True:
        try:
            return trainer.fit()
        except Rewind as spike:
            rewind(trainer, spike.args[0])


def record_start(trainer: Trainer, start: Start, world: World, attempt: int) -> None:
    """Cut the run's files to its current step, and record its start or resumption. Collective."""
    observer, progress = trainer.observer, trainer.progress
    before = run_on_rank_0("open the run's records", partial(open_records, trainer, start))
    event = {
        "step": progress.step,
        "rows": progress.rows,
        "world_size": world.size,
        "attempt": attempt,
        "seconds": round(sum(phases.seconds().values()), 3),
        "about": observer.about,
    }
    if progress.at_start:
        observer.event("start", **event)
        return
    observer.event("resume", **event, changes=start.changes, reached=before)
    observer.say(f"resumes after step {progress.step:,}")
    for key, (then, now) in sorted(start.changes.items()):
        observer.say(f"       {key} was {as_text(then)}, is {as_text(now)}")


def finish_deleting(trainer: Trainer, start: Start) -> None:
    """Delete the checkpoints that the last save of a finished run did not come to delete.

    With other keys of checkpoint than before all stay. Called by rank 0.
    """
    if not any(key.startswith("checkpoint.") for key in start.changes):
        progress = trainer.progress
        best = progress.best_step if trainer.runner.cfg.checkpoint.best else None
        trainer.checkpoints.store.finish_deleting(progress.step, best)


def open_records(trainer: Trainer, start: Start) -> dict[str, Any]:
    """Cut the run's files to its current step, and open them. Called on rank 0.

    Returns the step and time that the run had reached before; the report counts the difference as
    lost.
    """
    cfg, observer, step = trainer.runner.cfg, trainer.observer, trainer.progress.step
    store = trainer.checkpoints.store
    assert observer.records
    last = observer.records.last_line()
    observer.take_up(step)
    store.clear_up(step)
    resolved, file = recorded(cfg), store.run / "config.yaml"
    try:
        file.write_text(dump_yaml(resolved))
    except OSError as error:  # not fatal, since each checkpoint has its own config.yaml
        observer.say(f"{file} cannot be written: {error}; training continues")
    goes_back = repeats_steps(start.changes, last, step)
    whole = step if AMENDS_LINE.isdisjoint(trainer.progress.pending) else step - 1
    observer.open_trackers(cfg.logging, store.run, resolved, whole, goes_back)
    return {name: last.get(name) for name in ("step", "time")}


def repeats_steps(changes: dict[str, list[Any]], last: dict[str, Any], step: int) -> bool:
    """Return True if a run resumes after `step` with settings that give later steps other values.

    last: the last line of the metrics before.
    """
    groups = {key.split(".")[0] for key in changes}
    return not groups <= WITHOUT_VALUES and last.get("step", 0) > step


def comparing_ranks(trainer: Trainer, world: World):
    """Return a context manager that detects slow ranks if logging.stragglers is set."""
    every = trainer.runner.cfg.logging.stragglers
    return comparing(
        parse_duration(every) if every else None,
        world.store,
        world.rank,
        world.size,
        socket.gethostname(),
        trainer.runner.optimizer,
        partial(report_straggler, trainer.observer),
        trainer.runner.dims.stages(),
    )


def report_straggler(observer: Observer, straggler: Straggler, step: int) -> None:
    """Record and print that the others wait for a slow rank."""
    observer.event("straggler", step=step, **asdict(straggler))
    observer.say(
        f"rank {straggler.rank} on {straggler.host} is slow in {straggler.phase}: "
        f"{straggler.seconds:.3f} s a step, the others {straggler.others:.3f} s; "
        f"all wait for it in {straggler.lost:.0%} of the time"
    )


def is_alone(trainer: Trainer) -> bool:
    return not are_groups_beside(trainer.checkpoints.store.run, trainer.runner.cfg.replicas.id)


def already_finished(trainer: Trainer) -> str:
    """Return the message for a run that has nothing left to do, with overrides to train on."""
    step, total = trainer.progress.step, trainer.timetable.total_steps(trainer.progress)
    reason = f"{step:,} of {counted(total, 'step')}. More with  train.steps=…"
    if trainer.finished == "early_stop":
        reason = (
            f"stopped early after step {step:,}, {trainer.progress.stale} validations without a "
            "lower loss. More with  train.early_stop=null"
        )
    run = trainer.checkpoints.store.run
    return f"{run} is already finished: {reason},  anew with  run.name=NEW"


def report_end(trainer: Trainer, reason: str) -> None:
    """Print the run's data by source, its last loss and its validation losses."""
    progress, say = trainer.progress, trainer.observer.say
    since = " since the data was changed" if len(progress.segments) > 1 else ""
    for source in trainer.data.read_by_component(progress):
        say(
            f"data   {source['name']}: {source['share']:.2%} of the tokens{since}, "
            f"requested {source['share_asked']:.2%}; {source['tokens']:,} tokens, "
            f"{source['epochs']:.2f} epochs in total"
        )
    if reason == "early_stop":
        say(f"stopped early: {progress.stale} validations in a row without a lower loss")
    if skipped := trainer.runner.guard.skipped:
        steps = counted(progress.step - progress.first_step, "step")
        say(f"skipped {skipped:,} of {steps}, which changed no weight: see events.jsonl")
    if trainer.observer.last_loss is not None:
        say(f"loss   {trainer.observer.last_loss:.4f} in the last step")
    for line in describe_validation(
        progress, trainer.runner.cfg.checkpoint.best, trainer.checkpoints
    ):
        say(line)


def describe_validation(
    progress: Progress, keeps_best: bool, checkpoints: CheckpointManager
) -> list[str]:
    """Return lines on the first, last and lowest validation loss and the best model's folder."""
    if progress.last_validation is None or progress.best_step is None:
        return []
    first = progress.first_validation
    before = "" if first is None else f", before the first step {first:.4f}"
    lines = [f"valid  loss {progress.last_validation:.4f} at the last validation{before}"]
    folder = checkpoints.store.folder
    best = folder / checkpoint_name(progress.best_step)
    if keeps_best:
        where = str(folder / BEST)
    else:
        where = str(best) if best.is_dir() else "not kept: checkpoint.best=true would keep it"
    lowest = f"{progress.best_loss:.4f} after step {progress.best_step:,}"
    return [*lines, f"best   validation loss {lowest}: {where}"]


def export_hf(trainer: Trainer, world: World) -> None:
    """Export the finished run to a Hugging Face folder (checkpoint.export_hf), if not yet done."""
    if not trainer.runner.cfg.checkpoint.export_hf:
        return
    phases.enter("export")
    # not in a collective, since exporting a large model takes longer than launch.timeout
    world.rank0_then_nodes_then_all(
        "exporting the model",
        lambda: trainer.signals.stoppable(lambda: export_on_main(trainer, world)),
        parse_duration(trainer.runner.cfg.launch.data_timeout),
    )
    dist.barrier()  # rank 0 owns the store and must not leave before all have read from it


def export_on_main(trainer: Trainer, world: World) -> None:
    """Export the best checkpoint, or the last one, on rank 0. Raises RunFailed.

    A run with an adapter exports the adapter, and with checkpoint.merge also the merged model.
    """
    cfg, store = trainer.runner.cfg.checkpoint, trainer.checkpoints.store
    best = store.folder / BEST
    newest = committed_checkpoints(store.run)[-1]
    checkpoint = best.resolve() if cfg.best and best.exists() else newest
    if not world.main:
        return
    adapted = bool(read_base(checkpoint).adapters)
    if adapted:
        export_once(trainer, store.run / "adapter", checkpoint, export_adapter)
    if cfg.merge or not adapted:
        export_once(trainer, store.run / "hf", checkpoint, export_checkpoint)


def export_once(
    trainer: Trainer,
    out: Path,
    checkpoint: Path,
    write: Callable[[Path, Path, str | None], list[str] | None],
) -> None:
    """Write an export and record it, unless it exists already. Raises RunFailed."""
    dtype = trainer.runner.cfg.checkpoint.export_dtype
    if is_export_of(out, checkpoint, dtype):
        return
    began = time.monotonic()
    try:
        notes = write(checkpoint, out, dtype)
    except OSError as error:
        raise RunFailed(f"cannot write the export {out}: {error}") from None
    for note in notes or []:
        trainer.observer.say(note)
    seconds = round(time.monotonic() - began, 3)
    trainer.observer.event("export", step=step_of(checkpoint), path=str(out), seconds=seconds)
