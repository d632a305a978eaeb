"""SwanLab: logging.swanlab."""

from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker


class SwanLab(Tracker):
    """A run of SwanLab. Offline, each start of the run leaves a folder in swanlab/ for its `sync`.

    SwanLab itself drops a step that it has, so a killed process's are logged again.
    """

    is_durable = False

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        import swanlab

        self._tracked = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=run.mode,
            log_dir=str(run.folder / "swanlab"),
            config=run.config,
            reinit=True,
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tracked.log(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._tracked.log_text(key=name, data=text, step=step)

    def close(self, exit_code: int) -> None:
        if exit_code == 0:
            self._tracked.finish()
        else:
            self._tracked.finish(state="crashed", error=f"exit code {exit_code}")
