"""Silent data corruption: wrong results though nothing failed (Dixit et al. 2021, "Silent Data Corruptions at Scale"). Found by comparing bits."""

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_trainer.checkpoint.store import gather
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.optim.compact import local

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LOSS, STREAM, SUMS = "loss", "gradient of the activations", "sums of the parameters' gradients"
OWN = (LOSS, STREAM)
"""A rank's own; what differs in sums may be any rank's doing, or the network's."""


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Of this rank's part of each the sum of its bit patterns, which every single flipped bit changes. Waits for the device."""
    parts = [local(t) for t in tensors]
    sums = [t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in parts]
    return torch.stack([s.to(sums[0].device) for s in sums]).tolist()


class Corruption:
    """The comparisons of train.check_every. Collective; a difference is an event and RunFailed on all ranks."""

    def __init__(self, tell: Callable[..., None]):
        """tell(event, **details): for events.jsonl."""
        self.tell, self.host = tell, socket.gethostname()
        self.random: set[str] = set()
        """What kernels of this machine never give twice alike: no longer compared."""

    def check_computation(
        self, step: int, compute: Callable[[], tuple[Tensor, Tensor, list[Tensor]]]
    ) -> None:
        """`compute` gives loss, gradient of the activations and parameters' gradients of one micro-batch: twice the same bits.

        Where all ranks differ from themselves the kernels are not deterministic; told once. One rank alone computes a third time to know.
        """

        def once() -> dict[str, list[int]]:
            loss, stream, gradients = compute()
            return {LOSS: digests([loss]), STREAM: digests([stream]), SUMS: digests(gradients)}

        passes = [once(), once()]
        found = gather(self._differing(*passes))
        if not any(found):
            return
        if len(found) == 1:
            third = once()
            again = [self._differing(each, third) for each in passes]
            everywhere = {what for what in found[0] if all(what in differs for differs in again)}
        else:
            everywhere = {what for what in found[0] if all(what in differs for differs in found)}
        if (
            SUMS in everywhere
            and any(what in differs for what in OWN for differs in found)
            and not everywhere & {*OWN}
        ):
            everywhere.discard(SUMS)  # one rank's error is in every rank's sums
        if everywhere:
            self.random |= everywhere
            self.tell("not_deterministic", step=step, what=sorted(everywhere))
        left = [[what for what in differs if what not in everywhere] for differs in found]
        own = {
            rank: differs
            for rank, each in enumerate(left)
            if (differs := [what for what in each if what in OWN])
        }
        suspects = own or {rank: differs for rank, differs in enumerate(left) if differs}
        if suspects:
            who = self._named(list(suspects)) if own else "some rank, or the network,"
            what = ", ".join(sorted({what for differs in suspects.values() for what in differs}))
            self._fail(
                step,
                list(own),
                f"{who} computed a micro-batch of step {step:,} twice with different results ({what})",
            )

    def _differing(self, one: dict[str, list[int]], other: dict[str, list[int]]) -> list[str]:
        return [what for what in one if what not in self.random and one[what] != other[what]]

    def check_replicas(self, step: int, state: dict[str, Tensor]) -> None:
        """Replicas hold the same bits of `state`, weights and optimizer state by name. Nothing to compare without replicas."""
        mesh = next(t.device_mesh for t in state.values() if isinstance(t, DTensor))
        if "replicate" not in (mesh.mesh_dim_names or ()):
            return
        mine = digests(state.values())
        told: list[int] = gather(hash(tuple(mine)))
        odd: list[int] = []
        for replicas in mesh.mesh.T.tolist():  # the ranks that hold one shard
            kinds = Counter(told[rank] for rank in replicas)
            (kind, count), *others = kinds.most_common()
            if others:
                odd += [
                    rank for rank in replicas if told[rank] != kind or 2 * count <= len(replicas)
                ]
        if odd:
            everyone = gather(mine)
            column = next(replicas for replicas in mesh.mesh.T.tolist() if odd[0] in replicas)
            names = [
                name
                for i, name in enumerate(state)
                if len({everyone[rank][i] for rank in column}) > 1
            ]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._fail(
                step,
                odd,
                f"{self._named(odd)} held other bits than the replicas after step {step:,}: {names[0]}{more}",
            )

    def _named(self, ranks: list[int]) -> str:
        hosts: list[Any] = gather(self.host)
        return " or ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)

    def _fail(self, step: int, ranks: list[int], why: str) -> None:
        self.tell("corruption", step=step, ranks=ranks, why=why)
        dist.barrier()  # it is on record before any rank ends the world
        raise RunFailed(
            f"{why}.\nA processor, memory or link gave wrong bits without an error. No checkpoint was written of it; leave that machine out, "
            "and the same command goes on from the checkpoint before"
        )
