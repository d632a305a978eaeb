"""`python -m fsdp_trainer …` does the same as `fsdp-trainer …`."""

import os
import signal
import sys
import traceback
from typing import NoReturn

from fsdp_trainer.base.process import SIGNALS, STOPPED
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.cli import main


def run() -> NoReturn:
    """Run this process's command line and exit with its exit code."""
    verb = "".join(sys.argv[1:2])
    if "RANK" in os.environ and (verb == "train" or "=" in verb):
        # until StopSignals installs its handlers, a signal would end this rank but not the others
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        code = main()
    except Exception:
        print(safe(traceback.format_exc()), end="", file=sys.stderr)
        code = 1
    if code == STOPPED:
        # a second Ctrl-C now would end the process by the signal instead of with exit code 75
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk or a closed pipe: the work is done anyway
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if "torch" in sys.modules:
        # torch's threads may abort the interpreter's shutdown; everything is written and closed
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
