"""Layouts of a run that fit its devices: each tried by the same plan, fastest first.

Fixed are the model, the devices and their number, the length of rows and the rows of a step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fsdp_trainer.config.dimensions import dimension_sizes
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.plan.plan import RunPlan, make_plan
from fsdp_trainer.plan.suggest import changed, refused

Place = tuple[TrainConfig, int, Device]
"""What is chosen so far, the number of ranks, and the device of each."""


class Choice(NamedTuple):
    """What to type, and the keys that this sets."""

    overrides: tuple[str, ...]
    keys: dict[str, Any]


class Dimension(NamedTuple):
    """What is chosen about a layout.

    choices: those that hold least memory first. always_grows: after one that does not fit, no other
    does; else only after one that fits.
    """

    choices: Callable[[Place], Iterator[Choice]]
    always_grows: bool = False


class PlannedLayout(NamedTuple):
    """Overrides, and the plan with them."""

    overrides: tuple[str, ...]
    plan: RunPlan


def meshes(place: Place) -> Iterator[Choice]:
    """Shards over all ranks, over groups that replicate each other, and none."""
    cfg, world, _ = place
    # the keys of other dimensions are chosen already: what is left for these two
    sizes = dimension_sizes(changed(cfg, _sharding("fsdp", 1)).sharding, world)
    ranks = sizes["replicate"] * sizes["shard"]
    one = ("sharding.replicas=1",) if cfg.sharding.replicas > 1 else ()
    yield Choice(("sharding=fsdp", *one), _sharding("fsdp", 1))
    for replicas in range(2, ranks):
        if ranks % replicas == 0:
            words = ("sharding=hsdp", f"sharding.replicas={replicas}")
            yield Choice(words, _sharding("hsdp", replicas))
    if ranks > 1 and not cfg.sharding.cpu_offload:
        yield Choice(("sharding=ddp", *one), _sharding("ddp", 1))


def _sharding(strategy: str, replicas: int) -> dict[str, Any]:
    return {"sharding.strategy": strategy, "sharding.replicas": replicas}


def micro_rows(place: Place) -> Iterator[Choice]:
    """One row at a time, and powers of two with which no row is empty; the rest is accumulation."""
    cfg, world, _ = place
    sizes = dimension_sizes(cfg.sharding, world)
    readers = sizes["replicate"] * sizes["shard"]
    most = max(1, cfg.batch.rows // readers)
    for rows in (2**i for i in range(most.bit_length())):
        if rows == 1 or cfg.batch.rows % (rows * readers) == 0:
            yield Choice((f"batch.micro_rows={rows}",), {"batch.micro_rows": rows})


def recomputation(place: Place) -> Iterator[Choice]:
    """Blocks that are computed again as a whole, in part, and not at all."""
    for mode in ("full", "selective", "none"):
        yield Choice((f"activation_checkpoint={mode}",), {"activation_checkpoint.mode": mode})


DIMENSIONS = (Dimension(meshes), Dimension(micro_rows), Dimension(recomputation, always_grows=True))
"""In the order in which they are chosen: each sees what was chosen before it."""


class Search:
    """Tries layouts. layouts: those that fit, fastest first; nearest: of all the least memory."""

    def __init__(self, cfg: TrainConfig, config: ModelConfig, world: int, device: Device):
        self.config = config
        self.world = world
        self.device = device
        self.layouts: list[PlannedLayout] = []
        self.nearest: PlannedLayout | None = None
        self.tried = 0
        self._choose(cfg, (), DIMENSIONS)
        self.layouts.sort(key=lambda layout: (layout.plan.seconds, layout.plan.memory.peak.total))

    def _choose(
        self, cfg: TrainConfig, overrides: tuple[str, ...], dimensions: tuple[Dimension, ...]
    ) -> bool:
        """Try all choices of the first dimension with all of the others. Returns if any fits."""
        if not dimensions:
            return self._offloaded(cfg, overrides)
        (choices, always_grows), *others = dimensions
        fits = False
        for choice in choices((cfg, self.world, self.device)):
            words = (*overrides, *choice.overrides)
            if self._choose(changed(cfg, choice.keys), words, tuple(others)):
                fits = True
            elif fits or always_grows:
                break
        return fits

    def _offloaded(self, cfg: TrainConfig, overrides: tuple[str, ...]) -> bool:
        """Try a layout, and where it does not fit the same with activations in host memory."""
        key = "activation_checkpoint.offload"
        typed = (f"{key}=false",) if cfg.activation_checkpoint.offload else ()
        if self._fits(changed(cfg, {key: False}), (*overrides, *typed)):
            return True
        if self.device.name == "cpu":
            return False
        return self._fits(changed(cfg, {key: True}), (*overrides, f"{key}=true"))

    def _fits(self, cfg: TrainConfig, overrides: tuple[str, ...]) -> bool:
        self.tried += 1
        layout = PlannedLayout(overrides, make_plan(cfg, self.config, self.world, self.device))
        fits = layout.plan.fits and (layout.plan.host_fits or cfg.sharding.cpu_offload)
        if fits and not refused(cfg):
            self.layouts.append(layout)
        if not self.nearest or peak(layout) < peak(self.nearest):
            self.nearest = layout
        return fits


def peak(layout: PlannedLayout) -> float:
    """Return the bytes that a rank holds at most."""
    return layout.plan.memory.peak.total
