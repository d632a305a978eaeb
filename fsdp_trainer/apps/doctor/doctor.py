"""The command `doctor`: starts the ranks, or runs as one. Only a rank imports torch."""

import os

from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.launch.hosts import start_on_hosts
from fsdp_trainer.launch.start import start_ranks, starts_ranks


def doctor(cfg: DoctorConfig, overrides: list[str]) -> int:
    """Examine the ranks that a launcher started, or else those that `train` would start here.

    Returns the exit code. 0: ready to train, perhaps with warnings; 3: there are problems.
    """
    if cfg.launch.hosts:
        return start_on_hosts(cfg, overrides, verb="doctor")
    if starts_ranks(cfg.launch, os.environ):
        return start_ranks(cfg, overrides, verb="doctor")
    for name, value in cfg.launch.env.items():
        os.environ.setdefault(name, value)
    from fsdp_trainer.apps.doctor.checkup import checkup

    return checkup(cfg)
