"""A record of what torch.compile did during a run."""

from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.parallel.compile import Compilations


class CompilationLog:
    """Records each compilation, and warns of blocks that are compiled again after the first
    step."""

    def __init__(self, observer: Observer, compiled: bool):
        """compiled: whether the run compiles at all."""
        self.observer = observer
        self.compilations = Compilations() if compiled else None
        self._steps_compiled = 0

    def report(self, step: int, during: str) -> None:
        """Record what was compiled since the last call. during: `training` or `validation`."""
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
