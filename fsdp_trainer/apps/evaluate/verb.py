"""The verb `evaluate`: start ranks, or evaluate as one of them. It imports torch only in a rank."""

import importlib.util
import os
from pathlib import Path

from fsdp_trainer.config.schema import CORE_FILES, Evaluation
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.start import start_ranks, starts_ranks


def evaluate(cfg: EvaluateConfig, overrides: list[str]) -> int:
    """Evaluate a model on tasks, on as many ranks as cfg.launch asks for. Returns the exit code."""
    require_tasks(cfg, "")
    if cfg.out and not Path(cfg.out).expanduser().parent.is_dir():
        problem = Problem(f"out={cfg.out}", "its folder does not exist: create it, or name another")
        raise UserError("the results could not be written", [problem])
    if starts_ranks(cfg.launch, os.environ):
        return start_ranks(cfg, overrides, verb="evaluate")
    for name, value in cfg.launch.env.items():
        os.environ.setdefault(name, value)
    from fsdp_trainer.apps.evaluate.rank import evaluate_as_rank

    return evaluate_as_rank(cfg)


def require_tasks(cfg: Evaluation, node: str) -> None:
    """Raise UserError if there is nothing to evaluate, or the harness is not installed.

    node: prefix of the keys in messages; `evaluation.` in training.
    """
    problems = []
    if not cfg.tasks:
        reason = f"name tasks of lm-evaluation-harness or YAML files, e.g.  {node}tasks=[arc_easy]"
        problems.append(Problem(f"{node}tasks=[]", reason))
    for name in cfg.tasks:
        if name.endswith((".yaml", ".yml")) and not os.path.isfile(name):
            problems.append(Problem(f"{node}tasks=[{name}]", "there is no such file"))
    problem = core_problem(cfg.core_data, node) if "core" in cfg.tasks else ""
    if problem:
        problems.append(Problem(f"{node}core_data={cfg.core_data or 'null'}", problem))
    if set(cfg.tasks) - {"core"} and importlib.util.find_spec("lm_eval") is None:
        reason = "lm-evaluation-harness is not installed:  pip install 'fsdp_trainer[eval]'"
        problems.append(Problem(f"{node}tasks", reason))
    if problems:
        raise UserError("there is nothing to evaluate", problems)


def core_problem(folder: str | None, node: str) -> str:
    """Return the reason why the task `core` cannot be run on a folder, "" if it can."""
    if folder is None:
        return (
            "the task core needs its data: the folder of nanochat's eval_bundle.zip, as  "
            f"{node}core_data=eval_bundle"
        )
    missing = [name for name in CORE_FILES if not (Path(folder) / name).exists()]
    return f"has no {' and no '.join(missing)}" if missing else ""
