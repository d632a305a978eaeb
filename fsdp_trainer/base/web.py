"""JSON requests to the user's servers, with each failure described in one line."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
PAUSE_SECONDS = 1.0
"""Wait before the second try; each later wait is twice as long as the one before."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which a request is repeated."""
LARGEST = 1 << 28  # bytes of an answer that are read at most
SHOWN = 200
"""Characters of an answer that a message shows at most."""


class RequestFailed(Exception):
    """A failed request; args: the reason, and whether a repetition may succeed."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects on the web, without the API key where they leave the server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if request and (before.scheme, before.netloc) != (after.scheme, after.netloc):
            request.remove_header("Authorization")
        return request if after.scheme in ("http", "https") else None


OPENER = urllib.request.build_opener(Redirects)


def send(url: str, body: object = None, token: str = "", timeout: float = 60.0) -> bytes:
    """Return a server's answer. body: sent by POST as JSON; None for GET. Raises RequestFailed."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    content = None if body is None else json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, content, headers)
    try:
        with OPENER.open(request, timeout=timeout) as response:
            return response.read(LARGEST)
    except urllib.error.HTTPError as error:
        said = first_line(error.read(LARGEST))
        reason = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
        raise RequestFailed(reason, error.code in TRANSIENT) from None
    except (OSError, HTTPException) as error:
        raise RequestFailed(str(getattr(error, "reason", error)) or repr(error), True) from None


def retried(call: Callable[[], T], retries: int) -> T:
    """Return `call()`, repeated up to `retries` times after transient failures.

    Raises RequestFailed.
    """
    for attempt in range(retries):
        try:
            return call()
        except RequestFailed as error:
            if not error.args[1]:
                raise
        time.sleep(PAUSE_SECONDS * 2**attempt)
    try:
        return call()
    except RequestFailed as error:
        reason, is_transient = error.args
        tries = f" (the last of {retries + 1} tries)" if retries and is_transient else ""
        raise RequestFailed(f"{reason}{tries}", is_transient) from None


def first_line(content: bytes) -> str:
    lines = content.decode(errors="replace").strip().splitlines()
    line = lines[0] if lines else ""
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
