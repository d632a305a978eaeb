"""Addresses at which a process listens."""

import os
import socket
from pathlib import Path


def listening():
    """Return the hosts and ports at which this process listens."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    return {
        (host_of(row[1].partition(":")[0]), int(row[1].partition(":")[2], 16))
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


def host_of(digits):
    """Return an address that the kernel writes as words of 32 bits."""
    words = [int(digits[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))
