"""Detection of silent data corruption (wrong results without an error) by comparing bits.

Dixit et al. 2021, "Silent Data Corruptions at Scale".
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import gather, local_part
from fsdp_trainer.checkpoint.state import parameter_of
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.facts import spans
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.pipeline import copies_in_stages

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LOSS, ACTIVATIONS, SUMS = "loss", "gradient of the activations", "sums of the parameters' gradients"
OWN = {LOSS, ACTIVATIONS}
"""Results of a single rank, or of the ranks that split its rows. SUMS are wrong on all ranks if one
rank or the network has failed."""
Ranks = tuple[int, ...]


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return, for each tensor, the sum of the bit patterns of this rank's part.

    Any single flipped bit changes the sum. Waits for the device.
    """
    parts = [local_part(tensor) for tensor in tensors]
    sums = [part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in parts]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []


def differences(one: dict[str, list[int]], other: dict[str, list[int]]) -> set[str]:
    return {name for name, value in one.items() if value != other[name]}


def outvoted(ranks: list[int], values: dict[int, int]) -> list[int]:
    value, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
    majority = 2 * count > len(ranks)
    return [rank for rank in ranks if values[rank] != value] if majority else ranks


def find_odd(by_rank: list[dict[int, int]]) -> dict[int, list[int]]:
    """Return, by key, the ranks whose value is not that of the majority; omit keys without any.

    by_rank: for each rank its values, which all ranks that have the same key should agree on.
    """
    holders: dict[int, list[int]] = {}
    for rank, values in enumerate(by_rank):
        for key in values:
            holders.setdefault(key, []).append(rank)
    odd = {
        key: outvoted(ranks, {rank: by_rank[rank][key] for rank in ranks})
        for key, ranks in holders.items()
    }
    return {key: ranks for key, ranks in odd.items() if ranks}


def ranks_with_copies(model: Decoder, dims: Dims, name: str, tensor: Tensor) -> Ranks:
    ranks = dims.holders(tensor)
    if copies_in_stages(parameter_of(name), model) == 1:
        return ranks
    first, *_, last = dims.stages()
    return tuple(stage[rank % len(stage)] for stage in (first, last) for rank in ranks)


@dataclass
class Corruption:
    """The comparisons of train.check_every. Collective: RunFailed is raised on all ranks."""

    every: int | None
    """Steps between two checks; None: no checks."""
    record: Callable[..., None]
    """record(event, **details) writes to events.jsonl."""
    holders: Callable[[str, Tensor], Ranks]
    """holders(name, tensor) returns the ranks that hold this rank's part, including this rank."""
    not_deterministic: set[str] = field(default_factory=set)
    """Results for which some rank's kernels are not deterministic: no longer compared."""

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def check_computation(
        self, step: int, compute: Callable[[], tuple[Tensor, Tensor | None, list[Tensor]]]
    ) -> None:
        """Raise RunFailed if a rank computes a micro-batch twice with different results.

        compute: returns loss, gradient of the activations (None: the embedding is frozen) and the
        parameters' gradients.

        If two passes differ on any rank, all ranks make a third. A result that differs in all three
        comes from kernels that are not deterministic: it is recorded once and not compared again.
        This may concern only some ranks, since short and long documents use different kernels.
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
        """Raise RunFailed if any results differ. by_rank: names of the differing results."""
        results = set().union(*by_rank)
        if not results:
            return
        ranks = [rank for rank, own in enumerate(by_rank) if own & OWN]
        what = ", ".join(sorted(results & OWN or results))
        how = f"computed a micro-batch of step {step:,} twice with different results ({what})"
        self._fail(step, ranks, how)

    def check_copies(self, step: int, state: dict[str, Tensor]) -> None:
        """Raise RunFailed unless ranks that hold the same part of a tensor hold the same bits.

        state: weights and optimizer state by name. Parts that only one rank holds are not compared.
        """
        names: dict[Ranks, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(self.holders(name, tensor), []).append(name)
        copied = {ranks: group for ranks, group in names.items() if len(ranks) > 1}
        order = [name for group in copied.values() for name in group]
        by_name = dict(zip(order, digests(state[name] for name in order), strict=True))
        hashes = {ranks: hash(tuple(by_name[n] for n in group)) for ranks, group in copied.items()}
        by_rank = gather({hash(ranks): value for ranks, value in hashes.items()})
        odd = find_odd(by_rank)
        if not odd:
            return
        mine = {hash(ranks): {n: by_name[n] for n in group} for ranks, group in copied.items()}
        odd_values = gather({key: values for key, values in mine.items() if key in odd})
        key = next(iter(odd))
        holders = [rank for rank, groups in enumerate(odd_values) if key in groups]
        first, *others = [
            name
            for name in odd_values[holders[0]][key]
            if len({odd_values[rank][key][name] for rank in holders}) > 1
        ]
        more = f" and {len(others)} more" if others else ""
        how = (
            f"held other bits than the rest of ranks {spans(holders)}, which have the same part, "
            f"after step {step:,}: {first}{more}"
        )
        self._fail(step, sorted(set().union(*odd.values())), how)

    def _fail(self, step: int, ranks: list[int], how: str) -> None:
        """Record the fault and raise RunFailed. ranks: those suspected; empty: it may be any."""
        hosts = gather(socket.gethostname())
        names = " or ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
        fault = f"{names or 'some rank, or the network,'} {how}"
        self.record("corruption", step=step, ranks=ranks, why=fault)
        dist.barrier()  # the event is written before any rank ends the run
        raise RunFailed(
            f"{fault}.\nA processor, memory or link gave wrong bits without an error. No "
            "checkpoint was written of it; leave that machine out, and the same command resumes "
            "from the checkpoint before"
        )
