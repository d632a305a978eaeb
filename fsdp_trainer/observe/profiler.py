"""Profiler traces of a few steps: work on host and device by phase, and allocated memory."""

import json
import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_trainer.base import phases
from fsdp_trainer.config.durations import parse_steps
from fsdp_trainer.config.schema import Profile
from fsdp_trainer.errors import UserError
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepClock
from fsdp_trainer.observe.step_phases import PhaseTimes, phases_of, read_trace, table

MEMORY_EVENTS = 1_000_000  # allocations that a snapshot keeps
MAX_RANKS = 8  # ranks traced by default; nobody would read a thousand traces


class Profiler:
    """Recorder of the steps in `profile.steps` on `profile.ranks`. Its failures stop no run."""

    def __init__(
        self,
        cfg: Profile,
        run: Path,
        rank: int,
        ranks: int,
        node_ranks: int,
        observer: Observer,
        clock: StepClock,
    ):
        """Set up, without recording yet. Raises UserError for a rank that does not exist.

        ranks: number of ranks in the world. node_ranks: number of ranks of one node; by default
        only the first node is traced.
        """
        if missing := [r for r in cfg.ranks or [] if r >= ranks]:
            reason = f"there is no rank {missing[0]}: the last of {ranks} is {ranks - 1}"
            raise UserError("no such rank to profile", f"profile.ranks={cfg.ranks}", reason)
        self.first, self.last = parse_steps(cfg.steps) if cfg.steps else (0, -1)
        self.folder, self.rank = run / "profile", rank
        self.observer, self.clock = observer, clock
        self.wanted = rank in (
            range(min(MAX_RANKS, node_ranks)) if cfg.ranks is None else cfg.ranks
        )
        self.memory, self.snapshot = cfg.memory, cfg.memory and observer.device.type == "cuda"
        self._began, self._step = 0, 0
        self._trace: profile | None = None
        self._open: list[record_function] = []  # the slices of the current step and its phase
        if self.snapshot and self.wanted and not cfg.steps:
            # for out_of_memory: the step at which memory runs out is not known beforehand
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def before(self, step: int) -> None:
        """Begin a step, before its first phase. Collective.

        A run resumed within the range records the remaining steps.
        """
        if not self.first <= step <= self.last:
            return
        if not self._began:
            self._began = step
            phases.enter("profile")
            with self.clock.excluded():
                self._start()
                # wait here for the slowest rank, or the wait would count in the first step
                dist.all_reduce(torch.zeros(()))
        self._step = step
        if self._trace:
            self._end_step()
            self._slice(0, f"step {step}")
            phases.add_listener(self._phase_began)

    def after(self, step: int) -> None:
        """End a step and the work that followed it; write the files after the last. Collective."""
        self._end_step()
        if step == self.last:
            self.close()

    def _phase_began(self, thread: phases.ThreadPhase, _ended: str) -> None:
        if thread.ident == threading.get_ident():  # the compiler may run in an autograd thread
            self._slice(1, thread.phase)

    def _end_step(self) -> None:
        phases.remove_listener(self._phase_began)
        self._slice(0)

    def _slice(self, depth: int, name: str = "") -> None:
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)
        if name:
            self._open.append(record_function(name))
            self._open[-1].__enter__()

    def _start(self) -> None:
        if self.memory and not self.snapshot:
            self.observer.console.say(
                "profile.memory: snapshots are the GPU's; on a CPU the trace has the allocations' "
                "sizes"
            )
        if not self.wanted:
            return
        cuda = [ProfilerActivity.CUDA] if self.observer.device.type == "cuda" else []
        try:
            if cuda:
                torch.cuda.synchronize()  # finish the work of earlier steps
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            trace = profile(
                activities=[ProfilerActivity.CPU, *cuda],
                record_shapes=True,
                profile_memory=self.memory,
                acc_events=True,  # there is one cycle; otherwise torch warns that it clears events
            )
            trace.__enter__()
            self._trace = trace
        except Exception as error:  # another profiler may be running
            self._report_failure(error)

    def close(self, alone: bool = False) -> None:
        """Write the recorded files, at the end of the range or of the run.

        Collective, unless this rank is `alone`.
        """
        if not self._began:
            return
        phases.enter("profile")
        with self.clock.excluded() as seconds:
            began, self._began = self._began, 0
            self._end_step()
            name = f"steps-{began}-{self._step}"
            mine = self._write(f"{name}-rank-{self.rank}")
            ranks: list[PhaseTimes | None] = [mine]
            if not alone:
                ranks = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
            numbers = [self.rank] if alone else range(len(ranks))
            by_rank = {n: times for n, times in zip(numbers, ranks, strict=True) if times}
            self.observer.event(
                "profile",
                steps=[began, self._step],
                path=str(self.folder),
                seconds=round(seconds(), 3),
            )
        self.observer.console.say(f"profile of steps {began:,} to {self._step:,}: {self.folder}")
        if by_rank and self.observer.records:
            with suppress(OSError):
                (self.folder / f"{name}-phases.json").write_text(
                    json.dumps({"steps": [began, self._step], "ranks": by_rank}, indent=1)
                )
            for line in table(by_rank):
                self.observer.console.say(f"       {line}")

    def _write(self, name: str) -> PhaseTimes | None:
        """Write this rank's trace and snapshot, and return the time by row.

        Returns None if this rank recorded nothing or the files cannot be written.
        """
        trace, self._trace = self._trace, None
        try:
            if not trace:
                return None
            trace.__exit__(None, None, None)
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
            if self.snapshot:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.pickle"))
            return phases_of(read_trace(self.folder / f"{name}.json.gz"))
        except Exception as error:  # a full disk, or any error of the profiler's library
            self._report_failure(error)
            return None
        finally:
            if self.snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def out_of_memory(self) -> Path | None:
        file = self.folder / f"oom-rank-{self.rank}.pickle"
        if not self.snapshot or not self.wanted:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
        except Exception as error:
            self._report_failure(error)
            return None
        return file

    def _report_failure(self, error: Exception) -> None:
        self.observer.console.say(f"profile: {type(error).__name__}: {error}. Training continues.")
