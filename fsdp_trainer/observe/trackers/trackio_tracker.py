"""Trackio: logging.trackio."""

from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker


class Trackio(Tracker):
    """A run of Trackio, in its folder on this machine, or where its own variables say.

    Trackio finds a run by its name alone, which therefore contains the id.
    """

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        import trackio

        self._markdown = trackio.Markdown
        self._tracked = trackio.init(
            run.project, f"{run.name}-{run.id}", config=run.config, resume="allow", embed=False
        )
        # its database or server knows which steps it has; a killed process loses half a second
        self.newest = getattr(self._tracked, "_next_step", run.newest + 1) - 1

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tracked.log(values, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._tracked.log({name: self._markdown(text)}, step)

    def close(self, exit_code: int) -> None:
        self._tracked.finish()
