"""Tasks of lm-evaluation-harness: found by name or file, run, and their metrics. Import it late."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.harness import HarnessModel

Metrics = dict[str, dict[str, float]]
RESAMPLES = 1000
"""For the standard errors of metrics that have no formula."""


def run_tasks(model: HarnessModel, cfg: EvaluateConfig) -> Metrics:
    """Return {task: {metric: value}}; on other than a node's first rank it may be empty.

    What the harness prints goes to stderr. Raises UserError for a task that is not there.
    """
    files = [name for name in cfg.tasks if is_file(name)]
    manager = TaskManager(include_defaults=len(files) < len(cfg.tasks))
    tasks: list[Any] = [
        load_yaml(Path(name), resolve_func=True) if is_file(name) else name for name in cfg.tasks
    ]
    with contextlib.redirect_stdout(sys.stderr):
        unknown = [
            name for name in tasks if isinstance(name, str) and not manager.match_tasks([name])
        ]
        if unknown:
            reason = (
                "there is no such task: use the path of a YAML file, or a name of  lm-eval ls tasks"
            )
            raise UserError("a task cannot be run", [Problem(name, reason) for name in unknown])
        results = simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=cfg.fewshot,
            limit=cfg.limit,
            apply_chat_template=cfg.chat,
            fewshot_as_multiturn=cfg.chat,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    return metrics_of(results["results"]) if results else {}


def is_file(name: str) -> bool:
    """Return True for the path of a task's YAML file."""
    return name.endswith((".yaml", ".yml"))


def metrics_of(results: dict[str, dict[str, Any]]) -> Metrics:
    """Return the numbers among the harness's results.

    Its `acc,none` is `acc`; a task with other filters has `exact_match,strict-match`.
    """
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, values in results.items()
    }
