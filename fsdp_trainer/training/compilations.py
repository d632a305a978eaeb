"""A record of the compilations by torch.compile during a run."""

from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.parallel.compile import Compilations


class CompilationLog:
    """Records each compilation, and warns if blocks are compiled again in a later step."""

    def __init__(self, observer: Observer, compiled: bool):
        """compiled: True if the run uses torch.compile."""
        self.observer = observer
        self.compilations = Compilations() if compiled else None
        self._steps_compiled = 0

    def report(self, step: int, during: str) -> None:
        """Record the compilations since the last call. during: `training` or `validation`."""
        graphs, cached = self.compilations.new() if self.compilations else (0, 0)
        if not graphs:
            return
        self.observer.event("compile", step=step, during=during, graphs=graphs, cached=cached)
        if during != "training":
            return
        self._steps_compiled += 1
        if self._steps_compiled > 1:
            self.observer.say(
                f"compile: blocks were compiled again in step {step:,}; "
                "TORCH_LOGS=recompiles in the environment says why"
            )
