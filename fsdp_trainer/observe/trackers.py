"""Trackers that receive the lines of metrics.jsonl: wandb, TensorBoard, MLflow, or a program.

Each tracker has its own thread. One that fails or hangs is reported once and never stops a run.
"""

import json
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple

from fsdp_trainer.config.methods import method_in
from fsdp_trainer.config.schema import Logging
from fsdp_trainer.observe.metric_groups import OWN_METRICS, tracked_name
from fsdp_trainer.observe.records import flat, numbers, whole_lines

WAITING = 20_000  # lines that a tracker may lag behind; further lines are dropped
CLOSE_SECONDS = 60.0  # for sending the remaining lines at the end of a finished run
MLFLOW_TEXT = 500  # characters of a parameter that every MLflow server accepts
STOP_SECONDS = 10.0  # for sending the remaining lines of any other run: a launcher may wait for it


class Tracker(NamedTuple):
    """The functions of an open tracker: log(values, step), close(exit_code), and two optional ones.

    text(name, text, step): logs a text. line(line): receives each line of metrics.jsonl and
    events.jsonl unchanged.
    """

    name: str
    log: Callable[[dict[str, Any], int], Any]
    close: Callable[[int], Any]
    text: Callable[[str, str, int], Any] = lambda name, text, step: None
    line: Callable[[dict[str, Any]], Any] = lambda line: None


