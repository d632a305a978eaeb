"""What Hydra is to know of our launchers and sweepers. It lies here because Hydra takes plugins from `hydra_plugins` only."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext

from fsdp_trainer.config.sweeping import LAUNCHERS, SWEEPERS


class FsdpTrainerLauncher(Launcher):
    """hydra/launcher=NAME, for each of config.sweeping's: hands jobs on to those who run them. For `fsdp-trainer -m`, not for other programs."""

    def __init__(self, **settings: Any):
        """settings: the launcher's keys, which those read who run the jobs."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: Any) -> None:
        """task_function: runs a batch, one job for each list of overrides, and gives their objectives."""
        self.run_batch = task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch. What a job returns is its objective, for sweepers that search; NaN: it has none."""
        return [
            JobReturn(
                overrides=list(overrides), status=JobStatus.COMPLETED, _return_value=objective
            )
            for overrides, objective in zip(
                job_overrides, self.run_batch(job_overrides), strict=True
            )
        ]


for (
    name,
    settings,
) in (
    SWEEPERS.items()
):  # whose jobs go past Hydra: it has no way to run some, look at them and then choose the next
    ConfigStore.instance().store(name, asdict(settings()), "hydra/sweeper", provider="fsdp_trainer")
for name, settings in LAUNCHERS.items():
    plugin = f"{__name__}.{FsdpTrainerLauncher.__name__}"
    ConfigStore.instance().store(
        name, {"_target_": plugin, **asdict(settings())}, "hydra/launcher", provider="fsdp_trainer"
    )
