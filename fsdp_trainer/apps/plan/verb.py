"""The command `plan`: estimates memory and speed from the overrides of training."""

import json
import math
from typing import TYPE_CHECKING

from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.base.torch_import import importing_torch
from fsdp_trainer.config.devices import has_gpus, nothing_to_plan_for
from fsdp_trainer.config.verbs import PlanConfig

if TYPE_CHECKING:  # imports torch
    from fsdp_trainer.apps.plan.search import PlannedLayout, Search
    from fsdp_trainer.models.config import ModelConfig
    from fsdp_trainer.planning.plan.suggest import Suggestion

DOES_NOT_FIT = 3
REHEARSED = 3
"""Layouts of a search that a rehearsal confirms."""
MOST_REHEARSED = 10
"""Layouts of a search that are rehearsed if one of them fits; else all are, until one does."""


def plan(cfg: PlanConfig) -> int:
    """Print the plan for each GPU and world size, as text or JSON.

    Returns 0 if any of them fits, else 3. Raises UserError if the model or the device is unknown.
    """
    require_device(cfg)  # before torch is imported
    store = Store(cfg)
    return store.printed(cfg, lambda: print_plan(cfg, store))


def print_plan(cfg: PlanConfig, store: Store) -> int:
    if cfg.plan.table:
        return print_table(cfg)
    with importing_torch():
        from fsdp_trainer.apps.plan.device_plans import plans_for_device
        from fsdp_trainer.apps.plan.show import as_json, show
        from fsdp_trainer.apps.plan.show_gpus import show_gpus
        from fsdp_trainer.planning.plan.fsdp_units import KnownModels
        from fsdp_trainer.planning.plan.plan_inputs import (
            architecture,
            assumed_of_images,
            each_gpu,
            require_sharing,
        )
        from fsdp_trainer.planning.plan.scoring_models import uncounted
        from fsdp_trainer.planning.plan.second_model import assumed_of

    config, assumed = architecture(cfg)
    assumed += assumed_of_images(cfg.plan.image_share, config)
    assumed += [*assumed_of(cfg.second_model), *uncounted(cfg.objective)]
    if cfg.plan.search:
        return search(cfg, config, assumed, store)
    require_sharing(cfg, config)
    known = KnownModels()
    answers = [plans_for_device(one, config, assumed, known, store) for one in each_gpu(cfg)]
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


def print_table(cfg: PlanConfig) -> int:
    """Print the models that fit. Returns 0 if any does, else 3."""
    with importing_torch():
        from fsdp_trainer.apps.plan.model_table import model_rows, show_table, table_as_json

    rows = model_rows(cfg)
    if cfg.plan.format == "json":
        print(json.dumps(table_as_json(cfg, rows)))
    else:
        show_table(cfg, rows)
    return 0 if any(any(row.longest.values()) for row in rows) else DOES_NOT_FIT


def require_device(cfg: PlanConfig) -> None:
    named = cfg.plan.gpu or cfg.plan.memory_gib or cfg.launch.device == "cpu"
    if not (named or has_gpus(cfg.launch)):
        raise nothing_to_plan_for()


def search(cfg: PlanConfig, config: "ModelConfig", assumed: list[str], store: Store) -> int:
    """Print the layouts that fit, fastest first. Returns 0 if there is any, else 3.

    Raises UserError for several GPUs or world sizes.
    """
    from fsdp_trainer.apps.plan.search import Search
    from fsdp_trainer.apps.plan.show_layouts import layouts_as_json, show_layouts
    from fsdp_trainer.planning.plan.changes import Candidate
    from fsdp_trainer.planning.plan.plan_inputs import only_target

    world, device = only_target(cfg)
    layouts = Search(Candidate(cfg, config, world, device))
    reasons = rehearse_fastest(layouts, store) if cfg.plan.rehearse else set()
    ways = ways_to_fit(layouts)
    assumed = [*assumed, *sorted({*reasons, device.remark} - {""})]
    if cfg.plan.format == "json":
        print(json.dumps(layouts_as_json(cfg, layouts, assumed, ways), allow_nan=False))
    else:
        show_layouts(cfg, config, layouts, assumed, ways)
    return 0 if layouts.layouts else DOES_NOT_FIT


def rehearse_fastest(search: "Search", store: Store) -> set[str]:
    """Rehearse layouts, fastest first, until no other can be the fastest; remove misfits.

    A layout can be if it gained by its rehearsal what the one that gained most did. If none fits,
    the nearest is rehearsed. Returns why some could not be rehearsed.
    """
    from fsdp_trainer.apps.plan.device_plans import with_correction
    from fsdp_trainer.apps.plan.rehearsed_plan import rehearsed_plan
    from fsdp_trainer.apps.plan.search import by_speed

    fitting: list[PlannedLayout] = []
    unknown: list[PlannedLayout] = []
    reasons = set()
    gain, number = 1.0, 0
    for number, layout in enumerate(search.layouts):
        fastest = min((one.plan.seconds for one in fitting), default=math.inf)
        is_slower = gain * layout.plan.seconds > fastest and len(fitting) >= REHEARSED
        if is_slower or (number >= MOST_REHEARSED and (fitting or unknown)):
            break
        plan, reason = rehearsed_plan(layout.run, layout.plan, store)
        reasons.add(reason)
        gain = min(gain, plan.seconds / layout.plan.seconds)
        if plan.fits:
            (fitting if plan.rehearsed else unknown).append(layout._replace(plan=plan))
    else:
        number = len(search.layouts)
    others = search.layouts[number:]
    search.order([*sorted(fitting, key=by_speed), *unknown, *others])
    nearest = search.nearest
    if nearest and not search.layouts:
        plan, reason = rehearsed_plan(nearest.run, nearest.plan, store)
        reasons.add(reason)
        search.name_nearest(nearest._replace(run=with_correction(nearest.run, plan), plan=plan))
    return reasons


def ways_to_fit(search: "Search") -> "list[Suggestion]":
    from fsdp_trainer.planning.plan.suggest import fitting, least_memory

    if search.layouts or search.nearest is None:
        return []
    run, plan = search.nearest.run, search.nearest.plan
    return fitting(run, plan) or [least_memory(run, plan)]
