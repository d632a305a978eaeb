"""Words of small runs that learn from their own answers, and what of two such runs is compared."""

from named_runs import GRPO

KEYS = [*GRPO, "batch.rows=4", "batch.micro_rows=2", "checkpoint.keep=9", "optim.lr=0.01"]
SEVERAL = [*KEYS, "checkpoint.every=1", "train.steps=6"]
PARTS = ["objective.ahead=3", "objective.round_tokens=2"]
"""Rollouts that are made in parts, by the weights of several steps."""
COLUMNS = ("reward", "loss", "grad_norm", "staleness", "sampler_difference")


def with_environment(folder, source, name):
    """Return words for an environment, the class `name` in `source`, which rewards answers."""
    file = folder / f"{name.lower()}.py"
    file.write_text(source)
    return [f"objective.environment={file}:{name}", "objective.rewards=[]"]
