"""Requests to servers of the user's: JSON there and back, and what went wrong in one line."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import TypeVar

T = TypeVar("T")
PAUSE_SECONDS = 1.0
"""Wait before the second try; each later one is twice as long."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server after which it is asked again."""
LARGEST = 1 << 28  # bytes of an answer
SHOWN = 200
"""Characters of an answer in a message."""


class RequestFailed(Exception):
    """A request failed; args: why, and whether it may succeed later."""


def send(url: str, body: object = None, token: str = "", timeout: float = 60.0) -> bytes:
    """Return what a server answers. body: sent by POST as JSON; None: GET. Raises RequestFailed."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    content = None if body is None else json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.read(LARGEST)
    except urllib.error.HTTPError as error:
        said = first_line(error.read(LARGEST))
        reason = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
        raise RequestFailed(reason, error.code in TRANSIENT) from None
    except (OSError, HTTPException) as error:
        raise RequestFailed(str(getattr(error, "reason", error)) or repr(error), True) from None


def retried(call: Callable[[], T], retries: int) -> T:
    """Return `call()`, repeated after failures that may pass. Raises RequestFailed."""
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
    """Return the first line of an answer that says something, cut where it is long."""
    lines = content.decode(errors="replace").strip().splitlines()
    line = lines[0] if lines else ""
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
