"""The transfer of the composed configuration to ranks, which need not compose it again."""

import json
import os
import tempfile
from dataclasses import asdict
from typing import IO, Any

from fsdp_trainer.base.recorded import marked, marks_of
from fsdp_trainer.config.check import Report, build

# set by our own launcher: descriptor of the open file that holds a rank's configuration
DESCRIPTOR = "FSDP_TRAINER_CONFIGURATION"


def configuration_file(cfg: Any) -> IO[bytes]:
    """Write `cfg` to a file without a name, which ranks inherit, and return it.

    Environment variables are too short for a long prompt.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    tree = asdict(cfg)
    file.write(json.dumps([tree, list(marks_of(tree))]).encode())
    file.flush()
    return file


def inherited_configuration(cls: Any) -> Any:
    """Return the configuration `cls` that the starting process wrote; None if there is none.

    Types and bounds are checked again.
    """
    if DESCRIPTOR not in os.environ:
        return None
    file = int(os.environ.pop(DESCRIPTOR))  # removed: processes that this rank starts are no ranks
    try:
        content = os.pread(file, os.fstat(file).st_size, 0)  # all ranks share one file position
        tree, marks = json.loads(content)
    finally:
        os.close(file)
    report = Report({}, [], set())
    cfg = build(cls, marked(tree, {tuple(place): text for place, text in marks}), report)
    report.close()
    return cfg
