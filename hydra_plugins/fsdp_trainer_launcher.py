"""Registration of our launchers, sweepers and source of files with Hydra.

It finds plugins only in this package.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext

from fsdp_trainer.config.composing.recipe_files import read_yaml
from fsdp_trainer.config.sweep_keys import LAUNCHERS, SWEEPERS


class OwnFiles(FileConfigSource):
    """The files of --config-dir, which are read by our loader before Hydra's, which has no limits."""

    @staticmethod
    def scheme() -> str:
        """Return what the addresses of such folders begin with."""
        return "own"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file. Raises UserError."""
        read_yaml(Path(self.path) / self._normalize_file_name(config_path))
        return super().load_config(config_path)


class FsdpTrainerLauncher(Launcher):
    """The launcher for hydra/launcher=NAME, for each NAME in config.sweeping.

    It passes jobs on to the code of `fsdp-trainer -m` that runs them, and works only there.
    """

    def __init__(self, **settings: Any):
        """Accept the launcher's keys. They are read by the code that runs the jobs."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: Any) -> None:
        """Keep the function that runs jobs.

        task_function: runs a batch, one job for each list of overrides, and returns their
        objectives.
        """
        self.run_batch = task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch. A job's return value is its objective, for sweepers that search; NaN: none."""
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
):  # their jobs bypass Hydra, which cannot choose the next jobs by the results of earlier ones
    ConfigStore.instance().store(name, asdict(settings()), "hydra/sweeper", provider="fsdp_trainer")
for name, settings in LAUNCHERS.items():
    plugin = f"{__name__}.{FsdpTrainerLauncher.__name__}"
    ConfigStore.instance().store(
        name, {"_target_": plugin, **asdict(settings())}, "hydra/launcher", provider="fsdp_trainer"
    )
