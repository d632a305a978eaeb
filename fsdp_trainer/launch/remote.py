"""The process on a host whose node another process starts (launch/hosts.py).

Over ssh, or on the same machine.
"""

import json
import os
import select
import signal
import sys
import threading
from typing import NoReturn

from fsdp_trainer.launch.nodes import free_port
from fsdp_trainer.process import SIGNALS

READY = "fsdp-trainer: this host is ready "
"""Begins the line that a host writes to both streams before the node's output."""
SILENCE_SECONDS = 120.0
"""Time after which a starter that shows no sign of life counts as lost."""


def start_when_told() -> NoReturn:
    """Say that this host can start a node, and become the node when its words come."""
    line = f"{READY}{json.dumps({'port': free_port()})}\n".encode()
    for stream in (1, 2):
        os.write(stream, line)
    words = next_line()
    if words is None:
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "fsdp_trainer", *json.loads(words)])


def obey_starter() -> None:
    """Raise the signals that the starter sends, and end when it has gone.

    The ranks end with this process (process.die_with_parent).
    """
    threading.Thread(target=_obey, daemon=True).start()


def _obey() -> None:
    while True:
        line = next_line()
        if line is None:
            os._exit(1)
        signum = int(line)
        if signum in SIGNALS:
            os.kill(os.getpid(), signal.Signals(signum))


def next_line() -> bytes | None:
    """Return the starter's next line that is not empty, None when it has gone."""
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stream:
        while select.select([stream], [], [], SILENCE_SECONDS)[0]:
            line = stream.readline()
            if not line.endswith(b"\n"):
                return None
            if line.strip():
                return line
    return None
