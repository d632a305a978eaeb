"""The keys of `hydra.launcher` and `hydra.sweeper`, by the names that choose them."""

import re
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.config.keys import key

CORES_A_GPU = 12  # requested of Slurm, which may otherwise give all ranks of a node one core

# fmt: off  (a key is a line)


@dataclass
class Local:
    """The launcher that runs jobs on this node."""

    jobs: int | None = key(
        None,
        "jobs at once, each with GPUs of its own; null: as many as there are GPUs for,"
        " without GPUs 1",
        minimum=1,
    )
    memory_gib: float | None = key(
        None,
        "a job that needs more memory on a GPU, by `plan`, is not started; null: what GPU 0 of"
        " this node has, without GPUs no limit",
        above=0,
    )


@dataclass
class Optuna:
    """The sweeper that chooses values with optuna, by the results of earlier jobs."""

    n_trials: int = key(
        20,
        "total number of jobs, including those of earlier commands with the same search space",
        minimum=1,
    )
    metric: str | None = key(
        None,
        "the figure of metrics.jsonl by which jobs are compared, at the last step that has it;"
        " null: the validation loss, without validation the loss",
    )
    direction: str = key(
        "minimize", "whether less of it is better, or more", choices=("minimize", "maximize")
    )
    sampler: str = key(
        "tpe",
        "how values are chosen: `tpe` (Bergstra et al. 2011) learns from jobs before, `random`"
        " does not",
        choices=("tpe", "random"),
    )
    startup_trials: int = key(
        5,
        "jobs with random values before tpe chooses, and to their end before median prunes",
        minimum=1,
    )
    pruner: str = key(
        "none",
        "what ends jobs early: `median`, if worse than half of those before at that step; `asha`,"
        " `hyperband` (Li et al. 2018): if not among the best quarter, third, at steps ever"
        " further apart",
        choices=("none", "median", "asha", "hyperband"),
    )
    prune_from: int = key(1, "the first step at which a job may be ended", minimum=1)
    prune_every: int = key(
        10, "steps whose mean is judged; validation losses are judged one by one", minimum=1
    )
    seed: int = key(
        0,
        "of the sampler: with one job at a time the same seed chooses the same values, however"
        " often the sweep is stopped",
        minimum=0,
    )
    params: dict[str, Any] = key({}, "in sweep files: what varies")


@dataclass
class Slurm:
    """The launcher that submits each job to Slurm with submitit. Each node starts its own ranks."""

    nodes: int = key(1, "nodes of a job", minimum=1)
    gpus_per_node: int = key(8, "GPUs, and ranks, of each; 0: one rank without", minimum=0)
    cpus_per_task: int | None = key(
        None, "cores of a node; null: 12 for each GPU, without GPUs as Slurm has it", minimum=1
    )
    mem_gb: float | None = key(None, "memory of a node in GiB; null: as Slurm has it", above=0)
    timeout_min: int = key(1440, "minutes until a job is stopped, and queued again", minimum=1)
    partition: str | None = key(None, "where to queue")
    account: str | None = key(None, "Slurm account")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that nodes must have, e.g. h100")
    jobs: int = key(64, "jobs in the queue or running at once", minimum=1)
    requeue: bool = key(
        True, "queue a job again that stopped early with a checkpoint (exit code 75)"
    )
    signal_seconds: int = key(
        600, "how long before its time limit a job is told to stop", minimum=0
    )
    setup: list[str] = key([], "lines of bash before the run, e.g. ['module load cuda']")
    additional_parameters: dict[str, str] = key(
        {}, "other options of sbatch, e.g. {exclude: node7}"
    )
    memory_gib: float | None = key(
        None,
        "a job that needs more memory on a GPU, by `plan`, is not submitted; null: no limit",
        above=0,
    )
    dry_run: bool = key(False, "print the batch script, and submit nothing")


SLURM_TEXTS = ("partition", "account", "qos", "constraint")
SLURM_TEXT = re.compile(r"[\w.,:@/+&|()\[\]*-]+")
"""Keys that are copied into a batch script, and the text they may have.

A line break in one of them would begin a new command.
"""
LAUNCHERS: dict[str, Any] = {"local": Local, "slurm": Slurm}
SWEEPERS: dict[str, Any] = {"optuna": Optuna}
