"""The command `rehearse`: one step of each kind of rank, on fake tensors, beside the plan."""

import json
from pathlib import Path

from fsdp_trainer.apps.plan.verb import DOES_NOT_FIT, require_device
from fsdp_trainer.base.torch_import import importing_torch
from fsdp_trainer.config.verbs import RehearseConfig


def rehearse_verb(cfg: RehearseConfig) -> int:
    """Print what a step of each kind of rank does, as text or JSON, and write a page if asked.

    Returns 0 if all finish their step and fit the device, else 3. Raises UserError if the model or
    the device is unknown, or for a run that cannot be rehearsed.
    """
    require_device(cfg)  # before torch is imported
    with importing_torch():
        from fsdp_trainer.apps.rehearse.comparison import compare
        from fsdp_trainer.apps.rehearse.rehearsal_page import cannot_write, write_page
        from fsdp_trainer.apps.rehearse.rehearsal_text import as_json, show
        from fsdp_trainer.observe.console import Console
        from fsdp_trainer.planning.plan.changes import Candidate
        from fsdp_trainer.planning.plan.plan_inputs import (
            architecture,
            require_sharing,
            single_target,
        )
        from fsdp_trainer.planning.plan.second_model import assumed_of

    page = Path(cfg.rehearse.html).expanduser() if cfg.rehearse.html else None
    if page and not page.parent.is_dir():
        raise cannot_write(page, "there is no such folder")
    config, assumed = architecture(cfg)
    world, device = single_target(cfg, "a rehearsal is of one cluster")
    require_sharing(cfg, config)
    is_json = cfg.plan.format == "json"
    console = Console(quiet=is_json)
    answer = compare(Candidate(cfg, config, world, device), console.paced())
    assumed = [*assumed, *assumed_of(cfg.second_model)]
    if is_json:
        print(json.dumps(as_json(answer, assumed), allow_nan=False))
    else:
        show(cfg, answer, assumed)
    if page:
        write_page(page, answer, cfg)
        console.say(f"wrote  {page}")
    return 0 if answer.passes else DOES_NOT_FIT
