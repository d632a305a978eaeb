"""Checks of what an evaluation needs: tasks, their files, the harness. Imports no torch."""

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import CORE_FILES, Evaluation
from fsdp_trainer.errors import Problem, UserError

MTEB = "mteb:"
"""Prefix of the names of MTEB's tasks."""
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of files of queries with documents."""


def require_tasks(cfg: Evaluation, node: str) -> None:
    """Raise UserError if there is nothing to evaluate, or the harness is not installed.

    node: prefix of the keys in messages; `evaluation.` in training.
    """
    problems = []
    names = task_names(cfg)
    if not names and not cfg.tasks:
        reason = f"name tasks of lm-evaluation-harness or YAML files, e.g.  {node}tasks=[arc_easy]"
        problems.append(Problem(f"{node}tasks=[]", reason))
    for name in filter(is_missing, names):
        reason = "there is no such file, and no folder with a task's YAML file"
        problems.append(Problem(f"{node}tasks=[{name}]", reason))
    problem = core_problem(cfg.core_data, node) if "core" in names else ""
    for name in filter(is_retrieval, names if node else []):
        reason = "is of models that embed or rank texts:  fsdp-trainer evaluate RUN tasks=[…]"
        problems.append(Problem(f"{node}tasks=[{name}]", reason))
    if problem:
        problems.append(Problem(f"{node}core_data={cfg.core_data or 'null'}", problem))
    for reason in missing_packages(cfg):
        problems.append(Problem(f"{node}tasks", reason))
    if problems:
        raise UserError("there is nothing to evaluate", problems)


def missing_packages(cfg: Evaluation) -> Iterator[str]:
    needs_mteb = any(name.startswith(MTEB) for name in task_names(cfg))
    if needs_mteb and importlib.util.find_spec("mteb") is None:
        yield "mteb is not installed:  pip install 'fsdp_trainer[mteb]'"
    if needs_harness(cfg) and importlib.util.find_spec("lm_eval") is None:
        yield "lm-evaluation-harness is not installed:  pip install 'fsdp_trainer[eval]'"


def needs_harness(cfg: Evaluation) -> bool:
    names = (name for name in task_names(cfg) if not is_retrieval(name))
    return any(name != "core" and not has_environment(name) for name in names)


def is_retrieval(name: str) -> bool:
    return name.endswith(DATA_FILES) or name.startswith(MTEB) or has_queries(name)


def has_queries(name: str) -> bool:
    """Return True for a folder in BEIR's form."""
    return os.path.isfile(os.path.join(name, "queries.jsonl"))


def task_names(cfg: Evaluation) -> list[str]:
    typed = [cfg.tasks] if isinstance(cfg.tasks, str) else cfg.tasks
    names = (task for name in typed for task in _files_of(name) or [name])
    return list(dict.fromkeys(names))


def _files_of(name: str) -> list[str]:
    """Return the files of tasks in a folder, or those that a pattern fits; empty if it is neither.

    A folder may also have parts of tasks, which tasks include.
    """
    if os.path.isdir(name):
        files = [path for path in Path(name).iterdir() if is_file(path.name) and path.is_file()]
        return sorted(str(path) for path in files if _has_key(path, "task|group|environment"))
    return sorted(glob.glob(name)) if is_file(name) and not os.path.isfile(name) else []


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def is_missing(name: str) -> bool:
    is_path = is_file(name) or name.endswith(DATA_FILES) or "/" in name
    return is_path and not os.path.isfile(name) and not has_queries(name)


def in_folder(path: Any, folder: Path) -> Any:
    if isinstance(path, dict):
        return {name: in_folder(each, folder) for name, each in path.items()}
    if isinstance(path, list):
        return [in_folder(each, folder) for each in path]
    if not isinstance(path, str) or not path or "://" in path or os.path.isabs(path):
        return path
    inside = str(folder / path)
    return inside if os.path.exists(inside) or glob.glob(inside) else path


def has_environment(name: str) -> bool:
    return is_file(name) and os.path.isfile(name) and _has_key(Path(name), "environment")


def _has_key(file: Path, names: str) -> bool:
    """Return True if a YAML file has one of the keys, as a|b, at its top.

    Files of the harness may have tags that only the harness can read.
    """
    text = file.read_text(errors="replace")
    return re.search(rf"^(?:{names})\s*:", text, re.MULTILINE) is not None


def why_untyped(file: str) -> str:
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
