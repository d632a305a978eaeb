"""Names the rank that the others wait for. In a collective all are as slow as the slowest: only what each does outside of them tells."""

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

from fsdp_trainer import phases

SAMPLE_SECONDS = 0.05
STEPS = 3  # at least, in a comparison
TIMED_EVERY = 20  # optimizer steps, on a device
OF_A_STEP = ("data", "forward", "backward", "clip", "update", "log", "agree")
FACTOR, SHARE, SECONDS = (
    1.3,
    0.2,
    0.005,
)  # slower than the median of the others, of a step's time, and in all: below that it is noise


@dataclass
class Pace:
    """What a rank needed over some steps. seconds: by phase, outside collectives; wall: of the steps; device: of one optimizer step on the GPU."""

    host: str
    steps: int = 0
    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    device: float | None = None


@dataclass
class Straggler:
    """A rank that needs `seconds` a step in a phase where the others' median is `others`; lost: share of every step that all wait for it."""

    rank: int
    host: str
    phase: str
    seconds: float
    others: float
    lost: float


def slowest(paces: dict[int, Pace]) -> Straggler | None:
    """The rank that all others wait for, if there is one."""
    busy = {rank: sum(pace.seconds.values()) / pace.steps for rank, pace in paces.items()}
    rank = max(busy, key=lambda rank: busy[rank])
    excess, wall = busy[rank] - median_of_others(busy, rank), paces[rank].wall / paces[rank].steps
    if excess > max(SECONDS, SHARE * wall) and busy[rank] > FACTOR * median_of_others(busy, rank):
        by_phase = {
            p: {r: pace.seconds.get(p, 0.0) / pace.steps for r, pace in paces.items()}
            for p in OF_A_STEP
        }
        phase = max(
            OF_A_STEP, key=lambda p: by_phase[p][rank] - median_of_others(by_phase[p], rank)
        )
        return Straggler(
            rank,
            paces[rank].host,
            phase,
            by_phase[phase][rank],
            median_of_others(by_phase[phase], rank),
            min(1.0, excess / wall),
        )
    device = {rank: pace.device for rank, pace in paces.items() if pace.device}
    if len(device) < len(paces):
        return None
    rank = max(device, key=lambda rank: device[rank])
    others = median_of_others(device, rank)
    if device[rank] > FACTOR * others:
        return Straggler(
            rank,
            paces[rank].host,
            "update on its device",
            device[rank],
            others,
            (device[rank] / others - 1) / (device[rank] / others),
        )
    return None


def median_of_others(values: dict[int, float], rank: int) -> float:
    """With two ranks, the other's."""
    return median(value for other, value in values.items() if other != rank)


@contextmanager
def comparing(
    every: float | None,
    store: dist.Store,
    rank: int,
    size: int,
    host: str,
    optimizer: Optimizer,
    tell: Callable[[Straggler, int], None],
) -> Iterator[None]:
    """Compare the ranks every so many seconds, outside any collective: `tell` hears, on rank 0, of a straggler and of the step until which it was one."""
    if every is None or size == 1:
        yield
        return
    sampler = Sampler(every, store, rank, size, host, tell)
    hooks = (
        sampler.time_on_device(optimizer)
        if any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        else []
    )
    sampler.start()
    try:
        yield
    finally:
        sampler.ended.set()
        for hook in hooks:
            hook.remove()


class Sampler(threading.Thread):
    """Looks 20 times a second at what the thread that started it is doing."""

    def __init__(
        self,
        every: float,
        store: dist.Store,
        rank: int,
        size: int,
        host: str,
        tell: Callable[[Straggler, int], None],
    ):
        super().__init__(name="stragglers", daemon=True)
        self.every, self.store, self.rank, self.size, self.host, self.tell = (
            every,
            store,
            rank,
            size,
            host,
            tell,
        )
        self.watched, self.ended = threading.get_ident(), threading.Event()
        self.device_seconds: list[float] = []
        self._told: tuple[int, str] | None = None

    def run(self) -> None:
        """Until the training ends, or the store, which goes with rank 0."""
        try:
            while not self.ended.is_set():
                pace, step = self.measure()
                if self.ended.is_set():
                    return
                self.store.set(f"pace of rank {self.rank}", json.dumps(asdict(pace)))
                if self.rank == 0:
                    self.ended.wait(
                        min(2.0, self.every / 4)
                    )  # the others measure as long, and began about when this one did
                    self.compare(step)
        except (RuntimeError, OSError):
            return

    def measure(self) -> tuple[Pace, int]:
        """The steps of some time, and the last of them."""
        while phases.main.step < 2 and not self.ended.wait(SAMPLE_SECONDS):
            pass
        first, began = phases.main.step, time.monotonic()
        before, wall = began, 0.0
        seconds: dict[str, float] = defaultdict(float)
        while not self.ended.wait(SAMPLE_SECONDS):
            now, phase = time.monotonic(), phases.main.phase
            if phase in OF_A_STEP or phase == "read":
                wall += now - before
                frame = sys._current_frames().get(self.watched)
                # the host reads what its device has done: whoever is late there is not seen here
                if phase != "read" and not phases.in_collective(files_of(frame)):
                    seconds[phase] += now - before
            before = now
            steps = phases.main.step - first
            if now - began >= self.every and steps >= STEPS:
                break
        device, self.device_seconds = self.device_seconds, []
        return Pace(
            self.host,
            max(1, phases.main.step - first),
            wall,
            dict(seconds),
            median(device) if device else None,
        ), phases.main.step

    def compare(self, step: int) -> None:
        """Rank 0 looks at what all have put into the store, and tells what is new."""
        keys = [f"pace of rank {rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return
        found = slowest(
            {rank: Pace(**json.loads(told)) for rank, told in enumerate(self.store.multi_get(keys))}
        )
        name = (found.rank, found.phase) if found else None
        if found and name != self._told:
            self.tell(found, step)
        self._told = name

    def time_on_device(self, optimizer: Optimizer) -> list[Any]:
        """Now and then an optimizer step, which no rank waits in: how fast this GPU is. Read when it has passed, without a wait."""
        count, begin, end = (
            0,
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )

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
    """Innermost first."""
    while frame:
        yield frame.f_code.co_filename
        frame = frame.f_back
