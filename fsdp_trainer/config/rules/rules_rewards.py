"""Rules for objective.rewards. See config/rules/rules.py."""

from fsdp_trainer.config.check import Report, Violations
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.rewards.table import entry_problems


def rewards(cfg: TrainConfig, report: Report) -> Violations:
    """Check that entries of objective.rewards name existing rewards, with parts that these have."""
    problems = list(entry_problems(cfg.objective.rewards))
    if problems:
        yield "objective.rewards", "\n".join(problems)
