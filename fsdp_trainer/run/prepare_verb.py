"""The verb `prepare`: do ahead of time what training does before its first step.

Tokenizes the data; with objective.top_k a teacher then reads it, on as many ranks as `launch` sets.
Torch is imported only if there is a teacher.
"""

import os

from fsdp_trainer.config.verbs import PrepareConfig
from fsdp_trainer.launch.start import start_ranks, starts_ranks
from fsdp_trainer.run.tokenize_ahead import tokenize_ahead


def prepare(cfg: PrepareConfig, overrides: list[str]) -> int:
    """Prepare the data, and the teacher's lists if they are stored. Returns the exit code."""
    if not cfg.second_model or not cfg.second_model.has_lists:
        return tokenize_ahead(cfg)
    if cfg.prepare.shard:
        code = tokenize_ahead(cfg)
        print("teach  the teacher reads the complete data: prepare without prepare.shard")
        return code
    if starts_ranks(cfg.launch, os.environ):
        return start_ranks(cfg, overrides, verb="prepare")
    for name, value in cfg.launch.env.items():
        os.environ.setdefault(name, value)
    from fsdp_trainer.run.prepare_rank import prepare_as_rank

    return prepare_as_rank(cfg)
