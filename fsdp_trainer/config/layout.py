"""The layout of a run: how its ranks are arranged, and the work of each in a step.

Imports no torch.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from fsdp_trainer.config.pipeline_schedules import Stages
from fsdp_trainer.config.schema import Batch, Sharding
from fsdp_trainer.errors import Problem

SMALL_MODEL = 2 * 2**30
"""Bytes of gathered weights that stay gathered by themselves: a fortieth of a GPU of 80 GB."""


@dataclass(frozen=True)
class Layout:
    """The arrangement of a run's ranks, and how they divide a step.

    sharding, batch: as configured; ranks: number of ranks. If the sizes do not divide the ranks
    (see `problem`), the product of the sizes is smaller than their number.
    """

    sharding: Sharding
    ranks: int
    batch: Batch

    # --- sizes

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by name, outermost first.

        Neighbouring ranks differ in the last dimension. Ranks that differ only in `replicate` hold
        the same part of the model's states; ranks that differ in any other dimension hold different
        parts. Ranks that differ only in `pipeline`, `context` or `tensor` read the same rows.
        """
        sharding = self.sharding
        readers = max(1, self.ranks // (sharding.pipeline * sharding.context * sharding.tensor))
        replicas = {"fsdp": 1, "hsdp": sharding.replicas, "ddp": readers}[sharding.strategy]
        return {
            "pipeline": sharding.pipeline,
            "replicate": replicas,
            "shard": max(1, readers // replicas),
            "context": sharding.context,
            "tensor": sharding.tensor,
        }

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """Sizes of the dimensions in which experts are distributed, outermost first.

        Ranks that differ in `expert` hold different experts; ranks that differ only in `eshard`
        hold different parts of the same experts.
        """
        size = self.sharding.expert
        outer = {name: self.sizes[name] for name in ("pipeline", "replicate")}
        return outer | {"eshard": max(1, self._replica_ranks // size), "expert": size}

    @property
    def batch_ranks(self) -> int:
        """Number of groups of ranks that read different rows of a step."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def same_rows(self) -> int:
        """Number of neighbouring ranks of a pipeline stage that read the same rows."""
        return self.sizes["context"] * self.sizes["tensor"]

    @property
    def fsdp_ranks(self) -> int:
        """Number of ranks over which fully_shard shards each tensor-parallel part."""
        return self.sizes["shard"] * self.sizes["context"]

    @property
    def stage_ranks(self) -> int:
        return self.ranks // self.sharding.pipeline

    @property
    def _replica_ranks(self) -> int:
        """Number of ranks of a stage that hold one copy of the states together."""
        return self.fsdp_ranks * self.sizes["tensor"]

    # --- a step

    @property
    def row_tokens(self) -> int:
        return self.batch.seq_len // self.sharding.context

    @property
    def tokens(self) -> int:
        return self.batch.micro_rows * self.row_tokens

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.batch.rows / (self.batch.micro_rows * self.batch_ranks))

    @property
    def stages(self) -> Stages:
        return Stages.of(self.sharding)

    @property
    def idle(self) -> float:
        """Fraction of a step in which a rank of the pipeline waits, if stages take equally long."""
        return self.stages.idle(self.micro_batches)

    def keeps_gathered(self, weights: float) -> bool:
        """Return True if units of a model's blocks stay gathered from forward to backward.

        weights: bytes of all of its weights in the computation's number format. auto: in a
        pipeline, where each micro-batch would gather them again; if they are few; and where one
        rank has all of them on its device. Gathering is then a cast, at most, and its result is as
        large as what autocast keeps for backward.
        """
        chosen = self.sharding.reshard_after_forward
        if chosen == "auto":
            cheap = self._replica_ranks == 1 or weights <= SMALL_MODEL
            on_device = cheap and not self.sharding.cpu_offload
            return on_device or self.sharding.strategy == "ddp" or self.sharding.pipeline > 1
        return not chosen

    @property
    def copy_ranks(self) -> int:
        """Number of ranks among which a second copy of the blocks is divided; 0: there is none.

        Divided among all `fsdp_ranks`, it would be the same as the first.
        """
        ranks = number_of_ranks(self.sharding) or 0
        return ranks if ranks < self.fsdp_ranks else 0

    @property
    def encodes_weights(self) -> bool:
        """True if gathered weights are sent in 8-bit numbers."""
        return self.fsdp_ranks > 1 and self.sharding.quantize in ("weights", "both")

    @property
    def encodes_gradients(self) -> bool:
        """True if addends of gradients are sent in 8-bit numbers."""
        return self.fsdp_ranks > 1 and self.sharding.quantize in ("gradients", "both")

    @property
    def gathers_once(self) -> bool:
        """True if weights stay gathered from a step's first micro-batch to its last."""
        return self.sharding.pipeline > 1 and self.keeps_gathered(math.inf)

    @property
    def reduces_once(self) -> bool:
        """True if a step's gradients are reduced only once, after its last micro-batch."""
        return self.sharding.accumulate == "unsharded" or self.stages.order.splits

    # --- problems

    @property
    def problem(self) -> Problem | None:
        """The problem if the ranks cannot be arranged as configured, else None."""
        sharding, ranks = self.sharding, self.ranks
        rest = ranks
        if math.prod(self.sizes.values()) == rest:
            return self._expert_problem() or self._copy_problem()
        inner = sharding.context * sharding.tensor
        stage = "ranks" if inner == 1 else "groups of sharding.context × sharding.tensor ranks"
        whats = {"tensor": "ranks", "context": "groups of sharding.tensor ranks", "pipeline": stage}
        for name, what in whats.items():
            size = getattr(sharding, name)
            if rest % size:
                nearest = max(n for n in range(1, size) if rest % n == 0)
                rule = f"must divide the number of {what}, which is {rest}"
                return Problem(
                    f"sharding.{name}={size}", f"{rule}.\nUse  sharding.{name}={nearest}"
                )
            rest //= size
        rule = f"must divide the number of ranks, which is {self.ranks}"
        if rest < self.ranks:
            rule = (
                f"must divide the ranks that read different rows, which are {rest} of {self.ranks}"
            )
        return Problem(f"sharding.replicas={sharding.replicas}", rule)

    def _expert_problem(self) -> Problem | None:
        size, replica = self.sharding.expert, self._replica_ranks
        if replica % size == 0:
            return None
        nearest = max(n for n in range(1, size) if replica % n == 0)
        rule = f"must divide the ranks of a replica (shard × context × tensor), which are {replica}"
        return Problem(f"sharding.expert={size}", f"{rule}.\nUse  sharding.expert={nearest}")

    def _copy_problem(self) -> Problem | None:
        """Return the problem if a second copy cannot be divided as configured."""
        size = number_of_ranks(self.sharding)
        if size is None or self.fsdp_ranks % size == 0:
            return None
        key = f"sharding.reshard_after_forward={size}"
        rule = (
            "a second copy is divided among neighbouring ranks of those that shard a parameter: "
            f"the number must divide theirs, which is {self.fsdp_ranks}"
        )
        sizes = [n for n in range(2, self.fsdp_ranks) if self.fsdp_ranks % n == 0]
        nearest = min(sizes, key=lambda n: abs(n - size)) if sizes else "true"
        return Problem(key, f"{rule}.\nUse  sharding.reshard_after_forward={nearest}")

    @property
    def pipeline_problem(self) -> Problem | None:
        """The problem if a step has too few micro-batches for the pipeline, else None."""
        sharding, batch = self.sharding, self.batch
        count, minimum = self.micro_batches, self.stages.least_micro_batches
        if sharding.pipeline == 1 or count >= minimum:
            return None
        reason = (
            f"and sharding.pipeline_schedule={sharding.pipeline_schedule} keep all ranks busy from "
            f"{minimum} micro-batches a step on; {batch.rows} rows over {self.batch_ranks} readers "
            f"of {batch.micro_rows} (batch.micro_rows) are {count}.\n"
            f"Use  batch.rows={minimum * batch.micro_rows * self.batch_ranks}"
        )
        smaller = batch.rows // (minimum * self.batch_ranks)
        if smaller:
            reason += f"  or  batch.micro_rows={smaller}"
        return Problem(f"sharding.pipeline={sharding.pipeline}", reason)


def number_of_ranks(sharding: Sharding) -> int | None:
    value = sharding.reshard_after_forward
    return value if isinstance(value, int) and not isinstance(value, bool) else None
