"""This group's membership among the groups that share a run: torchft's manager, and our state.

torchft's lighthouse knows which groups are alive; before each step or exchange its manager forms
a quorum of them, connects their ranks anew if it has changed, and sends the state of one that is
ahead to those that are behind.
"""

import logging
import os
import socket
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

from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.launch.world import World

# what it logs as exceptions are groups that left: SyncGroups reports them in a line
logging.getLogger("torchft").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

SILENCE_SECONDS = 30.0
"""Seconds without a byte after which the transfer of a state is given up."""
REPLY_SECONDS = 60.0
"""Seconds for a reply of this group's own manager, or of another one's."""

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

    def __init__(self, timeout: timedelta, num_chunks: int):
        super().__init__(timeout, num_chunks)
        handler: Any = self._server.RequestHandlerClass
        handler.log_message = lambda *_: None


class Membership(Manager):
    """This rank's connection to the ranks of other groups that hold the same part of the model."""

    _healing: bool

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
        self.group = make_group(device)
        self._exchanges = self._source_exchanges = False
        host, port, self._served = serve_store(world, timeout)
        super().__init__(
            pg=self.group,
            load_state_dict=partial(self._load, load),
            state_dict=lambda: {"state": state(), "exchanges": self._exchanges},
            min_replica_size=1,
            use_async_quorum=True,
            timeout=timedelta(seconds=REPLY_SECONDS),
            quorum_timeout=timedelta(seconds=timeout),
            connect_timeout=timedelta(seconds=REPLY_SECONDS),
            rank=world.rank,
            world_size=world.size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=f"http://{cfg.lighthouse}",
            replica_id=f"{cfg.id:06}",
            # the default is a name that was looked up when torchft was imported
            hostname=socket.gethostname(),
            checkpoint_transport=StateTransport(timedelta(seconds=SILENCE_SECONDS), num_chunks=0),
            init_sync=False,  # equal seeds make equal weights
        )

    def _load(self, load: Callable[[State], None], received: dict[str, Any]) -> None:
        self._source_exchanges = received["exchanges"]
        load(received["state"])

    def meet(self, step: int, exchanges: bool = False) -> Met:
        """Form a quorum with the groups that are alive. Collective.

        A group that is behind takes over the state of another one. step: number of steps that this
        group has done. exchanges: see Met.
        """
        self.load_state_dict({"step": step, "batches_committed": 0})
        self._exchanges, self._source_exchanges = exchanges, False
        self.start_quorum()
        self.wait_quorum()
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


def make_group(device: torch.device) -> ProcessGroupWrapper:
    """Return a group that can be connected anew, for tensors on this kind of device."""
    return ProcessGroupNCCL() if device.type == "cuda" else ProcessGroupGloo()


def serve_store(world: World, timeout: float) -> tuple[str, int, dist.Store | None]:
    """Return host and port of a store of this group, and on rank 0 the store itself. Collective.

    The ranks' own store does not do: without a launcher it lies in memory, and torchrun's still
    holds the keys of earlier attempts.
    """
    served: list[dist.Store] = []

    def serve() -> tuple[str, int]:
        host = socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        served.append(store)
        return host, store.port

    host, port = world.from_main("store of the group", serve, timeout)
    return host, port, served[0] if served else None
