"""Python's garbage collection at fixed steps, on all ranks at once.

If each rank collected at its own time, the others would wait for it in a collective every time.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_garbage(every: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call after each step, which collects garbage after every `every` steps.

    every: None: Python's automatic collector stays on. Otherwise it is off inside the context.
    Objects that exist after the first step live as long as the run, so they are frozen and later
    collections skip them. At the end all objects are unfrozen, including any frozen elsewhere: the
    run's model is in reference cycles and must be collected if the process begins another run.
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
