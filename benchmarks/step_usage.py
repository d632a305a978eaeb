"""Processor time and page faults of steps: of a loop, and by `--import` of a run of this trainer.

A module of its own, since its import registers a callback for all runs of the process.
"""

import json
import resource
import statistics
from typing import Any

import fsdp_trainer
from benchmarks.full_rows import USAGE, WARM
from benchmarks.harness import rank_memory


class Usage:
    """Processor seconds and page faults of each step."""

    def __init__(self) -> None:
        self.marks = [usage()]

    def step(self) -> None:
        """Take down the end of a step."""
        self.marks.append(usage())

    def figures(self) -> dict[str, float]:
        """Return the medians of the steps after WARM, and the peak memory."""
        steps = [
            [after - before for before, after in zip(*pair, strict=True)]
            for pair in zip(self.marks[WARM:], self.marks[WARM + 1 :], strict=False)
        ]
        seconds, faults = map(statistics.median, zip(*steps, strict=True))
        return {
            "processor_ms": 1e3 * seconds,
            "page_faults": faults,
            "memory_mib": rank_memory(),
        }


def usage() -> tuple[float, float]:
    """Return this process's processor seconds and page faults until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, float(used.ru_minflt)


@fsdp_trainer.register("callback", "usage")
class UsageOfRun(fsdp_trainer.Callback):
    """Writes the usage of our steps into the run's folder."""

    def start(self, run: Any) -> None:
        """Begin."""
        self.usage = Usage()

    def step(self, run: Any, step: int) -> None:
        """Count a step."""
        self.usage.step()

    def end(self, run: Any, reason: str, exit_code: int) -> None:
        """Write the figures."""
        (run.folder / USAGE).write_text(json.dumps(self.usage.figures()))
