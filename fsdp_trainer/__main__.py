"""`python -m fsdp_trainer …` is `fsdp-trainer …`."""

import os
import sys

from fsdp_trainer.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # everything is written and closed; torch's own threads may yet abort the interpreter's end, and a finished rank must not fail for that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
