"""`fsdp-trainer plan`: from the same overrides as training, whether it fits, how fast it is, and what to change."""

import json

from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.devices import has_gpus, nothing_to_plan_for

DOES_NOT_FIT = 3
LIKELY = (0.2, 0.65)
"""Shares of a GPU's peak that trainings of language models reach, from published runs."""


def plan(cfg: PlanConfig) -> int:
    """Print the plan of each world, as text or JSON. Returns 0 if any of them fits, else 3. Raises UserError."""
    if not (
        cfg.plan.gpu or cfg.plan.memory_gib or cfg.launch.device == "cpu" or has_gpus(cfg.launch)
    ):
        raise nothing_to_plan_for()  # before torch is imported
    from fsdp_trainer.plan.inputs import architecture, target, world_sizes
    from fsdp_trainer.plan.plan import make_plan
    from fsdp_trainer.plan.show import as_json, show
    from fsdp_trainer.plan.suggest import least, suggest

    worlds = world_sizes(cfg)
    devices = [target(cfg, world) for world in worlds]
    config, assumed = architecture(cfg)
    plans = [
        make_plan(cfg, config, world, device) for world, device in zip(worlds, devices, strict=True)
    ]
    assumed += sorted({device.remark for device in devices if device.remark})
    if cfg.plan.efficiency and not LIKELY[0] <= cfg.plan.efficiency <= LIKELY[1]:
        assumed.append(
            f"plan.efficiency={cfg.plan.efficiency:g}, though published trainings reach "
            f"{LIKELY[0]} to {LIKELY[1]} of the peak"
        )
    suggestions = [
        suggest(cfg, config, world, device) for world, device in zip(worlds, devices, strict=True)
    ]
    needs = [None if plan.fits else least(cfg, config, plan) for plan in plans]
    if cfg.plan.format == "json":
        print(json.dumps(as_json(cfg, plans, suggestions, needs, assumed), allow_nan=False))
    else:
        show(cfg, config, plans, suggestions, needs, assumed)
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT
