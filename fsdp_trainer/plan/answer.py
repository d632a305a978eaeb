"""What a plan answers about one kind of device: each world, what to change, what was assumed."""

from dataclasses import dataclass

from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.plan.inputs import target, world_sizes
from fsdp_trainer.plan.plan import RunPlan, make_plan
from fsdp_trainer.plan.suggest import Suggestion, least, suggest

LIKELY = (0.2, 0.65)
"""Shares of a GPU's peak that trainings of language models reach, from published runs."""


@dataclass(frozen=True)
class Answer:
    """The plans of one kind of device, smallest world first.

    suggestions: for each plan what makes it fit, or faster; least: for each that does not fit
    the changes with which a rank holds least, else None.
    """

    plans: list[RunPlan]
    suggestions: list[list[Suggestion]]
    least: list[Suggestion | None]
    assumed: list[str]

    @property
    def chosen(self) -> int:
        """The index of the smallest world that fits, else of the largest."""
        return next((i for i, plan in enumerate(self.plans) if plan.fits), len(self.plans) - 1)


def answer_for(cfg: PlanConfig, config: ModelConfig, assumed: list[str]) -> Answer:
    """Return the answer for the device that `cfg` names. Raises UserError where it names none."""
    worlds = world_sizes(cfg)
    devices = [target(cfg, world) for world in worlds]
    on_devices = list(zip(worlds, devices, strict=True))
    plans = [make_plan(cfg, config, world, device) for world, device in on_devices]
    remarks = sorted({device.remark for device in devices if device.remark})
    if cfg.plan.efficiency and not LIKELY[0] <= cfg.plan.efficiency <= LIKELY[1]:
        remarks.append(
            f"plan.efficiency={cfg.plan.efficiency:g}, though published trainings reach "
            f"{LIKELY[0]} to {LIKELY[1]} of the peak"
        )
    return Answer(
        plans=plans,
        suggestions=[suggest(cfg, config, world, device) for world, device in on_devices],
        least=[None if plan.fits else least(cfg, config, plan) for plan in plans],
        assumed=assumed + remarks,
    )
