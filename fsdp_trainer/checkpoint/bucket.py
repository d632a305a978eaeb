"""A run's checkpoints at another place, such as a bucket: uploaded, verified there, and fetched.

PLACE/NAME is laid out like the run's folder. A manifest is the last object of its checkpoint, which
counts only with it, and is the first to be deleted.
"""

import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from fsdp_trainer.checkpoint.atomic_files import complete_folder, read_manifest, unfinished
from fsdp_trainer.config.data_files import is_url
from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.data.files.remote_files import BLOCK, nothing, shown, user_error
from fsdp_trainer.errors import RunFailed, UserError

AT_ONCE = 4
"""Files that are on their way at once."""
ATTEMPTS = 3
"""How often a file is fetched that does not arrive as it was uploaded."""
RECORDS = ("metrics.jsonl", "events.jsonl", "*_id")
"""Names of a run's files that its trackers and its report go on with on another machine."""

Say = Callable[[str], None]


class Torn(OSError):
    """Raised for an object that is not what its checkpoint's manifest says."""


def mirror_error(url: str, error: Exception, key: str = "checkpoint.mirror") -> UserError:
    title = "the mirror cannot be used"
    if isinstance(error, Torn):
        return UserError(title, f"{key}={shown(url)}", str(error))
    return user_error(url, key, error, title=title)


