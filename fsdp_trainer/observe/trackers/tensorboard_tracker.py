"""TensorBoard's files in the run's folder: logging.tensorboard."""

from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Files of events. Steps that an earlier attempt wrote, and that are repeated, are hidden."""

    takes_back = True

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        if run.is_new and folder.exists():  # an earlier version wrote no last step
            self.newest = run.step
        self._open, self._last, self._folder = SummaryWriter, self.newest, str(folder)
        purged = self.newest + 1 if folder.exists() else None
        self._writer = self._open(self._folder, purge_step=purged)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write the numbers of a step to the disk, where a killed process leaves them."""
        if step <= self._last:
            self._writer.close()
            self._writer = self._open(self._folder, purge_step=step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)

    def close(self, exit_code: int) -> None:
        self._writer.close()
