"""This group's membership among the groups that share a run: torchft's manager, and our state.

torchft's lighthouse knows which groups are alive; before each step or exchange its manager forms
a quorum of them, connects their ranks anew if it has changed, and sends the state of one that is
ahead to those that are behind.
"""

import hashlib
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("RUST_LOG", "error")  # torchft's servers would report every quorum

import torch
import torch.distributed as dist
from torchft.checkpointing import HTTPTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupWrapper

from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.world import World

# what it logs as exceptions are groups that left: SyncGroups reports them in a line
logging.getLogger("torchft").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

SILENCE_SECONDS = 30.0
"""Seconds without a byte after which the transfer of a state is given up."""
REPLY_SECONDS = 60.0
"""Seconds for a reply of this group's own manager, of another one's, or of the lighthouse."""
RETRY_SECONDS = 0.5
"""Seconds between two attempts to reach the lighthouse."""

State = dict[str, Any]


class Met(NamedTuple):
    """What became of a meeting of the groups.

    was_behind: True if this group has taken over the state of another one. source_exchanges: True
    if that one is about to exchange what it has changed.
    """

    was_behind: bool
    source_exchanges: bool


class StateTransport(HTTPTransport):
    """Sends this rank's state to other groups, without printing a line for each request."""

    def __init__(self, host: str, timeout: timedelta):
        """host: this machine's address for other groups."""
        self._host = host
        super().__init__(timeout, num_chunks=0)
        handler: Any = self._server.RequestHandlerClass
        handler.log_message = lambda *_: None

    def address(self) -> str:
        """Return where other groups fetch the state, without the step at the end."""
        return f"http://{self._host}:{self._server.server_port}/checkpoint/"


class ManagerConnection:
    """This rank's connection to its group's manager, which shows every quorum that it gets."""

    def __init__(self, client: Any, show: Callable[[Any], None]):
        """client: torchft's. show: called with each quorum."""
        self._client, self._show = client, show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **request: Any) -> Any:
        quorum = self._client._quorum(**request)
        self._show(quorum)
        return quorum


class Membership(Manager):
    """This rank's connection to the ranks of other groups that hold the same part of the model."""

    _healing: bool
    _quorum_id: int

    def __init__(
        self,
        cfg: Replicas,
        world: World,
        device: torch.device,
        timeout: float,
        state: Callable[[], State],
        load: Callable[[State], None],
    ):
        """Join the groups at cfg.lighthouse. Collective.

        device: of the tensors to exchange. state, load: return this rank's state for another group,
        and take over that of another group.
        """
        self._lighthouse, self._timeout_seconds = str(cfg.lighthouse), timeout
        reach = partial(reach_lighthouse, self._lighthouse)
        run_on_rank_0(f"reach replicas.lighthouse={self._lighthouse}", reach)
        host = own_address(self._lighthouse)
        self.group = make_group(device, host)
        self._exchanges = self._source_exchanges = False
        address, port, self._served = serve_store(world, host, timeout)
        super().__init__(
            pg=self.group,
            load_state_dict=partial(self._load, load),
            state_dict=lambda: {"state": state(), "exchanges": self._exchanges},
            min_replica_size=1,
            quorum_retries=max(1, round(timeout)),  # one each second
            use_async_quorum=True,
            timeout=timedelta(seconds=REPLY_SECONDS),
            quorum_timeout=timedelta(seconds=timeout),
            connect_timeout=timedelta(seconds=REPLY_SECONDS),
            rank=world.rank,
            world_size=world.size,
            store_addr=address,
            store_port=port,
            lighthouse_addr=f"http://{cfg.lighthouse}",
            replica_id=f"{cfg.id:06}",
            hostname=host,
            checkpoint_transport=StateTransport(host, timedelta(seconds=SILENCE_SECONDS)),
            init_sync=False,  # equal seeds make equal weights
        )
        self._client: Any = ManagerConnection(self._client, self._check_connections)

    def _load(self, load: Callable[[State], None], received: dict[str, Any]) -> None:
        self._source_exchanges = received["exchanges"]
        load(received["state"])

    def _check_connections(self, quorum: Any) -> None:
        """Have the groups of a quorum connected anew unless they are connected with each other.

        torchft compares the number of the quorum with that of its last one; but a lighthouse that
        was started again counts from 1 again.
        """
        connections = {json.loads(handle)["connection"] for handle in quorum.reconfigure_handles}
        if len(connections) > 1 or None in connections:
            self._quorum_id = -1

    def meet(self, step: int, exchanges: bool = False) -> Met:
        """Form a quorum with the groups that are alive. Collective.

        A group that is behind takes over the state of another one. step: number of steps that this
        group has done. exchanges: see Met. Raises RunFailed if the lighthouse does not answer.
        """
        self.load_state_dict({"step": step, "batches_committed": 0})
        self._exchanges, self._source_exchanges = exchanges, False
        self.start_quorum()
        try:
            self.wait_quorum()
        except TimeoutError:
            raise RunFailed(
                f"no meeting of the groups for {self._timeout_seconds:g} s (launch.timeout): "
                f"replicas.lighthouse={self._lighthouse} does not answer"
            ) from None
        is_behind: bool = self._healing and self._pending_state_dict is not None
        if is_behind:
            self._apply_pending_state_dict()
        # otherwise the state would be loaded a second time after the step
        self._healing = False
        return Met(is_behind, self._source_exchanges)

    @property
    def present(self) -> int:
        """Number of groups in the quorum, those included that were behind.

        0 if they could not be connected; this group then commits nothing.
        """
        return 0 if self.errored() else self.group.size()

    @property
    def place(self) -> int:
        """Number of this group among those in the quorum."""
        return self.group.parent.rank()


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


def make_group(device: torch.device, host: str) -> ProcessGroupWrapper:
    """Return a group that can be connected anew, for tensors on this kind of device.

    host: this machine's address for other groups.
    """
    backend = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo

    class ReachableGroup(backend):  # type: ignore[valid-type, misc]
        connection: int | None = None
        """Differs between any two times that groups were connected."""

        def get_reconfigure_handle(self) -> str:
            handle = json.loads(super().get_reconfigure_handle())
            port = handle["store"].rpartition(":")[2]
            return json.dumps(handle | {"store": f"{host}:{port}", "connection": self.connection})

        def reconfigure(self, opts: Any) -> dist.Work:
            self.connection = None
            known = f"{opts.uuid} {opts.handles}".encode()
            opts.uuid = int.from_bytes(hashlib.sha256(known).digest()[:7], "big")
            work: dist.Work = super().reconfigure(opts)
            self.connection = opts.uuid
            return work

    group: ProcessGroupWrapper = ReachableGroup()
    return group


def serve_store(world: World, host: str, timeout: float) -> tuple[str, int, dist.Store | None]:
    """Return host and port of a store of this group, and on rank 0 the store itself. Collective.

    The ranks' own store does not do: without a launcher it lies in memory, and torchrun's still
    holds the keys of earlier attempts. host: this machine's address.
    """
    served: list[dist.Store] = []

    def serve() -> tuple[str, int]:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        served.append(store)
        return host, store.port

    address, port = world.from_main("store of the group", serve, timeout)
    return address, port, served[0] if served else None
