"""A node's side of the connection to the process that starts it (launch/hosts.py).

That process may be on another machine, connected over ssh, or on the same one.
"""

import json
import os
import select
import signal
import sys
import threading
from typing import NoReturn

from fsdp_trainer.base.process import SIGNALS
from fsdp_trainer.launch.nodes import free_port

READY = "fsdp-trainer: this host is ready "
"""Start of the line that a host writes to stdout and stderr before the output of the node."""
SILENCE_SECONDS = 120.0
"""The starter counts as lost if nothing is received from it for this long."""


def start_when_told() -> NoReturn:
    """Report that this host can start a node, and become the node when its arguments arrive."""
    line = f"{READY}{json.dumps({'port': free_port()})}\n".encode()
    for stream in (1, 2):
        os.write(stream, line)
    words = next_line()
    if words is None:
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "fsdp_trainer", *json.loads(words)])


def obey_starter() -> None:
    """Send this process the signals that the starter requests, and end it when the starter is lost.

    Runs in a thread. The ranks end with this process (process.die_with_parent).
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
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stream:
        while select.select([stream], [], [], SILENCE_SECONDS)[0]:
            line = stream.readline()
            if not line.endswith(b"\n"):
                return None
            if line.strip():
                return line
    return None
