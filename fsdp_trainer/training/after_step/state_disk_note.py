"""A note about a disk of optimizer states that makes most of a step."""

import time
from dataclasses import dataclass, field

from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.optim.offload.offloaded_optimizer import DiskOptimizer
from fsdp_trainer.training.progress import Progress

STEPS = 3
"""Steps that are measured; the first one of a process is not among them."""
MOST = 0.5


@dataclass
class StateDiskNote:
    """Says once how fast the states' disk is, if updates take more than MOST of the first steps.

    See AfterStep.
    """

    optimizer: DiskOptimizer
    observer: Observer
    _steps: int = 0
    _began: float = 0.0
    _before: tuple[float, int] = field(default=(0.0, 0))

    def due(self, progress: Progress) -> bool:
        self._steps += 1
        return self._steps in (1, 1 + STEPS)

    def run(self, progress: Progress) -> None:
        now = self.optimizer.seconds, self.optimizer.bytes_moved
        if self._steps == 1:
            self._began, self._before = time.perf_counter(), now
            return
        seconds, size = (after - before for after, before in zip(now, self._before, strict=True))
        share = seconds / (time.perf_counter() - self._began)
        if share > MOST:
            rate = size / max(seconds, 1e-9)
            self.observer.event(
                "slow_states", step=progress.step, share=round(share, 3), rate=round(rate)
            )
            self.observer.say(
                f"states   updates are {share:.0%} of the time: each rank reads and writes its "
                f"files at {rate / 1e9:.2g} GB/s. A faster local disk (optim.offload_path) or more "
                "rows a step make them a smaller part, see docs/offload.md"
            )
