"""`python -m fsdp_trainer …` is `fsdp-trainer …`."""

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from fsdp_trainer.cli import main
from fsdp_trainer.launch.start import SIGNALS


def run() -> NoReturn:
    """Run this process's command line, and end the process."""
    if "RANK" in os.environ and any("=" in word or word == "train" for word in sys.argv[1:2]):
        signal.pthread_sigmask(
            signal.SIG_BLOCK, SIGNALS
        )  # a rank is torn from its world by no signal: it listens as soon as it can answer
    code = main()
    if "torch" in sys.modules:
        # everything is written and closed; torch's own threads may yet abort the interpreter's end, and what is finished must not fail for that
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a log file on a full disk
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
