"""Python's garbage collection at chosen steps.

A rank that collects while the others wait for it in a collective costs all of them its pause.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_garbage(every: int | None) -> Iterator[Callable[[int], None]]:
    """Give a function to call after each step, which collects after every so many of them.

    None leaves Python's own collector at work, which is on again at the end. What is alive after
    the first step lives as long as the run: it is frozen, so that later collections do not look at
    it. At the end nothing stays frozen, whoever froze it: a run's model is in reference cycles, and
    the process may begin another run.
    """
    if every is None:
        yield lambda step: None
        return
    was_enabled = gc.isenabled()
    first_step = True

    def collect(step: int) -> None:
        nonlocal first_step
        if first_step:
            gc.collect()
            gc.freeze()
            first_step = False
        elif step % every == 0:
            gc.collect()

    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
