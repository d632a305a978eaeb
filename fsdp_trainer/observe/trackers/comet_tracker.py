"""Comet: logging.comet."""

from typing import Any

from fsdp_trainer.base.recorded import flat
from fsdp_trainer.extensions import TrackedRun, Tracker


class Comet(Tracker):
    """An experiment of Comet. Offline, each start of the run leaves an archive in comet/."""

    is_durable = False  # offline, only `end` writes the archive
    id_bytes = 16  # its keys have 32 characters at least

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        import comet_ml

        automatic = dict.fromkeys(
            ("log_code", "log_graph", "parse_args", "auto_param_logging", "auto_metric_logging",
             "auto_output_logging"), False,
        )  # fmt: skip
        self._tracked = comet_ml.start(
            project_name=run.project,
            experiment_key=run.id,
            mode="create" if run.is_new else "get_or_create",  # a first start may have been killed
            online=run.mode == "online",
            experiment_config=comet_ml.ExperimentConfig(
                name=run.name, offline_directory=str(run.folder / "comet"), **automatic
            ),
        )
        self._tracked.log_parameters(dict(flat(run.config)))
        if run.mode == "online" and not run.is_new:
            self.newest = last_step(comet_ml.API().get_experiment_by_key(run.id))

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tracked.log_metrics(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._tracked.log_text(text, step=step, metadata={"name": name})

    def close(self, exit_code: int) -> None:
        """Send the rest, or write the archive."""
        self._tracked.end()


def last_step(experiment: Any) -> int:
    row = experiment and experiment.get_metrics_summary("lr")
    return int(row["stepCurrent"]) if row else -1
