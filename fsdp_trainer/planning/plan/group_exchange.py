"""The exchange between groups of ranks that share a run: its bytes and its time."""

import math
from dataclasses import dataclass, replace

from fsdp_trainer.base.eight_bit_messages import BYTES
from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.schema import Batch, Replicas

FEWEST = 2
"""Groups that are assumed if launch.groups does not say how many there are."""


@dataclass(frozen=True)
class GroupExchange:
    """The groups of a run, and the messages of a rank to those with its number in other groups.

    groups: number of groups, 1 without; number: bytes that a rank sends of each trained number in
    one exchange; every: steps between two exchanges of a number; delay: steps that go on while one
    is on its way; rate: bytes per second of a rank to other groups, None: as between nodes.
    """

    groups: int = 1
    number: float = 0.0
    every: int = 1
    delay: int = 0
    rate: float | None = None

    @classmethod
    def of(
        cls, replicas: Replicas, groups: int, number_bytes: int, gbps: float | None
    ) -> "GroupExchange":
        """Return the exchange of a run.

        groups: launch.groups; number_bytes: of a number of a gradient; gbps: plan.groups_gbps.
        """
        if replicas.method == "none":
            return cls()
        groups = max(FEWEST, groups)
        rate = gbps / 8 * 1e9 if gbps else None
        summed = 2 * (groups - 1) / groups * number_bytes  # a ring
        if replicas.method == "sync":
            return cls(groups, summed, rate=rate)
        number = (groups - 1) * BYTES if replicas.quantize else summed
        return cls(groups, number, replicas.every, replicas.delay, rate)

    def batch_of_one(self, batch: Batch) -> Batch:
        return replace(batch, rows=math.ceil(batch.rows / self.groups))

    def sent(self, own: float) -> float:
        """Return the bytes that a rank sends in a step, on average. own: its trained numbers."""
        return own * self.number / self.every

    def seconds(self, own: float, device: Device, efficiency: float) -> float:
        """Return the seconds of the messages of a step, on average.

        own: trained numbers of a rank; efficiency: share of the rate that is reached.
        """
        return self.sent(own) / (self.rate or device.network) / efficiency

    def exposed(self, seconds: float, step: float) -> float:
        """Return the part of `seconds` that a step waits. step: the other seconds of a step."""
        return max(0.0, seconds - self.delay * step / self.every)
