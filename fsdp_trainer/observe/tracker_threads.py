"""The trackers of a run, each in its own thread: they receive the lines of metrics.jsonl.

One that fails or hangs is reported once and never stops a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import flat
from fsdp_trainer.config.methods import method_in
from fsdp_trainer.config.schema import Logging
from fsdp_trainer.extensions import TrackedRun
from fsdp_trainer.observe.metric_groups import OWN_METRICS, tracked_name
from fsdp_trainer.observe.records import numbers, whole_lines
from fsdp_trainer.observe.tracked_steps import CONTINUES, TrackedSteps, tracked_run
from fsdp_trainer.observe.trackers.known_trackers import chosen_trackers, open_tracker

WAITING = 20_000  # lines that wait in memory; further ones are read back from metrics.jsonl
CLOSE_SECONDS = 60.0  # for sending the remaining lines at the end of a finished run
STOP_SECONDS = 10.0  # for sending the remaining lines of any other run: a launcher may wait for it
Work = Callable[[TrackedSteps], Any]


@dataclass
class Late:
    """Steps whose lines a tracker reads back from metrics.jsonl."""

    first: int
    last: int

    def extend(self, step: int) -> None:
        self.last = step


@dataclass(eq=False)
class TrackerThread:
    """A thread that sends lines to a tracker. read_back: sends those of late steps."""

    name: str
    open_tracker: Callable[[], TrackedSteps]
    read_back: Callable[[TrackedSteps, Late], Any]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[Work | Late | None] = SimpleQueue()
        self._late: Late | None = None
        """The last entry of the queue, if it is a Late and the thread has not begun with it."""
        self._lock = Lock()
        self._thread = Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def put(self, work: Work, step: int | None = None) -> None:
        """Queue work for the thread without waiting.

        step: that of the line which the work sends; where too much is queued, it is read back.
        Work that returns TrackedSteps replaces the present ones.
        """
        if not self._thread.is_alive():
            return
        with self._lock:
            if step is None or self._queue.qsize() < WAITING:
                self._late = None
                self._queue.put(work)
            elif self._late:
                self._late.extend(step)
            else:
                self._late = Late(step, step)
                self._queue.put(self._late)

    def close(self, exit_code: int, seconds: float) -> None:
        """Let the tracker send the remaining lines, waiting at most `seconds`."""
        self.put(lambda steps: steps.close(exit_code))
        self._queue.put(None)  # ends the thread
        self._thread.join(seconds)
        if self._thread.is_alive():
            late = f"did not close within {seconds:.0f} s"
            self.say(f"{self.name} {late}; metrics.jsonl has everything.")

    def _work(self) -> None:
        try:
            steps = self.open_tracker()
        except Exception as error:
            self.say(f"{self.name} cannot be opened: {error}. metrics.jsonl has everything.")
            return
        try:
            while work := self._queue.get():
                if isinstance(work, Late):
                    with self._lock:
                        self._late = None
                    self.read_back(steps, work)
                    continue
                result = work(steps)
                steps = result if isinstance(result, TrackedSteps) else steps
        except Exception as error:  # any error of an external service
            ends = "It gets no more metrics of this run; metrics.jsonl continues."
            self.say(f"{self.name}: {error}. {ends}")


class Trackers:
    def __init__(
        self,
        cfg: Logging,
        run: Path,
        config: Json,
        say: Callable[[str], None],
        step: int = 0,
        goes_back: bool = False,
    ):
        """Open the trackers that `cfg` names.

        config: the resolved configuration. step: the last step that the run has done and whose line
        is whole. goes_back: True if it had done later ones, and will repeat them with other values.
        """
        self._run = TrackedRun(run, step=step, config=config, project=str(cfg.project))
        self._lines, self._say, self._newest = run / "metrics.jsonl", say, -1
        self._chosen = chosen_trackers(cfg)
        self.method = method_in(dict(flat(config)))
        after = step if goes_back else None
        self.threads = [
            TrackerThread(name, partial(self._opened, name, after), self._read_back, say)
            for name in self._chosen
        ]

    def _opened(self, name: str, after: int | None) -> TrackedSteps:
        """Return an open tracker that has all steps up to now.

        after: the step to go on after, while the tracker has later ones; None: there are none.
        """
        choice, file = self._chosen[name], self._run.folder / f"{name}_id"
        kind = choice.find()
        run = tracked_run(replace(self._run, mode=choice.mode), file, kind, after)
        if run.is_new and CONTINUES in run.config:
            self._say(
                f"{name} has steps after {after:,} that are now repeated: the run goes on in"
                f" another one of {name}, which has all steps"
            )
        steps = TrackedSteps(open_tracker(kind, run), file)
        first, last = steps.newest, run.step if after is None else after
        for line in whole_lines(self._lines) if first < last else ():
            if first < line["step"] <= last:
                steps.log(self._values(line), line["step"])
        return steps

    def _send(self, steps: TrackedSteps, line: Json) -> None:
        steps.log(self._values(line), line["step"])
        steps.tracker.line(line)

    def _read_back(self, steps: TrackedSteps, late: Late) -> None:
        for line in whole_lines(self._lines):
            if late.first <= line["step"] <= late.last:
                self._send(steps, line)

    def _go_back(self, after: int) -> None:
        def reopened(name: str, steps: TrackedSteps) -> TrackedSteps | None:
            if steps.tracker.takes_back:
                return None
            steps.close(0)
            return self._opened(name, after)

        for thread in self.threads:
            thread.put(partial(reopened, thread.name))

    def _values(self, line: Json) -> Json:
        """Return the numbers of a line of metrics.jsonl, in the groups of the report."""
        own = line.get(OWN_METRICS, ())
        return {
            tracked_name(name, self.method, own): number
            for name, number in numbers(line)
            if name not in ("step", "time")
        }

    def log(self, line: Json) -> None:
        if line["step"] <= self._newest:
            self._go_back(line["step"] - 1)
        self._newest = line["step"]
        for thread in self.threads:
            thread.put(lambda steps: self._send(steps, line), line["step"])

    def event(self, line: Json) -> None:
        """Pass a line of events.jsonl or metrics.jsonl to the trackers unchanged."""
        for thread in self.threads:
            thread.put(lambda steps: steps.tracker.line(line))

    def texts(self, texts: dict[str, str], step: int) -> None:
        def send(steps: TrackedSteps) -> None:
            for name, text in texts.items():
                steps.tracker.text(name, text, step)

        for thread in self.threads:
            thread.put(send)

    def close(self, exit_code: int) -> None:
        """Close all trackers. A run that was stopped to be resumed is not marked as failed."""
        for thread in self.threads:
            thread.close(
                0 if exit_code == 75 else exit_code,
                CLOSE_SECONDS if exit_code == 0 else STOP_SECONDS,
            )
