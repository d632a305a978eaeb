"""Remote files through fsspec: listed, and copied once into the cache of a machine.

The path of a copy is `remote/SCHEME/HOST/PATH/VERSION/NAME`, so that another version is another
file, and messages with the path show its origin. The last listing is stored; if the network fails,
existing copies are used.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from fsdp_trainer.base.folders import short_name
from fsdp_trainer.base.safe_text import identity, without_secrets
from fsdp_trainer.config.data_files import (
    check_data_files,
    has_magic,
    is_data,
    is_url,
    kind,
    place,
    suffixes,
    why_url_unusable,
)
from fsdp_trainer.errors import Problem, UserError

AT_ONCE = 8  # files that are fetched concurrently
BLOCK = 1 << 24  # bytes per request
SILENT_SECONDS = 60  # without data from a web server, after which the request fails
# names, in various stores, of attributes that differ between versions of a file; the first one that
# is present is sufficient together with the size
MARKS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "content_md5", "checksum", "mtime",
    "LastModified", "last_modified", "Last-Modified", "updated", "created",
)  # fmt: skip

Say = Callable[[str], None]


def nothing(line: str) -> None:
    """Ignore a message."""


class Unreachable(UserError):
    """Raised if the network or the store failed, or a signature has expired.

    Earlier copies may be used instead.
    """


@dataclass(frozen=True)
class RemoteFile:
    url: str
    size: int | None
    version: str
    """Hash of the size and an attribute such as the ETag; changes with the content."""

    def copy_in(self, cache: Path) -> Path:
        parts = place(self.url).split("/")
        folders = [short_name(part) for part in parts if part not in ("", ".", "..")]
        return cache.joinpath(
            "remote", urlsplit(self.url).scheme, *folders[:-1], self.version, folders[-1]
        )


def list_files(url: str, key: str) -> list[RemoteFile]:
    """Return the data files of a URL: a file, a folder (searched recursively) or a glob, sorted.

    Raises UserError if it cannot be read.
    """
    with _as_user_errors(url, key):
        system, path = _system_of(url)
        system.invalidate_cache()
        is_web = urlsplit(url).scheme in ("http", "https")  # cannot distinguish folders from files
        listed = _list(system, path, url, is_web)
        address = {p: url if p == path else _address(url, p) for p in listed}
        try:
            chosen = check_data_files(sorted(address.values()), url)
        except ValueError as error:
            raise _unusable(url, key, str(error)) from None
        about = {address[p]: about for p, about in listed.items()}
        if is_web:  # its listings contain no sizes or versions
            with ThreadPoolExecutor(AT_ONCE) as pool:
                about = dict(zip(chosen, pool.map(system.info, chosen), strict=True))
        return [
            RemoteFile(file, about[file].get("size"), _version(file, about[file]))
            for file in chosen
        ]


def recorded_name(url: str) -> str:
    return url if shown(url) == url else f"{shown(url)}#{_digest(url)}"


def _digest(url: str) -> str:
    return hashlib.blake2b(identity(url).encode(), digest_size=10).hexdigest()


def _list(system: AbstractFileSystem, path: str, url: str, is_web: bool) -> dict[str, Any]:
    """Return the store's description of each file of a URL, by path."""
    if has_magic(url):
        paths = system.glob(path, detail=True).items()
        return {p: about for p, about in paths if about["type"] == "file"}
    is_file = not path.endswith("/") if is_web else system.isfile(path)
    if is_file:
        return {path: system.info(path)}
    paths = system.find(path, detail=True).items()
    if not paths:
        raise FileNotFoundError(url)
    return {p: about for p, about in paths if is_data(p.removeprefix(path).strip("/"))}


def _system_of(url: str) -> tuple[AbstractFileSystem, str]:
    if not url.startswith(("http://", "https://")):
        return url_to_fs(url)
    from aiohttp import ClientTimeout

    # aiohttp's default limit is five minutes for the complete file; proxies and ~/.netrc are used
    timeout = ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return url_to_fs(url, client_kwargs={"timeout": timeout, "trust_env": True})


def _address(url: str, path: str) -> str:
    if is_url(path):
        return path
    scheme = urlsplit(url).scheme
    return f"{scheme}://{path if scheme in ('file', 'local') else path.lstrip('/')}"


def _version(url: str, about: dict[str, Any]) -> str:
    mark = next((str(about[name]) for name in MARKS if about.get(name)), identity(url))
    if query := urlsplit(identity(url)).query:  # it may choose between files
        mark += query
    return hashlib.blake2b(f"{about.get('size')} {mark}".encode(), digest_size=6).hexdigest()


