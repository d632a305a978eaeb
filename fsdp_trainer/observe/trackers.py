"""Where metrics go besides metrics.jsonl. A tracker that fails is reported once and left alone: it never stops a run."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_trainer.config.schema import Logging


class Tracker(NamedTuple):
    """An open tracker: log(values, step), close(exit_code); text(name, text, step) where it takes texts besides."""

    name: str
    log: Callable[[dict[str, Any], int], Any]
    close: Callable[[int], Any]
    text: Callable[[str, str, int], Any] = lambda name, text, step: None


class Trackers:
    """All trackers of a run; rank 0's business alone."""

    def __init__(self, cfg: Logging, run: Path, config: dict[str, Any], say: Callable[[str], None]):
        self.say, self.open = say, []
        openers = {"wandb": lambda: _wandb(cfg, run, config), "tensorboard": lambda: _tensorboard(run)}
        for name in [n for n, wanted in (("wandb", cfg.wandb != "disabled"), ("tensorboard", cfg.tensorboard)) if wanted]:
            try:
                self.open.append(openers[name]())
            except Exception as error:
                say(f"{name} cannot be opened: {error}. metrics.jsonl has everything.")

    def log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        grouped = {f"{name}/{of}": value for name, values in line.items() if isinstance(values, dict) for of, value in values.items()}
        single = {name: value for name, value in line.items() if name != "step" and not isinstance(value, dict)}
        values = {name: value for name, value in (single | grouped).items() if value is not None}
        self._each(lambda tracker: tracker.log(values, line["step"]))

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Samples, by name."""
        self._each(lambda tracker: [tracker.text(name, text, step) for name, text in texts.items()])

    def _each(self, tell: Callable[[Tracker], Any]) -> None:
        for tracker in list(self.open):
            try:
                tell(tracker)
            except Exception as error:  # whatever an outside service throws
                self.open.remove(tracker)
                self.say(f"{tracker.name}: {error}. It gets no more metrics of this run; metrics.jsonl goes on.")

    def close(self, exit_code: int) -> None:
        """Flush; a run that is to go on is not marked as failed."""
        for tracker in self.open:
            try:
                tracker.close(0 if exit_code == 75 else exit_code)
            except Exception as error:
                self.say(f"{tracker.name} did not close: {error}")


def _wandb(cfg: Logging, run: Path, config: dict[str, Any]) -> Tracker:
    """Weights & Biases. The run's id is kept in the run's folder, so that a restart goes on in the same one."""
    import wandb

    kept = run / "wandb_id"
    if not kept.exists():
        kept.write_text(secrets.token_hex(4))
    mode: Any = cfg.wandb
    tracked = wandb.init(project=cfg.project, name=run.name, id=kept.read_text(), resume="allow", mode=mode, dir=run, config=config)
    return Tracker("wandb", lambda values, step: tracked.log(values, step=step), lambda code: tracked.finish(exit_code=code))


def _tensorboard(run: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def log(values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker("tensorboard", log, lambda code: writer.close(), writer.add_text)
