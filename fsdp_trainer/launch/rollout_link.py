"""Ranks that only generate rollouts, and the connection of the training ranks with them."""

import pickle
import zlib
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.process import wait_until
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.world import HEARD_SECONDS, World

PIECE_BYTES = 2**22
"""A value goes through the store in pieces of this size: it refuses larger ones than 8 MiB."""
POLL_SECONDS = 0.02
END, FAILED = "end", "failed"
"""Keys of the exit code with which training ends, and of the error that ends a rollout rank."""


@dataclass
class RolloutLink:
    """This rank's end of the connection between the training ranks and the rollout ranks.

    Values go through a store, tensors from training rank 0 to all rollout ranks. number: among the
    ranks that tensors go through, 0 on training rank 0; None on all other training ranks.
    generators: number of rollout ranks.
    """

    store: dist.Store
    number: int | None
    generators: int
    on_gpu: bool
    timeout: float
    _group: Any = field(default=None, repr=False)

    @property
    def generates(self) -> bool:
        return bool(self.number)

    def put(self, key: str, value: Any) -> None:
        content = zlib.compress(pickle.dumps(value), 1)
        pieces = [content[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            store: Any = self.store  # its stub knows no bytes
            store.set(f"{key}/{i}", piece)
        self.store.set(key, str(len(pieces)))

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def get(self, key: str) -> Any:
        pieces = [f"{key}/{i}" for i in range(int(self.store.get(key)))]
        return pickle.loads(zlib.decompress(b"".join(self.store.get(piece) for piece in pieces)))

    def delete(self, key: str) -> None:
        for i in range(int(self.store.get(key))):
            self.store.delete_key(f"{key}/{i}")

    def wait_for(self, key: str, seconds: float) -> bool:
        """Wait for a value or the end of training, at most `seconds`; return True for the value."""
        wait_until(lambda: self.has(key) or self.has(END), seconds, POLL_SECONDS)
        return self.has(key)

    def count(self, key: str, more: int = 0) -> int:
        return self.store.add(key, more)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from training rank 0, or receive it. Collective of the two ends."""
        assert self.number is not None
        if self._group is None:
            self._group = self._connected()
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def _connected(self) -> Any:
        """Return a process group of training rank 0 and all rollout ranks."""
        place: Any = dist.PrefixStore("tensors", self.store), self.number, 1 + self.generators
        wait = timedelta(seconds=self.timeout)
        group: Any
        gloo: Any = dist.ProcessGroupGloo  # their stubs name no arguments
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if self.on_gpu:
            options = nccl.Options()
            options._timeout = wait
            group = nccl(*place, options)
        else:
            group = gloo(*place, wait)
        return group

    def leave(self, reason: str, code: int) -> None:
        """Let the other side end too. reason, code: why this rank ends, and its exit code."""
        if self.number == 0:
            self.put(END, code)
            # the store may end with this process
            wait_until(lambda: self.count("heard") == self.generators, HEARD_SECONDS)
        elif self.generates and not self.has(END):
            self.put(FAILED, RunFailed(reason))

    def end_code(self) -> int:
        code: int = self.get(END)
        self.count("heard", 1)
        return code


def divided(world: World, generators: int, timeout: float) -> tuple[World, RolloutLink | None]:
    """Return the world of this rank's side, and its link to the other side; None: there is none.

    generators: launch.rollout_ranks; the last ranks generate.
    """
    if not generators:
        return world, None
    training = world.size - generators
    generates = world.rank >= training
    number = world.rank - training + 1 if generates else (0 if world.rank == 0 else None)
    link = RolloutLink(
        dist.PrefixStore("rollouts", world.store),
        number,
        generators,
        world.device.type == "cuda",
        timeout,
    )
    side = "generating" if generates else "training"
    own = replace(
        world,
        rank=world.rank - training if generates else world.rank,
        size=generators if generates else training,
        store=dist.PrefixStore(side, world.store),
    )
    return own, link


def require_training_ranks(world: World, generators: int) -> None:
    if generators >= world.size:
        reason = f"leaves no rank for training: there are {world.size}.\nUse more ranks, or fewer"
        raise UserError(
            "the ranks cannot be divided",
            f"launch.rollout_ranks={generators}",
            f"{reason} of these",
        )