def fetch(
    url: str, key: str, cache: Path, say: Say = nothing, progress: Say = nothing
) -> dict[str, str]:
    """Return the local copy of each file of a URL, after fetching missing ones. Raises UserError.

    The files are named without secrets. A new signature of a URL is still the same URL.
    say: called with lines that stay on screen. progress: called repeatedly with the current state.
    """
    name = _digest(url)
    listing = cache / "remote" / "found" / f"{name}.json"
    if int(os.environ.get("LOCAL_RANK", 0)) and (copies := _last_copies(listing)):
        return copies  # the node's first rank has just listed them, and all must read the same
    try:
        files = list_files(url, key)
    except Unreachable as error:
        if not (copies := _last_copies(listing)):
            raise
        say(
            f"data   {shown(url)} could not be checked for changes, its copy is used:"
            f" {error.problems[0].reason.splitlines()[0]}"
        )
        return copies
    copies = {recorded_name(file.url): str(file.copy_in(cache)) for file in files}
    missing = [file for file in files if not file.copy_in(cache).exists()]
    with _as_user_errors(url, key, cache):
        if missing:
            _copy_all(missing, cache, url, say, progress)
        listing.parent.mkdir(parents=True, exist_ok=True)
        aside = listing.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(copies), encoding="utf-8")
        os.replace(aside, listing)
    for copy in copies.values():
        if kind(copy)[0] not in suffixes():
            raise _unusable(
                url,
                key,
                f"{Path(copy).name} has an unknown type: its name and its first bytes tell none",
            )
    return copies


def fetch_file(url: str, key: str, cache: Path) -> Path:
    """Return the local copy of one file of any type, fetched if it is missing. Raises UserError."""
    with _as_user_errors(url, key, cache):
        system, path = _system_of(url)
        about = system.info(path)
        file = RemoteFile(url, about.get("size"), _version(url, about))
        copy = file.copy_in(cache)
        if not copy.exists():
            _copy(file, copy, _StopDownloads())
        return copy


def origin_of(copy: str, cache: Path) -> str | None:
    """Return the URL of the folder that a copy in the cache was fetched from; None for others."""
    try:
        scheme, *folders, _, _ = Path(copy).relative_to(cache / "remote").parts
    except ValueError:
        return None
    return f"{scheme}://{'/'.join(folders)}"


