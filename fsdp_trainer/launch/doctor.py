"""The verb `doctor`: its ranks, and what they found as people read it. Imports no torch before there is a rank."""

import os
from typing import TYPE_CHECKING

from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.launch.hosts import start_on_hosts
from fsdp_trainer.launch.start import start_ranks, starts_ranks

if TYPE_CHECKING:
    pass


def doctor(cfg: DoctorConfig, overrides: list[str]) -> int:
    """Look over what a launcher started, else what `train` would start here. 0: fit to train, perhaps with warnings; 3: not."""
    if cfg.launch.hosts:
        return start_on_hosts(cfg, overrides, verb="doctor")
    if starts_ranks(cfg.launch, os.environ):
        return start_ranks(cfg, overrides, verb="doctor")
    os.environ.update(
        {name: value for name, value in cfg.launch.env.items() if name not in os.environ}
    )
    from fsdp_trainer.launch.checkup import checkup

    return checkup(cfg)
