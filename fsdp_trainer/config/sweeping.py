"""How a sweep is run: the keys of `hydra.launcher` and `hydra.sweeper`, by the names that these are chosen with."""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.config.schema import key

# fmt: off  (a key is a line)


@dataclass
class Local:
    """Jobs run on this node."""

    jobs: int | None = key(None, "jobs at once, each with GPUs of its own; null: as many as there are GPUs for, without GPUs 1", minimum=1)
    memory_gib: float | None = key(
        None,
        "a job that needs more memory on a GPU, by `plan`, is not started; null: what GPU 0 of this node has, without GPUs no limit",
        above=0,
    )


@dataclass
class Optuna:
    """Values are chosen by what came of those before, as optuna does it."""

    n_trials: int = key(20, "jobs in all, those of earlier commands with the same values to choose from included", minimum=1)
    metric: str | None = key(
        None,
        "what of metrics.jsonl a job is judged by, at the last step that has it; null: the validation loss, without validation the loss",
    )
    direction: str = key("minimize", "whether less of it is better, or more", choices=("minimize", "maximize"))
    sampler: str = key(
        "tpe", "how values are chosen: `tpe` (Bergstra et al. 2011) learns from jobs before, `random` does not", choices=("tpe", "random")
    )
    startup_trials: int = key(5, "jobs with random values before tpe chooses, and to their end before median prunes", minimum=1)
    pruner: str = key(
        "none",
        "what ends jobs early: `median`, if worse than half of those before at that step; `asha`, `hyperband` (Li et al. 2018): if not among the best quarter, third, at steps ever further apart",
        choices=("none", "median", "asha", "hyperband"),
    )
    prune_from: int = key(1, "the first step at which a job may be ended", minimum=1)
    prune_every: int = key(10, "steps whose mean is judged; validation losses are judged one by one", minimum=1)
    seed: int = key(
        0, "of the sampler: with one job at a time the same seed chooses the same values, however often the sweep is stopped", minimum=0
    )
    params: dict[str, Any] = key({}, "in sweep files: what varies")


LAUNCHERS: dict[str, Any] = {"local": Local}
SWEEPERS: dict[str, Any] = {"optuna": Optuna}
