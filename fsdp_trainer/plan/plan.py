"""The plan of a run: memory, time and messages. Nothing is allocated; hundreds take a second."""

from dataclasses import dataclass, replace

from fsdp_trainer.config.dimensions import batch_ranks, dimension_sizes
from fsdp_trainer.config.pipeline import micro_batches
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.devices import DEVICES, Device
from fsdp_trainer.models.adapters import fitted_adapter
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.flops import palm_flops
from fsdp_trainer.plan.memory import GIB, Memory, memory
from fsdp_trainer.plan.rollouts import Rollouts, rollouts, rows_of_answers
from fsdp_trainer.plan.time import Times, Wire, times, wire
from fsdp_trainer.plan.units import model_parts

HOST_GIB = 1024
"""Memory of a node beyond which many do not have it."""


@dataclass(frozen=True)
class RunPlan:
    """A run on one world: what it needs, and how long a step takes.

    tokens, flops (PaLM's count), rows: of a step; micro_rows: of a rank and forward; batch_ranks:
    how many ranks read different rows;
    checkpoint: bytes on disk.
    """

    world_size: int
    device: Device
    memory: Memory
    slow: Times
    fast: Times
    wire: dict[str, Wire]
    tokens: int
    micro_batches: int
    flops: float
    checkpoint: float
    rows: int
    micro_rows: int
    batch_ranks: int
    rollouts: Rollouts | None = None
    """None where no answers are made; else rows are those that they fill."""

    @property
    def memory_bytes(self) -> float:
        """Bytes that a device has."""
        return self.device.memory_gib * GIB

    @property
    def fits(self) -> bool:
        """True if a device has enough for the peak."""
        return self.memory.peak.total <= self.memory_bytes

    @property
    def host_bytes_per_node(self) -> float:
        """Bytes of the host that all ranks of a node hold together."""
        return self.memory.host * min(self.world_size, self.device.per_node)

    @property
    def host_fits(self) -> bool:
        """True if most nodes have that much."""
        return self.host_bytes_per_node <= HOST_GIB * GIB

    @property
    def empty_share(self) -> float:
        """Share of the rows that ranks compute which are empty, since rows do not divide."""
        return 1 - self.rows / self.computed_rows

    @property
    def computed_rows(self) -> int:
        """Rows of a step that ranks compute, empty ones included."""
        return self.micro_batches * self.micro_rows * self.batch_ranks

    @property
    def seconds(self) -> float:
        """Seconds of a step, the middle of the range.

        On an H100 if the device's speed is not known, to compare overrides by.
        """
        return (self.slow.step + self.fast.step) / 2

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """The shortest and the longest time of a step; None if the device's speed is not known."""
        return (self.fast.step, self.slow.step) if self.device.flops else None

    def mfu(self, seconds: float) -> float:
        """Return PaLM's FLOPs over all devices' bfloat16 peak, if a step takes this long."""
        return self.flops / seconds / self.world_size / (self.device.flops or 1.0)

    @property
    def checkpoint_seconds(self) -> float:
        """To write a checkpoint, all nodes together."""
        nodes = max(1, self.world_size // self.device.per_node)
        return self.checkpoint / (self.device.disk * nodes)


def make_plan(
    cfg: TrainConfig, config: ModelConfig, world: int, device: Device, load: float = 1.0
) -> RunPlan:
    """The plan of `cfg` for a model of shape `config` on `world` ranks.

    load: rows of the rank that gets most of them over the even number, where experts are divided.
    """
    if cfg.sharding.tensor > 1:  # a rank's part of a matrix may be too narrow for their rank
        cfg = replace(cfg, adapter=fitted_adapter(cfg.adapter, config))
    rated = device if device.flops else DEVICES["h100"]._replace(per_node=device.per_node)
    answers = rollouts(cfg, config, world, rated)
    cfg = rows_of_answers(cfg)
    tokens = cfg.batch.rows * cfg.batch.seq_len
    parts = model_parts(config, cfg)
    return RunPlan(
        world_size=world,
        device=device,
        memory=memory(cfg, config, world, "cpu" if device.name == "cpu" else "cuda", load),
        slow=times(cfg, config, world, rated, best=False, load=load),
        fast=times(cfg, config, world, rated, best=True, load=load),
        wire=wire(cfg, config, world, rated),
        tokens=tokens,
        micro_batches=micro_batches(cfg, world),
        flops=palm_flops(config, tokens, cfg.batch.seq_len, parts.work),
        checkpoint=parts.checkpoint(cfg),
        rows=cfg.batch.rows,
        micro_rows=cfg.batch.micro_rows,
        batch_ranks=batch_ranks(dimension_sizes(cfg.sharding, world)),
        rollouts=answers,
    )
