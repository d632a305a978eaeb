"""Python's garbage collection at chosen steps: a rank that collects while the others wait for it in a collective costs all of them its pause."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_garbage(every: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step. None leaves Python's own collector at work, as it is again at the end.

    What lives after the first step lives on for as long as the run: it is frozen, so that later collections do not go through it.
    At the end nothing stays frozen, whoever froze it: a run's model lies in cycles, and the process may begin another run.
    """
    if every is None:
        yield lambda step: None
        return
    enabled, frozen = gc.isenabled(), False

    def collect(step: int) -> None:
        nonlocal frozen
        if not frozen:
            gc.collect()
            gc.freeze()
            frozen = True
        elif step % every == 0:
            gc.collect()

    gc.disable()
    try:
        yield collect
    finally:
        if frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
