"""Hosts on which nodes are started: launch.hosts, as a list or a file. Imports no torch."""

import re
from pathlib import Path
from typing import NamedTuple

from fsdp_trainer.errors import UserError

FORM = "is not a host: write  name , user@name  or  name:port , behind it perhaps  slots=8"
# no part may begin with a dash, which ssh would take for an option
ENTRY = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?(?P<name>\w[\w.-]*)(?::(?P<port>\d{1,5}))?"
    r"(?:\s+slots=(?P<slots>[1-9]\d*))?(?:\s+max[_-]slots=\d+)?"
)


class Host(NamedTuple):
    """A machine on which one node runs.

    user, port: for ssh, None if not given. slots: number of its ranks, None for that of
    launch.nproc_per_node.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.name}{f':{self.port}' if self.port else ''}"


def read_hosts(value: str | list[str]) -> list[Host]:
    """Return the hosts of a list, or of a file with one per line in DeepSpeed's or MPI's format.

    Raises ValueError with the reason if they are wrong.
    """
    lines = _lines(value) if isinstance(value, str) else [(entry, entry) for entry in value]
    hosts = [_host(entry.strip(), where) for where, entry in lines]
    if not hosts:
        raise ValueError("names no host, e.g.  launch.hosts=[node0,node1]")
    places = [(host.name, host.port) for host in hosts]
    for host, place in zip(hosts, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{host} is there more than once: a host is one node; use  slots=8")
    return hosts


def hosts_of(value: str | list[str]) -> list[Host]:
    try:
        return read_hosts(value)
    except ValueError as error:
        raise UserError("a problem in the configuration", "launch.hosts", str(error)) from None


def ranks_of(host: Host, nproc_per_node: int | str) -> int | None:
    """Return a host's number of ranks: nproc_per_node if set, else its slots; None if neither."""
    return host.slots if nproc_per_node == "auto" else int(nproc_per_node)


def _lines(path: str) -> list[tuple[str, str]]:
    """Return the lines of a file without comments, each with its place as FILE:LINE.

    Raises ValueError if it cannot be read.
    """
    try:
        text = Path(path).expanduser().read_text()
    except OSError as error:
        reason = f"is no file that can be read ({error.strerror}). One host is written  [{path}]"
        raise ValueError(reason) from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line]


def _host(entry: str, where: str) -> Host:
    match = ENTRY.fullmatch(entry)
    if match is None:
        place = "" if where.strip() == entry else f"{where}: "
        raise ValueError(f"{place}{entry} {FORM}")
    port, slots = match["port"], match["slots"]
    return Host(
        match["name"], match["user"], int(port) if port else None, int(slots) if slots else None
    )