class TrackerThread:
    """One tracker, opened and written to by its own thread."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], say: Callable[[str], None]):
        self.name, self.open_tracker, self.say, self.missed = name, open_tracker, say, 0
        self._queue: Queue[Callable[[Tracker], Any] | None] = Queue(WAITING)
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[Tracker], Any]) -> None:
        """Queue work for the thread without waiting; drop it if too much is queued.

        Work that returns a Tracker replaces the present one.
        """
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(work)
        except Full:
            if not self.missed:
                lacks = "does not keep up and lacks some metrics"
                self.say(f"{self.name} {lacks}; metrics.jsonl has everything.")
            self.missed += 1

    def close(self, exit_code: int, seconds: float) -> None:
        """Let the tracker send the remaining lines, waiting at most `seconds`."""
        deadline = time.monotonic() + seconds
        for work in (lambda tracker: tracker.close(exit_code), None):  # None ends the thread
            if self._thread.is_alive():
                with suppress(Full):
                    self._queue.put(work, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            late = f"did not close within {seconds:.0f} s"
            self.say(f"{self.name} {late}; metrics.jsonl has everything.")

    def _work(self) -> None:
        try:
            tracker = self.open_tracker()
        except Exception as error:
            self.say(f"{self.name} cannot be opened: {error}. metrics.jsonl has everything.")
            return
        try:
            while work := self._queue.get():
                result = work(tracker)
                tracker = result if isinstance(result, Tracker) else tracker
        except Exception as error:  # any error of an external service
            ends = "It gets no more metrics of this run; metrics.jsonl continues."
            self.say(f"{self.name}: {error}. {ends}")


class Trackers:
    """All trackers of a run. Only rank 0 has them."""

    def __init__(
        self,
        cfg: Logging,
        run: Path,
        config: dict[str, Any],
        say: Callable[[str], None],
        step: int = 0,
        goes_back: bool = False,
    ):
        """Open the trackers that `cfg` names.

        config: the resolved configuration. step: the last step that the run has done. goes_back:
        True if it had done later ones, and will repeat them with other values.
        """
        after = step if goes_back else None
        wanted: dict[str, tuple[bool, Callable[[], Tracker]]] = {
            "wandb": (cfg.wandb != "disabled", lambda: self._opened("wandb", after)),
            "tensorboard": (cfg.tensorboard, lambda: _tensorboard(run, step)),
            "mlflow": (cfg.mlflow, lambda: self._opened("mlflow", after)),
            "command": (bool(cfg.command), lambda: _command(str(cfg.command), run)),
        }
        openers = {"wandb": _wandb, "mlflow": _mlflow}
        self._keeping = {name: partial(make, cfg, run, config) for name, make in openers.items()}
        """What opens the trackers that cannot take back a step, by name."""
        self._lines, self._say, self._newest = run / "metrics.jsonl", say, -1
        self.method = method_in(dict(flat(config)))
        self.threads = [
            TrackerThread(name, open_tracker, say)
            for name, (is_wanted, open_tracker) in wanted.items()
            if is_wanted
        ]

    def _opened(self, name: str, after: int | None) -> Tracker:
        """Return an open tracker that keeps what it is given.

        after: the step to go on after in another run of the tracker, which gets all steps up to it;
        None: in the same one.
        """
        tracker = self._keeping[name](after)
        if after is None:
            return tracker
        self._say(
            f"{name} has steps after {after:,} that are now repeated: the run goes on in another"
            f" one of {name}, which has all steps"
        )
        for line in whole_lines(self._lines):
            if line["step"] <= after:
                tracker.log(self._values(line), line["step"])
        return tracker

    def _go_back(self, after: int) -> None:
        """Go on after an earlier step, in other runs of the trackers that keep all steps."""

        def reopened(tracker: Tracker) -> Tracker | None:
            if tracker.name not in self._keeping:
                return None
            tracker.close(0)
            return self._opened(tracker.name, after)

        for thread in self.threads:
            thread.put(reopened)

    def _values(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a line of metrics.jsonl, in the groups of the report."""
        own = line.get(OWN_METRICS, ())
        return {
            tracked_name(name, self.method, own): number
            for name, number in numbers(line)
            if name not in ("step", "time")
        }

    def log(self, line: dict[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl."""
        if line["step"] <= self._newest:
            self._go_back(line["step"] - 1)
        self._newest = line["step"]
        values = self._values(line)

        def send(tracker: Tracker) -> None:
            tracker.log(values, line["step"])
            tracker.line(line)

        for thread in self.threads:
            thread.put(send)

    def event(self, line: dict[str, Any]) -> None:
        """Pass a line of events.jsonl or metrics.jsonl to the trackers unchanged."""
        for thread in self.threads:
            thread.put(lambda tracker: tracker.line(line))

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log texts by name."""
        for thread in self.threads:
            thread.put(
                lambda tracker: [tracker.text(name, text, step) for name, text in texts.items()]
            )

    def close(self, exit_code: int) -> None:
        """Close all trackers. A run that was stopped to be resumed is not marked as failed."""
        for thread in self.threads:
            thread.close(
                0 if exit_code == 75 else exit_code,
                CLOSE_SECONDS if exit_code == 0 else STOP_SECONDS,
            )


def _wandb(cfg: Logging, run: Path, config: dict[str, Any], after: int | None = None) -> Tracker:
    """Open Weights & Biases. The run's folder keeps its run id, so that a restart resumes it.

    after: see Trackers._opened. W&B's own ways to go back are not open to every account, nor to a
    run that is offline.
    """
    import wandb

    file = run / "wandb_id"
    known = file.read_text() if file.exists() else ""  # a full disk may have left it empty
    if not known or after is not None:
        file.write_text(secrets.token_hex(4))
    mode: Any = cfg.wandb
    tracked = wandb.init(
        project=cfg.project,
        name=name_of(run, after),
        id=file.read_text(),
        resume="allow",
        mode=mode,
        dir=run,
        config=config if after is None else {**config, "continues": {"run": known, "step": after}},
    )

    def log(values: dict[str, Any], step: int) -> None:
        if step >= tracked.step:  # a resume repeats steps that the killed run had already logged
            tracked.log(values, step=step)

    return Tracker("wandb", log, lambda code: tracked.finish(exit_code=code))


def name_of(run: Path, after: int | None) -> str:
    """Return the name of a run for a tracker. after: see Trackers._opened."""
    return run.name if after is None else f"{run.name} from step {after + 1}"


def _mlflow(cfg: Logging, run: Path, config: dict[str, Any], after: int | None = None) -> Tracker:
    """Open MLflow. The run's folder keeps its run id, so that a restart resumes it.

    after: see Trackers._opened.
    """
    import mlflow

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it requires a database
        mlflow.set_tracking_uri((run / "mlflow").resolve().as_uri())
    mlflow.set_experiment(str(cfg.project))  # mlflow writes no subclass of str
    file = run / "mlflow_id"
    before = file.read_text() if file.exists() else ""
    known = before if after is None else ""
    mlflow.end_run()  # that of this thread, from which the run goes back
    tracked = mlflow.start_run(
        run_id=known or None,
        run_name=name_of(run, after),
        tags={"continues": before} if before and not known else None,
        log_system_metrics=False,
    )
    if not known:
        file.write_text(tracked.info.run_id)
        keys = [(group, name) for group, values in config.items() for name in values]
        mlflow.log_params(
            {f"{group}.{name}": str(config[group][name])[:MLFLOW_TEXT] for group, name in keys}
        )
    client = mlflow.MlflowClient()
    run_id = tracked.info.run_id

    def log(values: dict[str, Any], step: int) -> None:
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float)}
        mlflow.log_metrics(numbers, step=step, run_id=run_id)

    def close(exit_code: int) -> None:
        client.set_terminated(run_id, "FINISHED" if exit_code == 0 else "FAILED")

    def text(name: str, text: str, step: int) -> None:
        client.log_text(run_id, text, f"{name}-{step:08}.txt")

    return Tracker("mlflow", log, close, text)


def _command(command: str, run: Path) -> Tracker:
    """Start the program of logging.command, which reads lines of JSON until its input is closed."""
    process = subprocess.Popen(
        shlex.split(command),
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "RUN": str(run)},
        start_new_session=True,  # Ctrl-C is for the run, which still has lines to send
    )
    assert process.stdin
    stdin = process.stdin

    def line(line: dict[str, Any]) -> None:
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()

    def close(exit_code: int) -> None:
        stdin.close()
        if process.wait():
            raise RuntimeError(f"{command} ended with code {process.returncode}")

    return Tracker("command", lambda values, step: None, close, line=line)


def _tensorboard(run: Path, step: int) -> Tracker:
    """Open TensorBoard. Steps after `step`, written by an earlier attempt, are hidden."""
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
