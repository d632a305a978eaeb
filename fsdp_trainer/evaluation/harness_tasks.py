"""Tasks of lm-evaluation-harness by name or file, and their metrics. Import it late."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2.sandbox
import lm_eval.api.metrics  # fills the registry
import lm_eval.utils
import yaml
from lm_eval import evaluator, simple_evaluate
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager, _yaml_loader

from fsdp_trainer.config.evaluation_inputs import why_untyped
from fsdp_trainer.config.schema import Evaluation
from fsdp_trainer.config.yaml_text import Loader
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.harness import HarnessModel
from fsdp_trainer.evaluation.scoring import Metrics, Scorer

RESAMPLES = 1000
"""Samples drawn for the standard errors of metrics that have no formula."""
HARNESS = Path(lm_eval.__file__).parent


class LoadedTasks(TaskManager):
    """A task manager that loads its tasks once, so that later runs do not need the network."""

    def __init__(self, specs: list[Any], include_defaults: bool):
        super().__init__(include_defaults=include_defaults)
        unknown = [name for name in specs if isinstance(name, str) and not self.match_tasks([name])]
        if unknown:
            reason = (
                "there is no such task: use the path of a YAML file, or a name of  lm-eval ls tasks"
            )
            raise UserError("a task cannot be run", [Problem(name, reason) for name in unknown])
        self.loaded = super().load(specs)

    def load(self, task_list: Any) -> Any:
        """Return the tasks loaded first, whatever names are requested."""
        return self.loaded


class HarnessTasks:
    """Some of the harness's tasks. The harness's own output goes to stderr."""

    def __init__(self, cfg: Evaluation, names: list[str]):
        """Load the tasks. Raises UserError for a task that does not exist."""
        os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork a process for each core
        self.cfg = cfg
        self.specs: list[Any] = [
            read_task(name, cfg.code) if is_file(name) else name for name in names
        ]
        self.data_files = {
            str(spec.get("task")): data_file_of(spec)
            for spec in self.specs
            if isinstance(spec, dict)
        }
        with contextlib.redirect_stdout(sys.stderr), confined_templates():
            self.manager = LoadedTasks(self.specs, not all(map(is_file, names)))

    def run(self, scorer: Scorer, tokenizer: TextTokenizer, template: Template) -> Metrics:
        """Return {task: {metric: value}}; it may be empty on ranks that are not their node's first.

        Collective.
        """
        cfg = self.cfg
        quiet = contextlib.redirect_stdout(sys.stderr)
        with quiet, confined_templates(), without_machine_facts():
            results = simple_evaluate(
                HarnessModel(scorer, tokenizer, template, self.data_files),
                tasks=self.specs,
                task_manager=self.manager,
                num_fewshot=cfg.fewshot,
                limit=cfg.limit,
                apply_chat_template=cfg.chat,
                fewshot_as_multiturn=cfg.chat,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
        return metrics_of(results["results"]) if results else {}


@contextlib.contextmanager
def confined_templates() -> Iterator[None]:
    """Render the templates in tasks' files in a sandbox, outside of which they could run code."""
    free = lm_eval.utils.env
    confined = jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.BaseLoader(), undefined=free.undefined, keep_trailing_newline=True
    )
    confined.filters |= free.filters
    with mock.patch.object(lm_eval.utils, "env", confined):
        yield


@contextlib.contextmanager
def without_machine_facts() -> Iterator[None]:
    """Keep the harness from describing the machine by pip, gcc and others, which nobody reads.

    That takes a second in each evaluation, while all other ranks wait.
    """
    with mock.patch.object(evaluator, "add_env_info", lambda results: None):
        yield


def read_task(name: str, code: Collection[str]) -> dict[str, Any]:
    """Return the content of a task's YAML file, with the functions that it names.

    code: evaluation.code. Raises UserError for functions of other files, and for metrics that the
    harness would fetch as code.
    """
    known = {Path(file).expanduser().resolve() for file in code}
    import_function = _yaml_loader._import_func_in_yml

    def import_typed(qualified: str, folder: Path) -> Any:
        module = qualified.rpartition(".")[0].replace(".", "/")
        file = (folder / f"{module}.py").resolve()
        if not (file in known or file.is_relative_to(HARNESS)):
            raise UserError("a task cannot be run", [Problem(name, why_untyped(str(file)))])
        return import_function(qualified, folder)

    with (
        mock.patch.object(_yaml_loader, "_import_func_in_yml", import_typed),
        mock.patch.object(_yaml_loader, "_Base", Loader),
    ):
        try:
            spec = _yaml_loader.load_yaml(Path(name), resolve_func=True)
        except (OSError, ValueError, TypeError, AttributeError, ImportError,
                yaml.YAMLError) as error:  # fmt: skip
            problem = Problem(name, f"cannot be read: {error}")
            raise UserError("a task cannot be run", [problem]) from None
    fetched = next(fetched_metrics(spec), None)
    if fetched:
        reason = f"the metric {fetched} is not the harness's own, and none is fetched as code"
        raise UserError("a task cannot be run", [Problem(name, reason)])
    return spec


def fetched_metrics(spec: Any) -> Iterator[str]:
    """Yield the metrics in a task or a group of tasks that the harness would fetch as code."""
    if isinstance(spec, dict):
        # a task with its own function for results names metrics of its own; one in a group may
        # have other settings than the group
        computes = isinstance(spec.get("task"), str) and spec.get("process_results") is not None
        listed = spec.get("metric_list")
        for each in listed if isinstance(listed, list) and not computes else []:
            if isinstance(each, dict) and is_fetched(each.get("metric"), each):
                yield each["metric"]
        spec = list(spec.values())
    if isinstance(spec, list):
        for part in spec:
            yield from fetched_metrics(part)


def is_fetched(metric: Any, options: dict[str, Any]) -> bool:
    """Return True for a metric that is not in the harness, or is to be another of the same name."""
    is_named = isinstance(metric, str)
    return is_named and bool(options.get("hf_evaluate") or metric not in metric_registry)


def data_file_of(spec: dict[str, Any]) -> str:
    """Return a task's first data file, or "" if it has none of its own."""
    files = (spec.get("dataset_kwargs") or {}).get("data_files") or ""
    while not isinstance(files, str):
        files = next(iter(files.values() if isinstance(files, dict) else files), "")
    return files


def is_file(name: str) -> bool:
    """Return True for the path of a task's YAML file."""
    return name.endswith((".yaml", ".yml"))


def metrics_of(results: dict[str, dict[str, Any]]) -> Metrics:
    """Return the numeric metrics among the harness's results.

    `acc,none` is renamed to `acc`; metrics with a filter keep it: `exact_match,strict-match`.
    """
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, values in results.items()
    }
