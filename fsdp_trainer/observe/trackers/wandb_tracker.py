"""Weights & Biases: logging.wandb."""

from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases.

    W&B's own ways to go back are not open to every account, nor to a run that is offline.
    """

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        import wandb

        self._tracked = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=run.mode,
            dir=run.folder,
            config=run.config,
        )
        if run.mode == "online":  # offline, each start counts from 0
            self.newest = self._tracked.step - 1

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tracked.log(values, step=step)

    def close(self, exit_code: int) -> None:
        self._tracked.finish(exit_code=exit_code)
