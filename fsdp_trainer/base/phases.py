"""The clock of a rank: the phase and step that each of its two threads is in, and for how long.

All phases begin with `enter`. Code that must know of them (the profiler, the slot that the watchdog
reads) registers a listener.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CHECKPOINT = ("staging", "shards", "manifest", "rename", "prune")
PHASES = (
    *("start", "data", "forward", "backward", "clip", "update", "profile"),
    *("validation", "samples", "evaluation", "rollouts", "environments", "rewards", "log", "read"),
    *CHECKPOINT,
    *("agree", "export", "end", "rewind", "check", "compile", "groups"),
)
"""All phases, in the order of a step. `read` waits until the device has finished its work, `agree`
is the all-reduce that decides whether to stop, `check` looks for wrong bits, `compile` interrupts
another phase, `groups` waits for other groups of ranks and for sums over them."""


@dataclass
class ThreadPhase:
    """The current phase of a thread, and the seconds it has spent in each phase.

    ident: threading.get_ident() of the training thread, 0 for the other thread. since:
    time.monotonic() when the phase began. entered: number of phases begun, including this one.
    spent: by phase, how often it ended and its total seconds.
    """

    ident: int | None = 0
    step: int = 0
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    entered: int = 1
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)

    def enter(self, phase: str, step: int | None = None) -> None:
        now = time.monotonic()
        ended = self.phase
        times, seconds = self.spent.get(ended, (0, 0.0))
        self.spent[ended] = times + 1, seconds + now - self.since
        self.phase = phase
        self.since = now
        self.step = self.step if step is None else step
        self.entered += 1
        for listener in _listeners:
            listener(self, ended)


Listener = Callable[[ThreadPhase, str], None]
"""A function called with the thread that has begun a phase and the name of the phase that ended."""

training = ThreadPhase(threading.main_thread().ident)
"""The thread that trains."""
background = ThreadPhase()
"""The thread that writes checkpoints."""
_listeners: tuple[Listener, ...] = ()
_reported: dict[str, float] = {}


def begin() -> None:
    """Start the clock of a new run. The calling thread becomes the training thread."""
    global training, background
    training = ThreadPhase(threading.get_ident())
    background = ThreadPhase()
    _reported.clear()


def enter(phase: str, step: int | None = None) -> None:
    """Begin a phase of the calling thread, and a new step if `step` is given. Takes about 1 µs."""
    thread = training if threading.get_ident() == training.ident else background
    thread.enter(phase, step)


def add_listener(listener: Listener) -> None:
    global _listeners
    _listeners = (*_listeners, listener)


def remove_listener(listener: Listener) -> None:
    global _listeners
    _listeners = tuple(other for other in _listeners if other != listener)


def seconds() -> dict[str, float]:
    """Return the training thread's seconds in each phase. They sum to the time since `begin`."""
    spent = {phase: seconds for phase, (_, seconds) in training.spent.items()}
    current = spent.get(training.phase, 0.0) + time.monotonic() - training.since
    return spent | {training.phase: current}


def seconds_since_last_call() -> dict[str, float]:
    """Return the increase of `seconds` since the last call, without phases that did not run."""
    now = seconds()
    gained = {phase: spent - _reported.get(phase, 0.0) for phase, spent in now.items()}
    _reported.update(now)
    return {phase: round(spent, 6) for phase, spent in gained.items() if spent > 0}


class Compiling:
    """Callbacks at the start and end of torch.compile, which count its time as phase `compile`.

    The compiler may run in one of autograd's threads; its time counts for the training thread.
    """

    interrupted = "start"

    def begins(self, _: object) -> None:
        self.interrupted = training.phase
        training.enter("compile")

    def ends(self, _: object) -> None:
        training.enter(self.interrupted)


compiling = Compiling()


def in_collective(files: Iterable[str]) -> bool:
    """Return True if a thread waits in a collective.

    files: source files of the thread's frames, innermost first. torch/_ops.py is skipped: it only
    forwards calls. DTensor and checkpoints are below torch/distributed too, but a thread in their
    own files works on the host.
    """
    file = next((file for file in files if not file.endswith("/torch/_ops.py")), "")
    elsewhere = "/distributed/tensor/" in file or "/distributed/checkpoint/" in file
    return "/torch/distributed/" in file and not elsewhere
