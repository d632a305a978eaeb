"""Places in users' own code, for messages about errors in it."""

import sysconfig
import traceback
from pathlib import Path

LIBRARIES = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib")))
"""Folders of this package, of Python's library and of installed packages."""


def place_of(error: BaseException) -> str:
    """Return " (FILE:LINE)" of the last line of users' own code that led to an error, else ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
