"""Checks of what an evaluation needs: tasks, their files, the harness. Imports no torch."""

import importlib.util
import os
import re
from pathlib import Path

from fsdp_trainer.config.schema import CORE_FILES, Evaluation
from fsdp_trainer.errors import Problem, UserError


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
    if needs_harness(cfg) and importlib.util.find_spec("lm_eval") is None:
        reason = "lm-evaluation-harness is not installed:  pip install 'fsdp_trainer[eval]'"
        problems.append(Problem(f"{node}tasks", reason))
    if problems:
        raise UserError("there is nothing to evaluate", problems)


def needs_harness(cfg: Evaluation) -> bool:
    """Return True if one of the tasks is lm-evaluation-harness's."""
    return any(name != "core" and not has_environment(name) for name in cfg.tasks)


def has_environment(name: str) -> bool:
    """Return True for the path of a file that describes a task with an environment."""
    if not name.endswith((".yaml", ".yml")) or not os.path.isfile(name):
        return False
    # files of the harness may have tags that only the harness can read
    return (
        re.search(r"^environment\s*:", Path(name).read_text(errors="replace"), re.MULTILINE)
        is not None
    )


def why_untyped(file: str) -> str:
    """Return the reason why the file of a task cannot run Python code, and what to type."""
    return (
        f"runs the code in {file}, and a file cannot name code: read it, and type"
        f"  code=[{file}] , while training  evaluation.code=[{file}]"
    )


def core_problem(folder: str | None, node: str) -> str:
    """Return the reason why the task `core` cannot be run on a folder, "" if it can."""
    if folder is None:
        return (
            "the task core needs its data: the folder of nanochat's eval_bundle.zip, as  "
            f"{node}core_data=eval_bundle"
        )
    missing = [name for name in CORE_FILES if not (Path(folder) / name).exists()]
    return f"has no {' and no '.join(missing)}" if missing else ""
