"""Silent data corruption: results that are wrong though nothing failed, found by comparing bits.

Dixit et al. 2021, "Silent Data Corruptions at Scale".
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.distributed import gather, local_part
from fsdp_trainer.errors import RunFailed

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LOSS, ACTIVATIONS, SUMS = "loss", "gradient of the activations", "sums of the parameters' gradients"
OWN = {LOSS, ACTIVATIONS}
"""Results that a rank alone computes. SUMS are wrong on all ranks if one rank or the network is."""


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sum of the bit patterns of this rank's part of each tensor. Waits for the device.

    Every single flipped bit changes it.
    """
    parts = [local_part(tensor) for tensor in tensors]
    sums = [part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in parts]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist()


def differences(one: dict[str, list[int]], other: dict[str, list[int]]) -> set[str]:
    """Return the names under which two passes have different digests."""
    return {name for name, value in one.items() if value != other[name]}


def outvoted(ranks: list[int], values: list[int]) -> list[int]:
    """Return those of `ranks` that do not have the value of the majority; without one, all."""
    value, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
    majority = 2 * count > len(ranks)
    return [rank for rank in ranks if values[rank] != value] if majority else ranks


@dataclass
class Corruption:
    """The comparisons of train.check_every. Collective: RunFailed is raised on all ranks alike."""

    every: int | None
    """Steps between two checks; None: there are none."""
    record: Callable[..., None]
    """record(event, **details) writes to events.jsonl."""
    replicas: list[list[int]]
    """Ranks with the same shard."""
    not_deterministic: set[str] = field(default_factory=set)
    """Results that some rank's kernels never compute twice alike: no longer compared."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is checked."""
        return self.every is not None and step % self.every == 0

    def check_computation(
        self, step: int, compute: Callable[[], tuple[Tensor, Tensor | None, list[Tensor]]]
    ) -> None:
        """Raise RunFailed if a rank computes a micro-batch twice with different results.

        compute: returns loss, gradient of the activations (None: the embedding is frozen) and the
        parameters' gradients.

        If two passes differ on any rank, all make a third. A result that is different in all three
        comes from kernels that are not deterministic: it is recorded once and not compared again.
        They need not be so on every rank: short documents take other kernels than long ones.
        """

        def run_pass() -> dict[str, list[int]]:
            loss, activations, gradients = compute()
            embedding = [] if activations is None else digests([activations])
            return {LOSS: digests([loss]), ACTIVATIONS: embedding, SUMS: digests(gradients)}

        first, second = run_pass(), run_pass()
        mine = differences(first, second) - self.not_deterministic
        by_rank: list[set[str]] = gather(mine)
        if not any(by_rank):
            return
        third = run_pass()
        never_alike = gather(mine & differences(first, third) & differences(second, third))
        random: set[str] = set().union(*never_alike)
        if random:
            self.not_deterministic |= random
            ranks = [rank for rank, results in enumerate(never_alike) if results]
            self.record("not_deterministic", step=step, ranks=ranks, what=sorted(random))
        self._blame(step, [results - random for results in by_rank])

    def _blame(self, step: int, by_rank: list[set[str]]) -> None:
        """Raise RunFailed for the results that differ on each rank, if there are any."""
        results = set().union(*by_rank)
        if not results:
            return
        ranks = [rank for rank, own in enumerate(by_rank) if own & OWN]
        what = ", ".join(sorted(results & OWN or results))
        how = f"computed a micro-batch of step {step:,} twice with different results ({what})"
        self._fail(step, ranks, how)

    def check_replicas(self, step: int, state: dict[str, Tensor]) -> None:
        """Raise RunFailed unless replicas hold the same bits. Without replicas, compare nothing.

        state: weights and optimizer state by name.
        """
        if len(self.replicas[0]) == 1:
            return
        mine = digests(state.values())
        hashes = gather(hash(tuple(mine)))
        odd = [rank for group in self.replicas for rank in outvoted(group, hashes)]
        if not odd:
            return
        by_rank = gather(mine)
        group = next(group for group in self.replicas if odd[0] in group)
        differ = [len(set(values)) > 1 for values in zip(*(by_rank[r] for r in group), strict=True)]
        # in a pipeline other stages hold other weights
        first, *others = compress(gather(list(state))[group[0]], differ)
        more = f" and {len(others)} more" if others else ""
        how = f"held other bits than the replicas after step {step:,}: {first}{more}"
        self._fail(step, odd, how)

    def _fail(self, step: int, ranks: list[int], how: str) -> None:
        """Record and raise what was found. ranks: one of them did it; none: it may be any."""
        hosts = gather(socket.gethostname())
        names = " or ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
        fault = f"{names or 'some rank, or the network,'} {how}"
        self.record("corruption", step=step, ranks=ranks, why=fault)
        dist.barrier()  # it is on record before any rank ends the world
        raise RunFailed(
            f"{fault}.\nA processor, memory or link gave wrong bits without an error. No "
            "checkpoint was written of it; leave that machine out, and the same command goes on "
            "from the checkpoint before"
        )
