"""The uploads of a run's checkpoints to its mirror, by a thread beside training."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_trainer.checkpoint.bucket import Bucket, mirror_error
from fsdp_trainer.config.paths import BEST, MANIFEST, committed_checkpoints, step_of

LONGEST_PAUSE = 60.0
"""Maximum number of seconds between two attempts."""


class Uploads:
    """Keeps the newest and the best checkpoint of a run in its mirror. Only rank 0 has it.

    It works from what is in the run's folder: a newer checkpoint takes the place of one that was
    not uploaded yet. A failure is reported once and tried again until it works.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Path,
        keep: int,
        event: Callable[..., object],
        say: Callable[[str], None],
    ):
        """Start the thread, which waits for `look`. keep: checkpoint.keep. event: records one."""
        self.bucket, self.run, self.keep = bucket, run, keep
        self.longest = 0.0
        """Seconds that the longest upload took."""
        self._event, self._say = event, say
        self._whole: set[int] = set()
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._hurry, self._closed = threading.Event(), False
        self._failure = ""
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def look(self) -> None:
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def go_back(self, step: int) -> None:
        """Take the checkpoint of `step` for the newest: later ones go once it is uploaded."""
        self._whole = {other for other in self._whole if other <= step}
        self.look()

    def covers(self, checkpoint: Path) -> bool:
        return any(step >= step_of(checkpoint) for step in self._whole)

    @property
    def pending(self) -> bool:
        """True if the mirror may lack something, and this thread is there to upload it."""
        return self._done < self._wanted and not self._closed

    def wait(self, seconds: float, beat: Callable[[], object]) -> str:
        """Wait until the mirror is complete; return "" or why it is not.

        seconds: how long to wait for a next file to arrive. beat: called each second.
        """
        sent, until = -1, 0.0
        self._hurry.set()
        while self.pending and (committed := committed_checkpoints(self.run)):
            if self.bucket.files_sent > sent:
                sent, until = self.bucket.files_sent, time.monotonic() + seconds
            if time.monotonic() >= until:
                reason = self._failure or "the upload takes longer than checkpoint.patience"
                where = f"{committed[-1]} is on this machine alone, not in {self.bucket.address}"
                return f"{where}: {reason}.\nThe same command uploads it"
            beat()
            with self._changed:
                self._changed.wait_for(lambda: not self.pending, 1.0)
        return ""

    def close(self) -> None:
        self._closed = True
        self.bucket.cancel()
        self._hurry.set()
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        pause = 1.0
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.pending)
                wanted = self._wanted
            if self._closed:
                return
            try:
                self._update()
            except Exception as error:  # of any package for a file system
                self._report(error)
                self._hurry.wait(pause)
                self._hurry.clear()
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if self._failure:
                self._say(f"mirror {self.bucket.address} works again; nothing is missing there")
            self._failure, pause = "", 1.0
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def _update(self) -> None:
        committed = committed_checkpoints(self.run)
        if not committed:
            return
        newest, best = committed[-1], self.run / "checkpoints" / BEST
        stay = {newest.name, best.resolve().name} if best.exists() else {newest.name}
        for name in sorted(stay, reverse=True):
            self._upload(newest.with_name(name))
        self.bucket.put_records(self.run)
        if step_of(newest) in self._whole:
            self._prune(newest.name, stay)

    def _upload(self, checkpoint: Path) -> None:
        started = time.perf_counter()
        try:
            sent = self.bucket.upload(checkpoint)
        except Exception:
            if checkpoint.exists():
                raise
            return  # replaced by a newer best one, or the run went back to an earlier one
        self._whole = self._whole | {step_of(checkpoint)}  # read by other threads
        if sent:
            seconds = round(time.perf_counter() - started, 3)
            self.longest = max(self.longest, seconds)
            where = f"{self.bucket.address}/checkpoints/{checkpoint.name}"
            step = step_of(checkpoint)
            self._event("mirrored", step=step, path=where, bytes=sent, seconds=seconds)

    def _prune(self, newest: str, stay: set[str]) -> None:
        """Delete all but the newest and the best checkpoints from the mirror.

        Later ones than `newest` are from before the run went back.
        """
        listed = self.bucket.checkpoints()
        whole = [name for name, files in listed.items() if MANIFEST in files and name <= newest]
        for name in sorted(listed.keys() - {*whole[-self.keep :], *stay}):
            self.bucket.delete(name)

    def _report(self, error: Exception) -> None:
        """Record a failure, the first one of several in a row."""
        reason = mirror_error(self.bucket.url, error).problems[0].reason.partition("\n")[0]
        if not self._failure and not self._closed:
            self._event("mirror_failed", error=reason)
            self._say(
                f"mirror {self.bucket.address}: {reason}\n"
                "       Training continues, and the upload is tried again; until it succeeds, no "
                "checkpoint is deleted"
            )
        self._failure = reason
