"""Cases of tests as texts: a line for each, whose columns are divided by →."""

import re


def rows(text):
    """Return the columns of each line.

    Lines that begin with # are titles; those that begin with a space go on with the one before.
    """
    lines = re.sub(r"\n +", " ", text).splitlines()
    return [re.split(r"\s*→\s*", line) for line in lines if line and not line.startswith("#")]
