"""Python's garbage collection at chosen steps: a rank that collects while the others wait for it in a collective costs all of them its pause."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_garbage(every: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step. None leaves Python's own collector at work. Python's state is put back at the end.

    What lives after the first step lives on for as long as the run: it is frozen, so that later collections do not go through it.
    """
    if every is None:
        yield lambda step: None
        return
    enabled, frozen_before, frozen = gc.isenabled(), gc.get_freeze_count(), False

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
        if frozen and not frozen_before:
            gc.unfreeze()
        if enabled:
            gc.enable()
