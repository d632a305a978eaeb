"""`python -m fsdp_trainer …` is `fsdp-trainer …`."""

import os
import sys
from typing import NoReturn

from fsdp_trainer.cli import main


def run() -> NoReturn:
    """Run this process's command line, and end the process."""
    code = main()
    if "torch" in sys.modules:
        # everything is written and closed; torch's own threads may yet abort the interpreter's end, and what is finished must not fail for that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