class Bucket:
    """The folder of one run below an address that fsspec knows, or below a path.

    Methods raise whatever the file system's package raises: see `mirror_error`.
    """

    def __init__(self, url: str, name: str):
        self.url = url
        address = url if is_url(url) else str(Path(url).expanduser().absolute())
        local = address.startswith(("/", "file:", "local:"))
        # others have no folders, and s3fs would make a bucket of a mistyped name
        self._system, root = url_to_fs(address, **({"auto_mkdir": True} if local else {}))
        self._run = f"{root.rstrip('/')}/{name}"
        self._checkpoints = f"{self._run}/checkpoints"
        self.address = f"{shown(address).rstrip('/')}/{name}"
        """Where the run's objects are, without secrets."""
        self._cancelled = self._closed = False
        self.files_sent = 0

    def require_writable(self) -> None:
        # groups of ranks may do so at the same time
        probe = f"{self._run}/.probe-{secrets.token_hex(4)}"
        self._system.pipe_file(probe, b"probe")
        content = self._system.cat_file(probe)
        self._system.rm_file(probe)
        if content != b"probe":
            raise Torn(f"a small object in {self.address} was not read back as it was written")

    def checkpoints(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each object, by checkpoint and file, oldest checkpoint first."""
        self._system.invalidate_cache()
        listed: dict[str, dict[str, int]] = {}
        try:
            objects = self._system.find(self._checkpoints, detail=True)
        except FileNotFoundError:
            objects = {}
        for path, about in objects.items():
            name, _, file = path.removeprefix(self._checkpoints).lstrip("/").partition("/")
            if re.fullmatch(r"step-\d+", name):
                listed.setdefault(name, {})[file] = about["size"]
        return dict(sorted(listed.items()))

    def upload(self, checkpoint: Path) -> int:
        """Upload what is missing of a committed checkpoint; return the bytes of the files sent.

        Each file is read back and compared with its checksum before the manifest is written.
        """
        there = self.checkpoints().get(checkpoint.name, {})
        files, text = read_manifest(checkpoint)["files"], (checkpoint / MANIFEST).read_bytes()
        manifest = self._place(checkpoint.name, MANIFEST)
        sizes = {name: entry["bytes"] for name, entry in files.items()}
        if MANIFEST in there:
            if self._system.cat_file(manifest) == text and sizes.items() <= there.items():
                return 0
            self._system.rm_file(manifest)  # of another checkpoint of the same step

        def put(name: str) -> int:
            self._require_going_on()
            place, entry = self._place(checkpoint.name, name), files[name]
            if there.get(name) == sizes[name] and not self._fault(place, entry):
                return 0
            self._system.put_file(str(checkpoint / name), place)
            if fault := self._fault(place, entry):
                raise Torn(f"{name} {fault} in {self.address}")
            self.files_sent += 1
            return sizes[name]

        sent = sum(self._in_threads(put, files))
        self._system.pipe_file(manifest, text)
        if self._system.cat_file(manifest) != text:
            raise Torn(f"{MANIFEST} is not as it was written in {self.address}")
        return sent

    def has(self, checkpoint: Path) -> bool:
        """Return True if a folder is a copy of the checkpoint of its name."""
        manifest = checkpoint / MANIFEST
        place = self._place(checkpoint.name, MANIFEST)
        return manifest.is_file() and manifest.read_bytes() == self._system.cat_file(place)

    def fetch(self, name: str, run: Path, progress: Say = nothing) -> Path:
        """Fetch a checkpoint into a run's folder, verified, and return it.

        Raises Torn if an object is missing or not what the manifest says.
        """
        target = run / "checkpoints" / name
        with complete_folder(target) as partial:
            try:
                (partial / MANIFEST).write_bytes(self._system.cat_file(self._place(name, MANIFEST)))
                files = read_manifest(partial)["files"]
            except (FileNotFoundError, ValueError) as error:
                raise Torn(f"{name}/{MANIFEST}: {error}") from error
            total = sum(entry["bytes"] for entry in files.values()) / 2**30
            arrived = [0]

            def get(file: str) -> None:
                path = partial / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fetch_file(self._place(name, file), files[file], path)
                arrived[0] += files[file]["bytes"]

            def tell() -> None:
                progress(f"mirror  fetched {arrived[0] / 2**30:.2f} of {total:.2f} GiB of {name}")

            self._in_threads(get, files, tell)
        return target

    def delete(self, name: str) -> None:
        manifest = self._place(name, MANIFEST)
        if self._system.exists(manifest):
            self._system.rm_file(manifest)
        self._system.rm(f"{self._checkpoints}/{name}", recursive=True)

    def put_records(self, run: Path) -> None:
        for file in (path for pattern in RECORDS for path in run.glob(pattern)):
            self._system.put_file(str(file), f"{self._run}/{file.name}")

    def get_records(self, run: Path) -> None:
        listed = [Path(place) for place in self._system.ls(self._run, detail=False)]
        for place in listed:
            file = run / place.name
            if not file.exists() and any(place.match(pattern) for pattern in RECORDS):
                content = self._system.cat_file(f"{self._run}/{place.name}")
                unfinished(file).write_bytes(content)
                unfinished(file).rename(file)

    def cancel(self) -> None:
        """End the transfers that are on their way; later ones end at once."""
        self._closed = True

    def _place(self, name: str, file: str) -> str:
        return f"{self._checkpoints}/{name}/{file}"

    def _require_going_on(self) -> None:
        if self._cancelled or self._closed:
            raise InterruptedError("the transfer was ended")

    def _fetch_file(self, place: str, entry: dict[str, int], copy: Path) -> None:
        """Read an object into a file, again if it does not arrive as it was uploaded."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if fault := self._fault(place, entry, copy):
                    raise Torn(f"{place} {fault}")
                return
            except Exception:  # of any package
                if attempt == ATTEMPTS or self._cancelled or self._closed:
                    raise
                time.sleep(attempt)

    def _fault(self, place: str, entry: dict[str, int], copy: Path | None = None) -> str:
        """Read an object, into `copy` if given; return how it differs from its entry, or ""."""
        size = value = 0
        try:
            for block in self._blocks(place, copy):
                size, value = size + len(block), zlib.crc32(block, value)
        except FileNotFoundError:
            return "is missing"
        if size != entry["bytes"]:
            return f"has {size:,} bytes instead of {entry['bytes']:,}"
        return "" if value == entry["crc32"] else "does not have the checksum it was written with"

    def _blocks(self, place: str, copy: Path | None) -> Iterator[bytes]:
        """Yield the content of an object, and write it to `copy` if given."""
        with self._system.open(place, "rb", block_size=BLOCK, cache_type="readahead") as source:
            if copy:
                copy.write_bytes(b"")
            while block := source.read(BLOCK):
                self._require_going_on()
                if copy:
                    append(copy, block)
                yield block

    def _in_threads(
        self, work: Callable[[str], Any], names: Iterable[str], tell: Callable[[], Any] = int
    ) -> list[Any]:
        """Return the results of `work`, in any order; call `tell` each second.

        Called by one thread. Returns at once after `cancel`.
        """
        self._cancelled = False
        waiting = iter([*names])
        results: list[Any] = []
        errors: list[BaseException] = []

        def work_on() -> None:
            for name in waiting:
                try:
                    results.append(work(name))
                except BaseException as error:
                    self._cancelled = True
                    errors.append(error)
                if errors:
                    return

        # daemons: a transfer that hangs in its package does not keep a program from ending
        threads = [threading.Thread(target=work_on, daemon=True) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        try:
            while threads and not self._closed:
                threads[0].join(1.0)
                tell()
                threads = [thread for thread in threads if thread.is_alive()]
        except BaseException as error:
            self._cancelled = True
            errors.append(error)
            raise
        if errors:
            raise errors[0]
        self._require_going_on()
        return results


def append(file: Path, block: bytes) -> None:
    try:
        with file.open("ab") as out:
            out.write(block)
    except OSError as error:
        raise RunFailed(f"cannot write {file}: {error}") from None
