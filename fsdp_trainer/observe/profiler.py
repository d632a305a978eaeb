"""Traces of a few steps: what ran when, on the host and on the device, and who held which memory."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_trainer import phases
from fsdp_trainer.config.schema import Profile
from fsdp_trainer.config.units import parse_steps
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.observe.observer import Observer

MEMORY_EVENTS = 1_000_000  # allocations that a snapshot remembers


class Profiler:
    """Records the steps that `profile.steps` names, on the ranks that are to. Never stops a run."""

    def __init__(self, cfg: Profile, run: Path, rank: int, ranks: int, observer: Observer):
        """Raises UserError for a rank that is not there."""
        if missing := [r for r in cfg.ranks if r >= ranks]:
            why = f"there is no rank {missing[0]}: the last of {ranks} is {ranks - 1}"
            raise UserError("no such rank to profile", [Problem(f"profile.ranks={cfg.ranks}", why)])
        self.first, self.last = parse_steps(cfg.steps) if cfg.steps else (0, -1)
        self.folder, self.rank, self.observer = run / "profile", rank, observer
        self.wanted, self.snapshot = rank in cfg.ranks, cfg.memory and observer.device.type == "cuda"
        self.memory = cfg.memory
        self._began, self._step = 0, 0
        self._trace: profile | None = None
        self._label: Any = None

    def before(self, step: int) -> None:
        """A step begins. A run that goes on in the middle of the range records what is left of it."""
        if not self.first <= step <= self.last:
            return
        if not self._began:
            self._began = step
            phases.enter("profile")
            with self.observer.apart("profile"):
                self._start()
        self._step = step
        if self._trace:
            self._label = record_function(f"step {step}")
            self._label.__enter__()

    def after(self, step: int) -> None:
        """A step has ended; after the last one the files are written."""
        if self._label:
            self._label.__exit__(None, None, None)
            self._label = None
        if step == self.last:
            phases.enter("profile")
            with self.observer.apart("profile"):
                self.close()

    def _start(self) -> None:
        if self.memory and not self.snapshot:
            self.observer.console.say("profile.memory: snapshots are the GPU's; on a CPU the trace has the allocations' sizes")
        if not self.wanted:
            return
        cuda = [ProfilerActivity.CUDA] if self.observer.device.type == "cuda" else []
        try:
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            trace = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True, profile_memory=self.memory)
            trace.__enter__()
            self._trace = trace
        except Exception as error:  # another profiler may be at work
            self._tell_failure(error)
            self._began, self.last = 0, -1

    def close(self) -> None:
        """Write what was recorded: at the end of the range, or where the run ends before."""
        if not self._began:
            return
        trace, self._trace, began, self._began = self._trace, None, self._began, 0
        try:
            if trace:
                trace.__exit__(None, None, None)
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"steps-{began}-{self._step}-rank-{self.rank}"
                trace.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
                if self.snapshot:
                    torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.pickle"))
        except Exception as error:  # a full disk, or whatever the profiler's library throws
            self._tell_failure(error)
            return
        finally:
            if self.snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)
        self.observer.event("profile", steps=[began, self._step], path=str(self.folder))
        self.observer.console.say(f"profile of steps {began:,} to {self._step:,}: {self.folder}")

    def _tell_failure(self, error: Exception) -> None:
        self.observer.console.say(f"profile: {type(error).__name__}: {error}. Training goes on.")
