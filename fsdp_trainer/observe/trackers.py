"""Where metrics go besides metrics.jsonl. Each tracker has a thread: one that fails or hangs is reported once and never stops a run."""

import secrets
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple

from fsdp_trainer.config.schema import Logging

WAITING = 1000  # lines that a tracker may lag behind; later ones it does not get
CLOSE_SECONDS = 60.0  # at the end, to send what is left
STOP_SECONDS = 10.0  # the same for a run that was stopped: its launcher does not wait long


class Tracker(NamedTuple):
    """An open tracker: log(values, step), close(exit_code); text(name, text, step) where it takes texts besides."""

    name: str
    log: Callable[[dict[str, Any], int], Any]
    close: Callable[[int], Any]
    text: Callable[[str, str, int], Any] = lambda name, text, step: None


class Feed:
    """One tracker, opened and fed by a thread of its own."""

    def __init__(self, name: str, opened: Callable[[], Tracker], say: Callable[[str], None]):
        self.name, self.opened, self.say, self.missed = name, opened, say, 0
        self._waiting: Queue[Callable[[Tracker], Any] | None] = Queue(WAITING)
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, tell: Callable[[Tracker], Any] | None) -> None:
        """Have the thread do this, in order, None to end; never waits."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(tell)
        except Full:
            if not self.missed:
                self.say(
                    f"{self.name} does not keep up and lacks metrics from here on; metrics.jsonl has everything."
                )
            self.missed += 1

    def close(self, exit_code: int, seconds: float) -> None:
        """Flush, for as long as that."""
        self.put(lambda tracker: tracker.close(exit_code))
        self.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.say(
                f"{self.name} did not close within {seconds:.0f} s; metrics.jsonl has everything."
            )

    def _work(self) -> None:
        try:
            tracker = self.opened()
        except Exception as error:
            self.say(f"{self.name} cannot be opened: {error}. metrics.jsonl has everything.")
            return
        try:
            while tell := self._waiting.get():
                tell(tracker)
        except Exception as error:  # whatever an outside service throws
            self.say(
                f"{self.name}: {error}. It gets no more metrics of this run; metrics.jsonl goes on."
            )


class Trackers:
    """All trackers of a run; rank 0's business alone."""

    def __init__(
        self,
        cfg: Logging,
        run: Path,
        config: dict[str, Any],
        say: Callable[[str], None],
        step: int = 0,
    ):
        """step: after which the run goes on."""
        openers = {
            "wandb": lambda: _wandb(cfg, run, config),
            "tensorboard": lambda: _tensorboard(run, step),
        }
        wanted = [
            name
            for name, wanted in (
                ("wandb", cfg.wandb != "disabled"),
                ("tensorboard", cfg.tensorboard),
            )
            if wanted
        ]
        self.feeds = [Feed(name, openers[name], say) for name in wanted]

    def log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        grouped = {
            f"{name}/{of}": value
            for name, values in line.items()
            if isinstance(values, dict)
            for of, value in values.items()
        }
        single = {
            name: value
            for name, value in line.items()
            if name not in ("step", "time") and not isinstance(value, dict)
        }
        values = {name: value for name, value in (single | grouped).items() if value is not None}
        for feed in self.feeds:
            feed.put(lambda tracker: tracker.log(values, line["step"]))

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Samples, by name."""
        for feed in self.feeds:
            feed.put(
                lambda tracker: [tracker.text(name, text, step) for name, text in texts.items()]
            )

    def close(self, exit_code: int) -> None:
        """Flush; a run that is to go on is not marked as failed."""
        for feed in self.feeds:
            feed.close(
                0 if exit_code == 75 else exit_code,
                CLOSE_SECONDS if exit_code == 0 else STOP_SECONDS,
            )


def _wandb(cfg: Logging, run: Path, config: dict[str, Any]) -> Tracker:
    """Weights & Biases. The run's id is kept in the run's folder, so that a restart goes on in the same one."""
    import wandb

    kept = run / "wandb_id"
    if not kept.exists() or not kept.read_text():  # a full disk may have left it empty
        kept.write_text(secrets.token_hex(4))
    mode: Any = cfg.wandb
    tracked = wandb.init(
        project=cfg.project,
        name=run.name,
        id=kept.read_text(),
        resume="allow",
        mode=mode,
        dir=run,
        config=config,
    )

    def log(values: dict[str, Any], step: int) -> None:
        if step >= tracked.step:  # what a run that was killed had told, a resume does again
            tracked.log(values, step=step)

    return Tracker("wandb", log, lambda code: tracked.finish(exit_code=code))


def _tensorboard(run: Path, step: int) -> Tracker:
    """TensorBoard. Steps after `step` that an earlier attempt wrote, or that a rewind does again, are not shown."""
    from torch.utils.tensorboard import SummaryWriter

    folder, newest = str(run / "tensorboard"), step
    writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(values: dict[str, Any], step: int) -> None:
        nonlocal writer, newest
        if step <= newest:
            writer.close()
            writer = SummaryWriter(folder, purge_step=step)
        newest = step
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(
        "tensorboard", log, lambda code: writer.close(), lambda *text: writer.add_text(*text)
    )
