"""The composed configuration on its way to the ranks, which need not compose it again."""

import json
import os
import tempfile
from dataclasses import asdict
from typing import IO, Any

from fsdp_trainer.config.check import Report, build

# set by our own launcher: the open file in which a rank finds its configuration
DESCRIPTOR = "FSDP_TRAINER_CONFIGURATION"


def hand_over(cfg: Any) -> IO[bytes]:
    """A file without a name that holds `cfg`, for ranks to inherit.

    Their environment has no room for a long prompt.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(json.dumps(asdict(cfg)).encode())
    file.flush()
    return file


def take_over(cls: Any) -> Any:
    """The configuration `cls` that the starting process handed over; None without one.

    Types and bounds are checked again.
    """
    if DESCRIPTOR not in os.environ:
        return None
    file = int(os.environ.pop(DESCRIPTOR))  # what this rank may start is no rank
    try:
        tree = json.loads(
            os.pread(file, os.fstat(file).st_size, 0)
        )  # all ranks share one position in the file
    finally:
        os.close(file)
    report = Report({}, [], set())
    cfg = build(cls, tree, report)
    report.close()
    return cfg
