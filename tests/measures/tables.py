"""Cases of tests as texts: a line for each, whose columns are divided by →."""

import re


def rows(text):
    """Return the columns of each line. Lines that begin with # are titles."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [re.split(r"\s*→\s*", line) for line in lines]
