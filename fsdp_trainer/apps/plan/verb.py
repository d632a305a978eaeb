"""The command `plan`: estimates memory and speed from the overrides of training."""

import json
from typing import TYPE_CHECKING

from fsdp_trainer.config.devices import has_gpus, nothing_to_plan_for
from fsdp_trainer.config.verbs import Plan, PlanConfig
from fsdp_trainer.errors import Problem, UserError

if TYPE_CHECKING:  # imports torch
    from fsdp_trainer.apps.plan.search import Search
    from fsdp_trainer.apps.rehearse.comparison import PlanComparison
    from fsdp_trainer.models.config import ModelConfig

DOES_NOT_FIT = 3
REHEARSED = 3
"""Layouts that plan.rehearse rehearses."""


def plan(cfg: PlanConfig) -> int:
    """Print the plan for each GPU and world size, as text or JSON.

    Returns 0 if any of them fits, else 3. Raises UserError if the model or the device is unknown.
    """
    require_device(cfg)  # before torch is imported
    from fsdp_trainer.apps.plan.device_plans import plans_for_device
    from fsdp_trainer.apps.plan.show import as_json, show
    from fsdp_trainer.apps.plan.show_gpus import show_gpus
    from fsdp_trainer.plan.fsdp_units import KnownModels
    from fsdp_trainer.plan.plan_inputs import (
        architecture,
        assumed_of_images,
        each_gpu,
        require_sharing,
    )
    from fsdp_trainer.plan.scoring_models import uncounted
    from fsdp_trainer.plan.second_model import assumed_of

    require_search(cfg.plan)
    config, assumed = architecture(cfg)
    assumed += assumed_of_images(cfg.plan.image_share, config)
    assumed += [*assumed_of(cfg.second_model), *uncounted(cfg.objective)]
    if cfg.plan.search:
        return search(cfg, config, assumed)
    require_sharing(cfg, config)
    known = KnownModels()
    answers = [plans_for_device(one, config, assumed, known) for one in each_gpu(cfg)]
    if cfg.plan.format == "json":
        objects = [as_json(cfg, answer) for answer in answers]
        is_list = len(answers) > 1 or isinstance(cfg.plan.gpu, list)
        print(json.dumps(objects if is_list else objects[0], allow_nan=False))
    elif len(answers) > 1:
        show_gpus(cfg, config, answers)
    else:
        show(cfg, config, answers[0])
    fits = any(plan.fits for answer in answers for plan in answer.plans)
    return 0 if fits else DOES_NOT_FIT


def require_device(cfg: PlanConfig) -> None:
    """Raise UserError if no device is named and this machine has none."""
    named = cfg.plan.gpu or cfg.plan.memory_gib or cfg.launch.device == "cpu"
    if not (named or has_gpus(cfg.launch)):
        raise nothing_to_plan_for()


def search(cfg: PlanConfig, config: "ModelConfig", assumed: list[str]) -> int:
    """Print the layouts that fit, fastest first. Returns 0 if there is any, else 3.

    Raises UserError for several GPUs or world sizes.
    """
    from fsdp_trainer.apps.plan.search import Search
    from fsdp_trainer.apps.plan.show_layouts import layouts_as_json, show_layouts
    from fsdp_trainer.plan.changes import Candidate
    from fsdp_trainer.plan.plan_inputs import only_target

    world, device = only_target(cfg)
    layouts = Search(Candidate(cfg, config, world, device))
    assumed = [*assumed, *filter(None, [device.remark])]
    rehearsed = rehearse_fastest(cfg, layouts) if cfg.plan.rehearse else []
    if cfg.plan.format == "json":
        print(json.dumps(layouts_as_json(cfg, layouts, assumed, rehearsed), allow_nan=False))
    else:
        show_layouts(cfg, config, layouts, assumed, rehearsed)
    confirmed = not rehearsed or any(one.passes for one in rehearsed)
    return 0 if layouts.layouts and confirmed else DOES_NOT_FIT


def rehearse_fastest(cfg: PlanConfig, layouts: "Search") -> "list[PlanComparison]":
    """Rehearse the fastest layouts. Raises UserError for a run that cannot be rehearsed."""
    from fsdp_trainer.apps.rehearse.comparison import compare
    from fsdp_trainer.observe.console import Console

    report = Console(quiet=cfg.plan.format == "json").paced()
    return [compare(layout.run, report) for layout in layouts.layouts[:REHEARSED]]


def require_search(plan: Plan) -> None:
    """Raise UserError for plan.rehearse without plan.search."""
    if plan.rehearse and not plan.search:
        reason = (
            "is for the layouts of a search.\nUse  plan.search=true  with it, or for one layout"
            "  fsdp-trainer rehearse"
        )
        raise UserError("nothing is searched", [Problem("plan.rehearse=true", reason)])
