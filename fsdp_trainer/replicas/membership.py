"""This group's membership among the groups that share a run: torchft's manager, and our state.

torchft's lighthouse knows which groups are alive; before each step or exchange its manager forms
a quorum of them, connects their ranks anew if it has changed, and sends the state of one that is
ahead to those that are behind.
"""

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torchft.coordination import ManagerServer
from torchft.manager import Manager

from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.group_secret import TOKEN
from fsdp_trainer.launch.world import World
from fsdp_trainer.replicas.connections import (
    REPLY_SECONDS,
    RETRY_SECONDS,
    OtherSettings,
    Settings,
    Stranger,
    differences,
    make_group,
    need_new_connection,
    own_address,
    reach_lighthouse,
    serve_store,
)
from fsdp_trainer.replicas.state_transfer import State, StateTransport

SILENCE_SECONDS = 30.0
"""Seconds without a byte after which the transfer of a state is given up."""
WITHOUT_SECRET = (
    "has a group that does not know this one's secret. All groups need the same"
    f"\n{TOKEN}, or without it the same run's folder"
)


class Met(NamedTuple):
    """The outcome of a meeting of the groups.

    was_behind: True if this group has taken over the state of another one. source_exchanges: True
    if that one is about to exchange what it has changed.
    """

    was_behind: bool
    source_exchanges: bool


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


def manager_at(host: str, *, bind: str, **options: Any) -> ManagerServer:
    """Return torchft's server of a group, which listens at this address alone."""
    return ManagerServer(bind=f"{host}:{bind.rpartition(':')[2]}", **options)


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
        settings: Settings,
        secret: bytes,
        state: Callable[[], State],
        load: Callable[[State], None],
    ):
        """Join the groups at cfg.lighthouse. Collective.

        device: of the tensors to exchange. settings: what all groups must have in common. secret:
        what only they know. state, load: return this rank's state for another group, and take over
        that of another group.
        """
        self._lighthouse, self._timeout_seconds = str(cfg.lighthouse), timeout
        reach = partial(reach_lighthouse, self._lighthouse)
        run_on_rank_0(f"reach replicas.lighthouse={self._lighthouse}", reach)
        host = own_address(self._lighthouse)
        self.group = make_group(device, host, settings, secret)
        self._settings, self._secret, self._is_new = settings, secret, True
        self._exchanges = self._source_exchanges = False
        address, port, self._served = serve_store(world, host, timeout)
        with patch("torchft.manager.ManagerServer", partial(manager_at, host)):
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
                checkpoint_transport=StateTransport(
                    host, timedelta(seconds=SILENCE_SECONDS), secret
                ),
                init_sync=False,  # equal seeds make equal weights
            )
        self._client: Any = ManagerConnection(self._client, self._look_at)

    def _load(self, load: Callable[[State], None], received: dict[str, Any]) -> None:
        self._source_exchanges = received["exchanges"]
        load(received["state"])

    def _look_at(self, quorum: Any) -> None:
        if need_new_connection(quorum.reconfigure_handles, self._settings, self._secret):
            self._quorum_id = -1

    def _reconfigure_pg(self, quorum_id: int, handles: list[str]) -> None:
        """Connect the groups of a quorum, under a number that no earlier connection had."""
        known = f"{quorum_id} {handles}".encode()
        number = int.from_bytes(hashlib.sha256(known).digest()[:7], "big")
        super()._reconfigure_pg(number, handles)

    def meet(self, step: int, exchanges: bool = False) -> Met:
        """Form a quorum with the groups that are alive. Collective.

        A group that is behind takes over the state of another one. step: number of steps that this
        group has done. exchanges: see Met. Raises RunFailed if the lighthouse does not answer, and
        UserError if this group is new and its settings or its secret are not those of the others.
        """
        self.load_state_dict({"step": step, "batches_committed": 0})
        self._exchanges, self._source_exchanges = exchanges, False
        deadline = time.monotonic() + self._timeout_seconds
        while not self._has_met():
            if time.monotonic() > deadline:
                raise self._no_meeting("has a group with other settings or another secret")
            time.sleep(RETRY_SECONDS)
        self._is_new = False
        is_behind: bool = self._healing and self._pending_state_dict is not None
        if is_behind:
            self._apply_pending_state_dict()
        # otherwise the state would be loaded a second time after the step
        self._healing = False
        return Met(is_behind, self._source_exchanges)

    def _has_met(self) -> bool:
        """Form a quorum; return False if that must be tried again."""
        self._quorum_future = None
        self.start_quorum()
        try:
            self.wait_quorum()
        except TimeoutError:
            raise self._no_meeting("does not answer") from None
        except Stranger:
            if self._is_new:
                raise UserError(
                    "the groups have no common secret",
                    f"replicas.lighthouse={self._lighthouse}",
                    WITHOUT_SECRET,
                ) from None
            return False
        except OtherSettings as error:
            if self._is_new:
                problems = differences(error.args[0], self._settings)
                raise UserError("groups of a run need the same settings", problems) from None
            return False
        return True

    def _no_meeting(self, reason: str) -> RunFailed:
        waited = f"no meeting of the groups for {self._timeout_seconds:g} s (launch.timeout)"
        return RunFailed(f"{waited}: replicas.lighthouse={self._lighthouse} {reason}")

    @property
    def present(self) -> int:
        """Number of groups in the quorum, those included that were behind.

        0 if they could not be connected; this group then commits nothing.
        """
        return 0 if self.errored() else self.group.size()

    @property
    def place(self) -> int:
        return self.group.parent.rank()
