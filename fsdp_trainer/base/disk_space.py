"""Space on a disk for the content of a file that is not written yet."""

import os
from errno import EINVAL, EOPNOTSUPP


def reserve(file: int, size: int) -> None:
    """Give an open file its size, and all of its blocks if the system and the disk can do that.

    Raises OSError if the disk is full.
    """
    try:
        os.posix_fallocate(file, 0, size)
    except AttributeError:  # macOS has no such call
        os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise
        os.ftruncate(file, size)  # the file system cannot reserve
