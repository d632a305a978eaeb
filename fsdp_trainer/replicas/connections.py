"""Connections between ranks of different groups, and the comparison of their settings."""

import hashlib
import hmac
import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupWrapper

from fsdp_trainer.errors import Problem
from fsdp_trainer.launch.group_secret import proof
from fsdp_trainer.launch.world import World, store_at

REPLY_SECONDS = 60.0
"""Seconds for a reply of this group's own manager, of another one's, or of the lighthouse."""
CONNECT_SECONDS = 8.0
"""Seconds for connecting groups over gloo, after which they meet again: one may end meanwhile."""
RETRY_SECONDS = 0.5
"""Seconds between two attempts to reach the lighthouse."""
LOOK_SECONDS = 5.0
"""Seconds that a group looks for another one's settings."""
SETTINGS, SEAL = "settings", "seal"
NOT_SET = "its default"

Settings = dict[str, str]
"""Values by key, which must be the same in all groups."""


class Stranger(Exception):
    """A group that does not know the secret of this one has come."""


class OtherSettings(Exception):
    """A group with other settings has come; args[0] is the list of the groups' stores."""


def reach_lighthouse(address: str) -> None:
    """Wait until something listens at HOST:PORT, for REPLY_SECONDS at most; raises OSError."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + REPLY_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=REPLY_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"{error}. Start it there with  fsdp-trainer lighthouse") from None
        time.sleep(RETRY_SECONDS)


def own_address(lighthouse: str) -> str:
    """Return this machine's address in the network of the lighthouse, HOST:PORT.

    torchft would use the machine's name, which others may not be able to look up. Sends nothing.
    """
    host, _, port = lighthouse.rpartition(":")
    family, kind, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as connection:
        connection.connect(address)
        own: str = connection.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def make_group(
    device: torch.device, host: str, settings: Settings, secret: bytes
) -> ProcessGroupWrapper:
    """Return a group that can be connected anew, for tensors on this kind of device.

    host: this machine's address for other groups. secret: what all groups know.
    """
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    backend = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo

    class ReachableGroup(backend):  # type: ignore[valid-type, misc]
        _rendezvous_store: Any
        connection: int | None = None
        """Differs between any two times that groups were connected."""

        def get_reconfigure_handle(self) -> str:
            if self._rendezvous_store is None:
                self._rendezvous_store = store_at(host)
                self._rendezvous_store.set(SETTINGS, json.dumps(settings))
            own = {
                "store": f"{host}:{self._rendezvous_store.port}",
                "connection": self.connection,
                SETTINGS: digest,
            }
            return sealed(json.loads(super().get_reconfigure_handle()) | own, secret)

        def reconfigure(self, opts: Any) -> dist.Work:
            self.connection = None
            work: dist.Work = super().reconfigure(opts)
            self.connection = opts.uuid
            return work

    seconds = REPLY_SECONDS if device.type == "cuda" else CONNECT_SECONDS
    group: ProcessGroupWrapper = ReachableGroup(timeout=timedelta(seconds=seconds))
    return group


def sealed(handle: dict[str, Any], secret: bytes) -> str:
    """Return a group's handle, with a proof that the group knows the secret."""
    return json.dumps(handle | {SEAL: seal_of(handle, secret)})


def seal_of(handle: dict[str, Any], secret: bytes) -> str:
    """Return the proof that a group knows the secret, for its handle."""
    text = json.dumps(handle, sort_keys=True).encode()
    return proof(secret, b"handle", text).hexdigest()


def opened(handle: str, secret: bytes) -> dict[str, Any]:
    """Return the content of a group's handle. Raises Stranger if the group has not sealed it."""
    try:
        content = json.loads(handle)
        is_known = hmac.compare_digest(content.pop(SEAL), seal_of(content, secret))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_known = False
    if not is_known:
        raise Stranger
    return content


def need_new_connection(handles: Sequence[str], settings: Settings, secret: bytes) -> bool:
    """Return True unless the groups with these handles are connected with each other already.

    Raises Stranger, and OtherSettings if one of them has others than this group. torchft compares
    the number of a quorum with that of the one before; but a lighthouse that was started again
    counts from 1.
    """
    groups = [opened(handle, secret) for handle in handles]
    if len({group[SETTINGS] for group in groups}) > 1:
        raise OtherSettings([group["store"] for group in groups])
    connections = {group["connection"] for group in groups}
    return len(connections) > 1 or None in connections


def differences(stores: Sequence[str], settings: Settings) -> list[Problem]:
    problems = []
    for store in stores:
        host, _, port = store.rpartition(":")
        address = host.strip("[]"), int(port)
        wait = timedelta(seconds=LOOK_SECONDS)
        try:
            theirs = dist.TCPStore(*address, wait_for_workers=False, timeout=wait).get(SETTINGS)
        except dist.DistError:
            continue  # that group has ended for the same reason
        other: Settings = json.loads(theirs)
        problems += [
            Problem(
                f"{key}={settings.get(key, NOT_SET)}",
                f"another group has {other.get(key, NOT_SET)}",
            )
            for key in sorted(settings.keys() | other.keys())
            if settings.get(key) != other.get(key)
        ]
    return problems


def serve_store(world: World, host: str, timeout: float) -> tuple[str, int, dist.Store | None]:
    """Return host and port of a store of this group, and on rank 0 the store itself. Collective.

    The ranks' own store does not do: without a launcher it lies in memory, and torchrun's still
    holds the keys of earlier attempts. host: this machine's address.
    """
    served: list[dist.Store] = []

    def serve() -> tuple[str, int]:
        store = store_at(host)
        served.append(store)
        return host, store.port

    address, port = world.from_main("store of the group", serve, timeout)
    return address, port, served[0] if served else None
