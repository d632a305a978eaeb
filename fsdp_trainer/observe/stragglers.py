"""Search for a rank that the others wait for.

In a collective all ranks take as long as the slowest, so only time outside collectives is compared.
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_trainer.base import phases

SAMPLE_SECONDS = 0.05
MIN_STEPS = 3  # steps in a comparison
TIMED_EVERY = 20  # optimizer steps for each one that is timed on the device
STEP_PHASES = ("data", "forward", "backward", "clip", "update", "log", "agree")
# A straggler exceeds the median of the others by all of these: this factor, this share of a step,
# and these seconds per step. Less is noise.
MIN_FACTOR = 1.3
MIN_SHARE = 0.2
MIN_SECONDS = 0.005


@dataclass
class RankPace:
    """The time that a rank needed for some steps.

    wall: seconds of these steps. seconds: by phase, outside collectives. device: seconds of one
    optimizer step on the GPU, None without a GPU.
    """

    host: str
    steps: int = 0
    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    device: float | None = None


@dataclass
class Straggler:
    """A rank that needs `seconds` per step in a phase where the median of the others is `others`.

    lost: share of a step during which all other ranks wait for it.
    """

    rank: int
    host: str
    phase: str
    seconds: float
    others: float
    lost: float


def slowest(paces: dict[int, RankPace]) -> Straggler | None:
    return slowest_host(paces) or slowest_device(paces)


def slowest_host(paces: dict[int, RankPace]) -> Straggler | None:
    """Return the rank whose host is slower than the others', with its slowest phase, or None."""
    busy = {rank: sum(pace.seconds.values()) / pace.steps for rank, pace in paces.items()}
    rank = max(busy, key=busy.__getitem__)
    others = median_of_others(busy, rank)
    wall = paces[rank].wall / paces[rank].steps
    excess = busy[rank] - others
    if excess <= max(MIN_SECONDS, MIN_SHARE * wall) or busy[rank] <= MIN_FACTOR * others:
        return None
    by_phase = {
        phase: {r: pace.seconds.get(phase, 0.0) / pace.steps for r, pace in paces.items()}
        for phase in STEP_PHASES
    }
    others_by_phase = {p: median_of_others(seconds, rank) for p, seconds in by_phase.items()}
    phase = max(STEP_PHASES, key=lambda p: by_phase[p][rank] - others_by_phase[p])
    seconds = by_phase[phase][rank]
    lost = min(1.0, excess / wall)
    return Straggler(rank, paces[rank].host, phase, seconds, others_by_phase[phase], lost)


def slowest_device(paces: dict[int, RankPace]) -> Straggler | None:
    """Return the rank whose GPU is slower than the others'; None if none is or some lack times."""
    device = {rank: pace.device for rank, pace in paces.items() if pace.device}
    if len(device) < len(paces):
        return None
    rank = max(device, key=device.__getitem__)
    own = device[rank]
    others = median_of_others(device, rank)
    if own <= MIN_FACTOR * others:
        return None
    return Straggler(rank, paces[rank].host, "update on its device", own, others, 1 - others / own)


def median_of_others(values: dict[int, float], rank: int) -> float:
    """Return the median over all ranks but one; with two ranks that is the other's value."""
    return median(value for other, value in values.items() if other != rank)


@contextmanager
def comparing(
    every: float | None,
    store: dist.Store,
    rank: int,
    size: int,
    host: str,
    optimizer: Optimizer,
    report: Callable[[Straggler, int], None],
    rank_groups: list[list[int]],
) -> Iterator[None]:
    """Compare the ranks every `every` seconds, outside any collective, while the block runs.

    every: None for no comparison. rank_groups: ranks that do the same work, such as those of one
    pipeline stage. report: called on rank 0 with a straggler and the last step compared.
    """
    if every is None or size == 1:
        yield
        return
    sampler = Sampler(every, store, rank, size, host, report, rank_groups)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    hooks = sampler.time_on_device(optimizer) if any(p.is_cuda for p in parameters) else []
    threading.Thread(target=sampler.run, name="stragglers", daemon=True).start()
    try:
        yield
    finally:
        sampler.ended.set()
        for hook in hooks:
            hook.remove()


@dataclass
class Sampler:
    """A sampler that checks the phase of the constructing thread 20 times a second.

    watched: id of that thread. ended: set at the end of training. reported: rank and phase of the
    straggler that was reported last.
    """

    every: float
    store: dist.Store
    rank: int
    size: int
    host: str
    report: Callable[[Straggler, int], None]
    rank_groups: list[list[int]]
    watched: int = field(default_factory=threading.get_ident)
    ended: threading.Event = field(default_factory=threading.Event)
    device_seconds: list[float] = field(default_factory=list)
    reported: tuple[int, str] | None = None

    def run(self) -> None:
        """Measure and compare until training ends, or the store, which rank 0 may host, is gone."""
        try:
            while not self.ended.is_set():
                pace, step = self.measure()
                if self.ended.is_set():
                    return
                self.store.set(f"pace of rank {self.rank}", json.dumps(asdict(pace)))
                if self.rank == 0:
                    # the other ranks began at about the same time and measure equally long
                    self.ended.wait(min(2.0, self.every / 4))
                    self.compare(step)
        except (RuntimeError, OSError):
            return

    def measure(self) -> tuple[RankPace, int]:
        """Return the pace over at least `every` seconds and MIN_STEPS steps, and the last step."""
        while phases.training.step < 2 and not self.ended.wait(SAMPLE_SECONDS):
            pass
        first = phases.training.step
        began = time.monotonic()
        before = began
        wall = 0.0
        seconds: dict[str, float] = defaultdict(float)
        while not self.ended.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            phase = phases.training.phase
            if phase in STEP_PHASES or phase == "read":
                wall += now - before
                frame = sys._current_frames().get(self.watched)
                # in `read` the host waits for its device, which time_on_device measures
                if phase != "read" and not phases.in_collective(files_of(frame)):
                    seconds[phase] += now - before
            before = now
            steps = phases.training.step - first
            if now - began >= self.every and steps >= MIN_STEPS:
                break
        device = self.device_seconds
        self.device_seconds = []
        step = phases.training.step
        on_device = median(device) if device else None
        return RankPace(self.host, max(1, step - first), wall, dict(seconds), on_device), step

    def compare(self, step: int) -> None:
        keys = [f"pace of rank {rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return
        paces = [RankPace(**json.loads(pace)) for pace in self.store.multi_get(keys)]
        groups = [
            {rank: paces[rank] for rank in group} for group in self.rank_groups if len(group) > 1
        ]
        stragglers = [straggler for straggler in map(slowest, groups) if straggler]
        straggler = max(stragglers, key=lambda each: each.lost, default=None)
        name = (straggler.rank, straggler.phase) if straggler else None
        if straggler and name != self.reported:
            self.report(straggler, step)
        self.reported = name

    def time_on_device(self, optimizer: Optimizer) -> list[Any]:
        """Install hooks that time one optimizer step in TIMED_EVERY on the GPU, and return them.

        In an optimizer step no rank waits for another. The time is read later, without waiting for
        the GPU.
        """
        count = 0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def before(*_: Any) -> None:
            nonlocal count
            if count % TIMED_EVERY == 0:
                if count and end.query():
                    self.device_seconds.append(begin.elapsed_time(end) / 1000)
                begin.record()

        def after(*_: Any) -> None:
            nonlocal count
            if count % TIMED_EVERY == 0:
                end.record()
            count += 1

        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def files_of(frame: Any) -> Iterator[str]:
    while frame:
        yield frame.f_code.co_filename
        frame = frame.f_back
