"""Reading of files that gzip or zstd has compressed, in bounded memory."""

import errno
import gzip
import io
import shutil
import sys
import tempfile
from typing import Any, BinaryIO, cast

from fsdp_trainer.errors import RunFailed

UNPACKED_FREELY, UNPACKED_EACH = 1 << 26, 200
"""After the first 64 MiB a file may unpack to 200 bytes for each of its own: text gives 3 to 20."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BLOCK = 1 << 17


class TooLarge(ValueError):
    """Raised for a small file that would fill memory or disk; the message is the reason."""


def check_unpacked(unpacked: int, packed: int) -> None:
    """Raise TooLarge if so many bytes may not come from `packed` bytes of a file."""
    if unpacked > UNPACKED_FREELY and unpacked > UNPACKED_EACH * packed:
        raise TooLarge(
            f"byte {packed:,} of the file is reached after {unpacked:,} unpacked bytes, and at most"
            f" {UNPACKED_EACH} for each byte are read: it would fill memory or disk. If it is"
            " right all the same, unpack it, or write a table as .jsonl, and name that file"
        )


def open_unpacked(packed: BinaryIO, compression: str | None) -> BinaryIO:
    """Return a file for reading what `packed` holds, which only goes forwards.

    compression: .gz, .zst, or None for a file that is returned as it is. Reading raises TooLarge.
    """
    if compression is None:
        return packed
    return cast(BinaryIO, io.BufferedReader(_Unpacked(packed, compression), BLOCK))


def unpack(packed: BinaryIO, compression: str | None) -> BinaryIO:
    """Return a file of the whole content, which has no name: on disk if `packed` is compressed.

    Raises TooLarge, and RunFailed if the disk is full.
    """
    if compression is None:
        return packed
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with open_unpacked(packed, compression) as opened:
            shutil.copyfileobj(opened, file, 1 << 20)
        file.seek(0)  # also writes what is still buffered
    except OSError as error:
        if error.errno not in FULL:
            raise
        folder = tempfile.gettempdir()
        raise RunFailed(
            f"cannot unpack {getattr(packed, 'name', 'a file')} into {folder}: {error.strerror}."
            " Set  TMPDIR  to a folder with more space"
        ) from None
    return cast(BinaryIO, file)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file; `readinto` raises TooLarge."""

    def __init__(self, packed: BinaryIO, compression: str):
        self._packed, self._count = packed, 0
        self._content: Any = (
            gzip.GzipFile(fileobj=packed) if compression == ".gz" else _open_zstd(packed)
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer)
        self._count += count
        check_unpacked(self._count, self._packed.tell())
        return count

    def close(self) -> None:
        self._content.close()
        self._packed.close()
        super().close()


def _open_zstd(packed: BinaryIO) -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(packed)
    import pyarrow

    return pyarrow.input_stream(packed, compression="zstd")
