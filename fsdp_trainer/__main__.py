"""`python -m fsdp_trainer …` is `fsdp-trainer …`."""

import os
import signal
import sys
import traceback
from typing import NoReturn

from fsdp_trainer.cli import main
from fsdp_trainer.process import SIGNALS, STOPPED


def run() -> NoReturn:
    """Run this process's command line, and end the process with its exit code."""
    verb = "".join(sys.argv[1:2])
    if "RANK" in os.environ and (verb == "train" or "=" in verb):
        # until StopSignals installs its handlers: a signal during start-up would end one rank alone
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if code == STOPPED:
        # a second Ctrl-C that comes now would end the process by the signal, not with its code
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk, or a reader that has gone: the work is done all the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if "torch" in sys.modules:
        # torch's threads may abort the interpreter's end, after everything is written and closed
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