def _last_copies(file: Path) -> dict[str, str]:
    try:
        copies: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        return copies if all(map(os.path.exists, copies.values())) else {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _copy_all(files: list[RemoteFile], cache: Path, url: str, say: Say, progress: Say) -> None:
    total = sum(file.size or 0 for file in files)
    say(
        f"data   fetching {len(files):,} file{'s' * (len(files) > 1)} of {shown(url)},"
        f" {total / 2**30:.2f} GiB, into {cache / 'remote'}"
    )
    targets = [file.copy_in(cache) for file in files]
    stopping = _StopDownloads()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {
            pool.submit(_copy, file, target, stopping)
            for file, target in zip(files, targets, strict=True)
        }
        try:
            while running:
                done, running = wait(running, timeout=1, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
                here = sum(_bytes_of(target) or _bytes_of(_part(target)) for target in targets)
                progress(f"data   fetched {here / 2**30:.2f} of {total / 2**30:.2f} GiB")
        except BaseException:
            stopping.now = True
            pool.shutdown(cancel_futures=True)
            raise


class _StopDownloads(Callback):
    """Stops downloads in other threads; the next start continues them."""

    now = False

    def relative_update(self, inc: int = 1) -> None:
        if self.now:
            raise InterruptedError("another file could not be fetched, or the run was stopped")


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _bytes_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _copy(file: RemoteFile, target: Path, stopping: _StopDownloads) -> None:
    """Fetch a file, continuing an earlier attempt.

    Other processes of this machine wait for it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _part(target)
    with open(part, "ab") as out:
        # a file system without locks: two processes may fetch the same file, one copy is kept
        with contextlib.suppress(OSError):
            fcntl.flock(out, fcntl.LOCK_EX)
        out.seek(0, os.SEEK_END)  # another process may have written while this one waited
        if target.exists():
            return
        system, path = _system_of(file.url)
        if not (out.tell() and _resume_copy(system, path, out, stopping)):
            system.get_file(path, str(part), callback=stopping)
        os.fsync(out.fileno())
        size = os.fstat(out.fileno()).st_size
        if file.size is not None and size != file.size:
            part.unlink()
            raise OSError(
                f"{shown(file.url)} has {size:,} bytes, not {file.size:,} as its store says"
            )
        os.replace(part, target)


def _resume_copy(
    system: AbstractFileSystem, path: str, out: BinaryIO, stopping: _StopDownloads
) -> bool:
    """Append the rest that an earlier attempt did not fetch.

    Return False if the store serves files only from the beginning.
    """
    try:
        with system.open(path, "rb", block_size=BLOCK, cache_type="readahead") as source:
            source.seek(out.tell())
            while block := source.read(BLOCK):
                stopping.relative_update()
                out.write(block)
        out.flush()
    except ValueError:
        return False
    return True


def open_remote(url: str) -> BinaryIO:
    """Open a remote file for reading in ranges.

    If a web server does not support ranges, the file can only be read from the beginning.
    """
    with _as_user_errors(url, "data.path"):
        system, path = _system_of(url)
        block = BLOCK if _has_ranges(system, path) else 0
        return io.BufferedReader(
            system.open(path, "rb", block_size=block, cache_type="readahead"), 1 << 20
        )


def _has_ranges(system: AbstractFileSystem, path: str) -> bool:
    if "https" not in system.protocol:
        return True
    with system.open(path, "rb", block_size=1, cache_type="none") as opened:
        try:
            opened.seek(1)
            opened.read(1)
        except ValueError:
            return False
    return True


def shown(url: str) -> str:
    """Return a URL without its secrets: the password and the query with its signature."""
    parts = urlsplit(url)
    if without_secrets(url) == url:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextlib.contextmanager
def _as_user_errors(url: str, key: str, cache: Path | None = None) -> Iterator[None]:
    """Convert any error of a store or of the cache's disk to a UserError with the URL."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise user_error(url, key, error, cache) from error


def user_error(
    url: str,
    key: str,
    error: BaseException,
    cache: Path | None = None,
    title: str = "the data cannot be used",
) -> UserError:
    """Return an error of a store or of the cache's disk as a UserError with the URL.

    An Unreachable if the same may work later.
    """
    if isinstance(error, FileNotFoundError) and error.__cause__:  # fsspec's, hides the cause
        error = error.__cause__
    reason = (is_url(url) and why_url_unusable(url)) or _reason(url, cache, error)
    first = _first_line(url, error)
    expired = identity(url) != url and _is_refused(error, _status(error), first)
    advice = "\nWhat was fetched is kept: start again" if cache else ""
    text = reason or f"cannot be reached ({type(error).__name__}: {first}){advice}"
    is_final = not is_url(url) or (reason and not expired)
    failure = UserError if is_final else Unreachable
    return failure(title, [Problem(f"{key}={shown(url)}", text)])


def _reason(url: str, cache: Path | None, error: BaseException) -> str:
    """Return why the data cannot be used; "" if the network or the store failed."""
    scheme, name, first = urlsplit(url).scheme, type(error).__name__, _first_line(url, error)
    status = _status(error)
    if cache and _is_local(error, cache):
        return f"cannot be kept in {cache}: {first}.\nUse  data.cache=FOLDER"
    if isinstance(error, ImportError):
        return f"{scheme}:// needs a package that is not installed: {first}"
    if isinstance(error, FileNotFoundError) or status == 404 or re.match("NoSuch|.*NotFound", name):
        return "there is no such file or folder there"
    if _is_refused(error, status, first):
        code = f"{status} " if status else ""
        refusal = f"access is denied ({code}{name}: {first})"
        known = CREDENTIALS.get(scheme, "as fsspec's documentation of its file system says")
        return f"{refusal}.\nCredentials: {known}" if is_url(url) else refusal
    return ""


def _is_refused(error: BaseException, status: Any, text: str) -> bool:
    """Return True if the store has the data but denies access."""
    if isinstance(error, PermissionError) or status in (401, 403):
        return True
    return "Credential" in type(error).__name__ or "Forbidden" in text


def _first_line(url: str, error: BaseException) -> str:
    """Return the first line of an error's text, without the secrets of the URL."""
    first = (str(error).splitlines() or [""])[0]
    for secret in filter(None, (urlsplit(url).query, urlsplit(url).password)):
        first = first.replace(secret, "…")
    return first


def _status(error: BaseException) -> Any:
    """Return the HTTP status by any library's name for it; None if there is none."""
    response = getattr(error, "response", None)
    return (
        getattr(error, "status", None)
        or getattr(error, "code", None)
        or getattr(response, "status_code", None)
    )


def _is_local(error: BaseException, cache: Path) -> bool:
    file = str(getattr(error, "filename", None) or "")
    return file.startswith(str(cache)) or getattr(error, "errno", None) in FULL


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role; none:"
    " FSSPEC_S3_ANON=1; another endpoint: AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or  gcloud auth application-default login",
    "hf": "HF_TOKEN, or  hf auth login ; access to a gated data set is requested on its page",
    "http": "a signed URL, or ~/.netrc",
    "https": "a signed URL, or ~/.netrc",
}


def _unusable(url: str, key: str, reason: str) -> UserError:
    return UserError("the data cannot be used", f"{key}={shown(url)}", reason)
