"""MLflow: logging.mlflow."""

import os
import time
from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker

TEXT = 500  # characters of a parameter that every MLflow server accepts
LAST_STEP = "fsdp_trainer.last_step"
"""Tag that is sent with the metrics of a step, so that a restart knows which steps are there."""


class MLflow(Tracker):
    """A run of MLflow, where MLFLOW_TRACKING_URI says, else in the run's folder."""

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        import mlflow

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it requires a database
            mlflow.set_tracking_uri((run.folder / "mlflow").resolve().as_uri())
        mlflow.set_experiment(run.project)
        mlflow.end_run()  # that of this thread, from which the run goes back
        tracked = mlflow.start_run(
            run_id=None if run.is_new else run.id, run_name=run.name, log_system_metrics=False
        )
        self.id, self._entities = tracked.info.run_id, mlflow.entities
        self._client = mlflow.MlflowClient()
        self.newest = int(tracked.data.tags.get(LAST_STEP, run.newest))
        if run.is_new:
            keys = [(group, name) for group, values in run.config.items() for name in values]
            mlflow.log_params(
                {f"{group}.{name}": str(run.config[group][name])[:TEXT] for group, name in keys}
            )

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the numbers of a step, and in the same request that they are there."""
        now = int(1e3 * time.time())
        metrics = [self._entities.Metric(*item, now, step) for item in values.items()]
        self._client.log_batch(self.id, metrics, tags=[self._entities.RunTag(LAST_STEP, str(step))])

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self.id, text, f"{name}-{step:08}.txt")

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self.id, "FINISHED" if exit_code == 0 else "FAILED")
