"""The checksum of a file's content, and the hash of a text in a page."""

import hashlib
import os
import zlib
from base64 import b64encode
from pathlib import Path

READ_BYTES = 1 << 24


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file: it finds every burst of up to 32 wrong bits. Raises OSError."""
    value = 0
    with path.open("rb", 0) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = memoryview(bytearray(max(1, min(size, READ_BYTES))))
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value


def policy_hash(content: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or a style."""
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
