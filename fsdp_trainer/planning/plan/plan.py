"""The plan of a run: memory, time and messages.

Nothing is allocated, and hundreds of plans take a second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_trainer.config.devices import DEVICES, Device
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.flops import palm_flops
from fsdp_trainer.parallel.memory_check import checkpoint_bytes
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.memory import GIB, Memory, Moment, memory
from fsdp_trainer.planning.plan.messages import Recorded, Wire, busiest_wire
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.rollout_cost import Rollouts, ScoredBy, rollouts
from fsdp_trainer.planning.plan.time import Times, times


@dataclass(frozen=True)
class RunPlan:
    """The needs of a run on a number of ranks, and the duration of a step.

    slow, fast: times at the slow and the fast end of the range; wire: by dimension of the mesh;
    tokens, flops (PaLM's count), rows: of a step; micro_rows: rows of one rank in a micro-batch;
    batch_ranks: number of ranks that read different rows; checkpoint: bytes on disk.
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
    groups: int = 1
    """Groups of world_size ranks that share the run; `tokens` and `flops` are of all of them."""
    rollouts: Rollouts | None = None
    """The answers generated in a step, which fill `rows`; None without generation."""
    rehearsed: bool = False
    """True if memory and messages are those of a rehearsal."""

    @property
    def bytes_sent(self) -> dict[str, float]:
        """Bytes that the busiest rank sends in a step, by dimension of the mesh."""
        return {name: wire.gathered + wire.reduced for name, wire in self.wire.items()}

    def scaled(self, factor: float, pace: float) -> "RunPlan":
        """Return the plan with `factor` times the bytes and `pace` times the seconds."""

        def moment(one: Moment) -> Moment:
            bytes = {name: size * factor for name, size in one.bytes.items()}
            return one._replace(bytes=bytes | {"allowance": one.bytes["allowance"]})

        memory = self.memory
        moments = tuple(map(moment, memory.moments))
        return replace(
            self,
            memory=memory._replace(moments=moments, tensors=factor * memory.tensors),
            slow=self.slow.scaled(pace),
            fast=self.fast.scaled(pace),
        )

    @property
    def memory_bytes(self) -> float:
        return self.device.memory_gib * GIB

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak.total

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes

    @property
    def at_least(self) -> str:
        return "" if self.rehearsed else "at least "

    @property
    def host_bytes_per_node(self) -> float:
        return self.memory.host * min(self.world_size, self.device.per_node)

    @property
    def host_fits(self) -> bool:
        return self.host_bytes_per_node <= self.host_limit_gib * GIB

    @property
    def host_limit_gib(self) -> float:
        """Host memory of a node in GiB that many nodes do not exceed."""
        return self.device.host_gib * min(self.world_size, self.device.per_node)

    @property
    def empty_share(self) -> float:
        """Share of empty rows among those that ranks compute: rows may not divide evenly."""
        return 1 - self.rows / self.computed_rows

    @property
    def computed_rows(self) -> int:
        return self.micro_batches * self.micro_rows * self.batch_ranks

    @property
    def seconds(self) -> float:
        """Seconds of a step, in the middle of the range.

        If the speed of the device is unknown, that of an H100, which suffices to compare overrides.
        """
        return (self.slow.step + self.fast.step) / 2

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        return (self.fast.step, self.slow.step) if self.device.flops else None

    def mfu(self, seconds: float) -> float:
        """Return PaLM's FLOPs over the devices' bfloat16 peak, if a step takes this long."""
        return self.flops / seconds / self.devices / (self.device.flops or 1.0)

    @property
    def devices(self) -> int:
        return self.world_size * self.groups

    @property
    def checkpoint_seconds(self) -> float:
        nodes = max(1, self.world_size // self.device.per_node)
        return self.checkpoint / (self.device.disk * nodes)


def make_plan(
    cfg: TrainConfig,
    config: ModelConfig,
    world: int,
    device: Device,
    load: float = 1.0,
    known: KnownModels | None = None,
    recorded: Recorded | None = None,
) -> RunPlan:
    """Return the plan of `cfg` for a model of shape `config` on `world` ranks.

    load: with expert parallelism, rows of the busiest rank divided by the number with even routing;
    known: models of earlier plans; recorded: see `times`.
    """
    rated = device if device.flops else DEVICES["h100"]._replace(per_node=device.per_node)
    answers = rollouts(cfg, config, world, rated)
    run = PlannedRun.of(cfg, config, world, known)
    if answers is not None:
        answers = replace(answers, scored=tuple(scored_by(run, rated)))
    layout, whole = run.layout, run.model.whole
    batch, groups = layout.batch, run.exchange.groups
    tokens = batch.rows * groups * batch.seq_len
    return RunPlan(
        world_size=world,
        device=device,
        memory=memory(run, "cpu" if device.name == "cpu" else "cuda", load),
        slow=times(run, rated, False, load, recorded),
        fast=times(run, rated, True, load, recorded),
        wire=busiest_wire(run, rated, recorded and recorded.messages),
        tokens=tokens,
        micro_batches=layout.micro_batches,
        flops=palm_flops(config, tokens, batch.seq_len, whole.work),
        checkpoint=checkpoint_bytes(whole.counted, cfg.precision, cfg.optim),
        rows=batch.rows,
        micro_rows=batch.micro_rows,
        batch_ranks=layout.batch_ranks,
        groups=groups,
        rollouts=answers,
    )


def scored_by(run: PlannedRun, device: Device) -> Iterator[ScoredBy]:
    for one in run.scoring:
        fast, slow = (one.seconds(device, best) for best in (True, False))
        yield ScoredBy(one.title, one.weights, (fast, slow))
