"""Python's garbage collection at fixed steps, on all ranks at once.

If each rank collected at its own time, the others would wait for it in a collective every time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_trainer.training.progress import Progress


class GarbageCollection:
    """Collects garbage after the first step and after every `every` steps. See AfterStep.

    every: None: Python's automatic collector stays on.
    """

    def __init__(self, every: int | None):
        self.every = every
        self._is_first = True

    @contextmanager
    def at_fixed_steps(self) -> Iterator[None]:
        """Return a context in which garbage is collected by `run` alone, if `every` is set.

        Objects that exist after the first step live as long as the run, so they are frozen and
        later collections skip them. At the end all objects are unfrozen, including any frozen
        elsewhere: the run's model is in reference cycles and must be collected if the process
        begins another run.
        """
        if self.every is None:
            yield
            return
        was_enabled = gc.isenabled()
        self._is_first = True
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def due(self, progress: Progress) -> bool:
        return self.every is not None and (self._is_first or progress.step % self.every == 0)

    def run(self, progress: Progress) -> None:
        gc.collect()
        if self._is_first:
            gc.freeze()
            self._is_first = False
