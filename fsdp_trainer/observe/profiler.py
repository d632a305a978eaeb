"""Traces of a few steps: what ran when, on the host and on the device, in which phase, and who held which memory."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_trainer import phases
from fsdp_trainer.config.schema import Profile
from fsdp_trainer.config.units import parse_steps
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_phases import Told, phases_of, read_trace, table

if TYPE_CHECKING:
    from fsdp_trainer.launch.world import World

MEMORY_EVENTS = 1_000_000  # allocations that a snapshot remembers
MOST_RANKS = 8  # by default: a thousand traces are nobody's wish


class Profiler:
    """Records the steps that `profile.steps` names, on the ranks that are to. Never stops a run."""

    def __init__(self, cfg: Profile, run: Path, world: "World", observer: Observer):
        """Raises UserError for a rank that is not there."""
        if missing := [r for r in cfg.ranks or [] if r >= world.size]:
            why = f"there is no rank {missing[0]}: the last of {world.size} is {world.size - 1}"
            raise UserError("no such rank to profile", [Problem(f"profile.ranks={cfg.ranks}", why)])
        self.first, self.last = parse_steps(cfg.steps) if cfg.steps else (0, -1)
        self.folder, self.rank, self.observer = run / "profile", world.rank, observer
        self.wanted = world.rank in (
            range(min(MOST_RANKS, world.size // world.nodes)) if cfg.ranks is None else cfg.ranks
        )
        self.memory, self.snapshot = cfg.memory, cfg.memory and observer.device.type == "cuda"
        self._began, self._step = 0, 0
        self._trace: profile | None = None
        self._open: list[record_function] = []  # the step's slice, and the phase's within it
        if (
            self.snapshot and self.wanted and not cfg.steps
        ):  # whoever looks for what fills the memory does not know the step
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def before(self, step: int) -> None:
        """A step begins, before any of its phases. A run that goes on in the middle of the range records what is left of it."""
        if not self.first <= step <= self.last:
            return
        if not self._began:
            self._began = step
            phases.enter("profile")
            with self.observer.apart("profile"):
                self._start()
                dist.all_reduce(
                    torch.zeros(())
                )  # or the first step would be that much longer where this took less
        self._step = step
        if self._trace:
            self._slice(0, f"step {step}")
            phases.listener = partial(self._slice, 1)

    def after(self, step: int) -> None:
        """A step has ended, with all that follows it; after the last one the files are written. Collective."""
        self._slice(0)
        if step == self.last:
            self.close()

    def _slice(self, depth: int, name: str = "") -> None:
        """End the slices of the trace from `depth` on, and begin another there."""
        phases.listener = phases.listener if depth else None
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)
        if name:
            self._open.append(record_function(name))
            self._open[-1].__enter__()

    def _start(self) -> None:
        if self.memory and not self.snapshot:
            self.observer.console.say(
                "profile.memory: snapshots are the GPU's; on a CPU the trace has the allocations' sizes"
            )
        if not self.wanted:
            return
        cuda = [ProfilerActivity.CUDA] if self.observer.device.type == "cuda" else []
        try:
            if cuda:
                torch.cuda.synchronize()  # what earlier steps left to do is none of these
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            trace = profile(
                activities=[ProfilerActivity.CPU, *cuda],
                record_shapes=True,
                profile_memory=self.memory,
            )
            trace.__enter__()
            self._trace = trace
        except Exception as error:  # another profiler may be at work
            self._tell_failure(error)

    def close(self, alone: bool = False) -> None:
        """Write what was recorded: at the end of the range, or where the run ends before. Collective, unless this rank is `alone`."""
        if not self._began:
            return
        phases.enter("profile")
        with self.observer.apart("profile") as seconds:
            began, self._began = self._began, 0
            self._slice(0)
            name = f"steps-{began}-{self._step}"
            mine = self._write(f"{name}-rank-{self.rank}")
            ranks: list[Told | None] = [mine]
            if not alone:
                ranks = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
            told = {
                rank: of
                for rank, of in zip([self.rank] if alone else range(len(ranks)), ranks, strict=True)
                if of
            }
            self.observer.event(
                "profile",
                steps=[began, self._step],
                path=str(self.folder),
                seconds=round(seconds(), 3),
            )
        self.observer.console.say(f"profile of steps {began:,} to {self._step:,}: {self.folder}")
        if told and self.observer.records:
            with suppress(OSError):
                (self.folder / f"{name}-phases.json").write_text(
                    json.dumps({"steps": [began, self._step], "ranks": told}, indent=1)
                )
            for line in table(told):
                self.observer.console.say(f"       {line}")

    def _write(self, name: str) -> Told | None:
        """This rank's trace and snapshot. Returns where the time went; None if this rank was not to record it, or could not."""
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
        except Exception as error:  # a full disk, or whatever the profiler's library throws
            self._tell_failure(error)
            return None
        finally:
            if self.snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def out_of_memory(self) -> Path | None:
        """The snapshot of a rank that has run out, if it was recorded."""
        file = self.folder / f"oom-rank-{self.rank}.pickle"
        if not self.snapshot or not self.wanted:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
        except Exception as error:
            self._tell_failure(error)
            return None
        return file

    def _tell_failure(self, error: Exception) -> None:
        self.observer.console.say(f"profile: {type(error).__name__}: {error}. Training goes on.")
