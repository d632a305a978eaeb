"""Tasks of lm-evaluation-harness by name or file, and their metrics. Import it late."""

import contextlib
import difflib
import fnmatch
import numbers
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2.sandbox
import lm_eval.api.metrics  # fills the registry
import lm_eval.utils
import torch.distributed as dist
import yaml
from lm_eval import evaluator, simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.registry import metric_registry
from lm_eval.config.group import GroupConfig
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager, _factory, _yaml_loader
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.config.evaluation_inputs import in_folder, is_file, why_untyped
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.schema import Evaluation
from fsdp_trainer.config.yaml_text import Loader
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.generation_settings import (
    OF_MODEL,
    read_settings,
    unused_settings,
    why_not,
)
from fsdp_trainer.evaluation.harness import HarnessModel
from fsdp_trainer.evaluation.scoring import Metrics, Scorer

RESAMPLES = 1000
"""Samples drawn for the standard errors of metrics that have no formula."""
HARNESS = Path(lm_eval.__file__).parent
BUILDERS = ("json", "csv", "parquet", "text", "arrow", "pandas", "xml", "imagefolder", "webdataset")
"""Names that `dataset_path` has for files of the user's own."""
KEYS = {each.name for each in fields(TaskConfig)} | {"class", "include", "task_list", "recipe"}
"""Keys of a task's file."""


class LoadedTasks(TaskManager):
    """A task manager that loads its tasks once, so that later runs do not need the network.

    specs: names of the harness's tasks, or the content of files of tasks. siblings: files beside
    those, whose tasks a group may name.
    """

    def __init__(self, specs: list[Any], include_defaults: bool, siblings: Sequence[Path] = ()):
        super().__init__(include_defaults=include_defaults)
        for file in siblings:
            with contextlib.suppress(Exception):  # a file that is no task
                content = _yaml_loader.load_yaml(file, resolve_func=False)
                TaskIndex.process_cfg(content, file, self._index)
        built = [each for spec in self.matching(specs) for each in self.build(spec)]
        grouped = names_in([one for one in built if isinstance(one, Group)])
        built = [one for one in built if isinstance(one, Group) or one.task_name not in grouped]
        twice = [name for name, count in Counter(names_in(built)).items() if count > 1]
        if twice:
            reason = "two files have a task of this name: give one another `task:`"
            if twice[0] in grouped:
                reason = "is in two of the groups: run one group at a time"
            raise UserError("tasks cannot be run together", twice[0], reason)
        self.loaded = super().load(built)
        for name, task in self.loaded["tasks"].items():
            check_task(name, task)

    def matching(self, specs: list[Any]) -> list[Any]:
        """Return the contents of files, and the names that names and patterns fit.

        Raises UserError for a name that no task has.
        """
        names = [*self._index]
        problems = []
        matching: list[Any] = []
        for spec in specs:
            fitting = fnmatch.filter(names, spec) if isinstance(spec, str) else [spec]
            matching += [each for each in fitting if each not in matching]
            if not fitting:
                near = difflib.get_close_matches(spec, names, 3)
                problems.append(Problem(spec, unknown_task(near)))
        if problems:
            raise UserError("a task cannot be run", problems)
        return matching

    def build(self, spec: Any) -> list[Any]:
        """Return the tasks or the group of a name or of a file's content. Raises UserError."""
        name = spec if isinstance(spec, str) else str(spec.get("group") or spec.get("task"))
        try:
            built = self._built(spec)
        except UserError:
            raise
        except Exception as error:  # the harness, datasets and the code of a task may raise any
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError("a task cannot be loaded", name, reason) from None
        return built if isinstance(built, list) else [built]

    def _built(self, spec: Any) -> Any:
        if isinstance(spec, dict) and "group" in spec:
            # by its content the harness would give each member the keys of the group
            entry = Entry(str(spec["group"]), Kind.GROUP, None, spec)
            return self._factory.build(entry, overrides=None, registry=self._index)
        return self._load_spec(spec)

    def load(self, task_list: Any) -> Any:
        """Return the tasks loaded first, whatever names are requested."""
        return self.loaded


def unknown_task(near: list[str]) -> str:
    """Return what to do about a name that no task has. near: similar names."""
    meant = f"there is no such task. Did you mean  {'  '.join(near)} ?\n" if near else ""
    reason = "use the path of a YAML file, or a name of  lm-eval ls tasks"
    return meant + reason if near else f"there is no such task: {reason}"


def names_in(built: list[Any]) -> list[str]:
    tasks = (one.get_all_tasks() if isinstance(one, Group) else [one] for one in built)
    return [task.task_name for some in tasks for task in some]


def check_task(name: str, task: Any) -> None:
    """Raise UserError if something that a task asks for is not done here."""
    config = getattr(task, "config", None)
    reasons = []
    if getattr(task, "UNSAFE_CODE", False):
        reasons.append("unsafe_code: code that a model writes is not run here")
    if getattr(config, "doc_to_audio", None):
        reasons.append("doc_to_audio: no model here hears")
    aggregations = getattr(task, "_aggregation_list", {})
    reasons += [
        f"metric_list: {metric} has an aggregation that the harness does not have"
        for metric, aggregation in aggregations.items()
        if aggregation is None
    ]
    if reasons:
        raise UserError("a task cannot be run", [Problem(name, reason) for reason in reasons])
    if getattr(task, "OUTPUT_TYPE", "") == "generate_until":
        read_settings(name, getattr(config, "generation_kwargs", None) or {})


class HarnessTasks:
    """Some of the harness's tasks. The harness's own output goes to stderr."""

    def __init__(self, cfg: Evaluation, names: list[str], defaults: Mapping[str, Any]):
        """Load the tasks. Raises UserError for a task that does not exist.

        defaults: the model's settings, see `settings_of_model`.
        """
        os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork a process for each core
        self.cfg, self.has_said = cfg, False
        self.defaults = {name: value for name, value in defaults.items() if name in OF_MODEL}
        self.unused = [
            f"the model's {name}={value} {reason}"
            for name, value in defaults.items()
            if name not in OF_MODEL and (reason := why_not(name, value))
        ]
        self.specs: list[Any] = [
            read_task(name, cfg.code) if is_file(name) else name for name in names
        ]
        self.data_files = {
            str(spec.get("task")): data_file_of(spec)
            for spec in self.specs
            if isinstance(spec, dict)
        }
        groups = [
            Path(name)
            for name, spec in zip(names, self.specs, strict=True)
            if isinstance(spec, dict) and names_tasks(spec)
        ]
        siblings = [file for group in groups for file in sorted(group.parent.glob("*.yaml"))]
        with (
            contextlib.redirect_stdout(sys.stderr),
            confined_templates(),
            guarded_files("a task", cfg.code),
        ):
            is_known = not groups and all(map(is_file, names))
            self.manager = LoadedTasks(self.specs, not is_known, siblings)

    def run(self, scorer: Scorer, tokenizer: TextTokenizer, template: Template) -> Metrics:
        """Return {task: {metric: value}}; it may be empty on ranks that are not their node's first.

        Collective.
        """
        cfg = self.cfg
        quiet = contextlib.redirect_stdout(sys.stderr)
        self.say_unused(template)
        with quiet, confined_templates(), without_machine_facts():
            results = simple_evaluate(
                HarnessModel(scorer, tokenizer, template, self.data_files, self.defaults),
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

    def say_unused(self, template: Template) -> None:
        """Print on rank 0 what of the tasks and of the command has no effect, once."""
        lines = [
            f"{name}: {reason}"
            for name, task in self.manager.loaded["tasks"].items()
            for reason in unused_of(task, self.cfg, template)
        ]
        tasks = self.manager.loaded["tasks"].values()
        if any(getattr(task, "OUTPUT_TYPE", "") == "generate_until" for task in tasks):
            lines += self.unused
        if lines and not self.has_said and not (dist.is_initialized() and dist.get_rank()):
            print(safe("\n".join(lines)), file=sys.stderr)
        self.has_said = True


def unused_of(task: Any, cfg: Evaluation, template: Template) -> Iterator[str]:
    """Yield a sentence for each part of a task, or of the command, that has no effect on it."""
    config = getattr(task, "config", None)
    is_generated = getattr(task, "OUTPUT_TYPE", "") == "generate_until"
    options = getattr(config, "generation_kwargs", None) or {}
    if options and not is_generated:
        yield "generation_kwargs have no effect, since nothing is generated"
    elif unused := unused_settings(options):
        yield unused
    if cfg.fewshot and getattr(config, "num_fewshot", None) == 0:
        yield f"fewshot={cfg.fewshot} has no effect, since the task's file has num_fewshot: 0"
    described = getattr(config, "description", "") and cfg.chat
    if described and template.for_record(None).forms.system == "user":
        yield "its description is left out, since the chat template has no system turn"


def names_tasks(spec: Any) -> bool:
    members = spec.get("task") if isinstance(spec, dict) else None
    if isinstance(members, str) and "group" in spec:
        return True
    return isinstance(members, list) and any(
        isinstance(one, str)
        or names_tasks(one)
        or (isinstance(one, dict) and isinstance(one.get("task"), str))
        for one in members
    )


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
    """Keep the harness from describing the machine by pip, git and others, which nobody reads.

    That takes a second in each evaluation, while all other ranks wait, and git may print an error.
    """
    with (
        mock.patch.object(evaluator, "add_env_info", lambda results: None),
        mock.patch.object(evaluator, "get_git_commit_hash", lambda: None),
    ):
        yield


def read_task(name: str, code: Collection[str]) -> Json:
    """Return the content of a task's YAML file, with the functions that it names.

    code: evaluation.code. Raises UserError, see `guarded_files`.
    """
    with guarded_files(name, code):
        try:
            spec = _yaml_loader.load_yaml(Path(name), resolve_func=True)
        except (OSError, ValueError, TypeError, AttributeError, ImportError,
                yaml.YAMLError) as error:  # fmt: skip
            raise UserError("a task cannot be run", name, f"cannot be read: {error}") from None
    if not ("task" in spec or "group" in spec):
        reason = "has no `task:`, the name of a task, and no `group:`"
        raise UserError("a task cannot be run", name, reason)
    if problems := [Problem(name, reason) for reason in unknown_keys(spec)]:
        raise UserError("a task cannot be run", problems)
    return spec


@contextlib.contextmanager
def guarded_files(name: str, code: Collection[str]) -> Iterator[None]:
    """Read files of tasks with our own loader, with paths of data beside them made complete.

    name: of what is read, for messages. code: evaluation.code. Raises UserError for functions of
    other files, and for metrics that the harness would fetch as code.
    """
    known = {Path(file).expanduser().resolve() for file in code}
    import_function, load_yaml = _yaml_loader._import_func_in_yml, _yaml_loader.load_yaml

    def import_typed(qualified: str, folder: Path) -> Any:
        module = qualified.rpartition(".")[0].replace(".", "/")
        file = (folder / f"{module}.py").resolve()
        if not (file in known or file.is_relative_to(HARNESS)):
            raise UserError("a task cannot be run", name, why_untyped(str(file)))
        return import_function(qualified, folder)

    def load_own(path: Any, *, _seen: Any = None, **options: Any) -> Json:
        file = Path(path).expanduser().resolve()
        spec = load_yaml(file, _seen=_seen, **options)
        if not file.is_relative_to(HARNESS):
            spec = with_paths(spec, file.parent)
            fetched = next(fetched_metrics(spec), None) if _seen is None else None
            if fetched:
                reason = f"the metric {fetched} is not the harness's own, and none is fetched"
                raise UserError("a task cannot be run", str(path), f"{reason} as code")
        return spec

    with (
        mock.patch.object(_yaml_loader, "_import_func_in_yml", import_typed),
        mock.patch.object(_yaml_loader, "_Base", Loader),
        mock.patch.object(_yaml_loader, "load_yaml", load_own),
        mock.patch.object(_factory, "load_yaml", load_own),
    ):
        yield


def with_paths(spec: Any, folder: Path) -> Any:
    """Return the content of a file of tasks; paths of data that are in its folder are complete.

    Other paths stay as they are: those in the working folder, or of a dataset of the hub.
    """
    if isinstance(spec, list):
        return [with_paths(each, folder) for each in spec]
    if not isinstance(spec, dict):
        return spec
    spec = {**spec}
    if isinstance(spec.get("task"), list):
        spec["task"] = with_paths(spec["task"], folder)
    if "dataset_path" in spec and is_local(spec["dataset_path"], folder):
        spec["dataset_path"] = in_folder(spec["dataset_path"], folder)
    options = spec.get("dataset_kwargs")
    if isinstance(options, dict):
        paths = {name: options[name] for name in ("data_files", "data_dir") if name in options}
        spec["dataset_kwargs"] = {**options, **in_folder(paths, folder)}
    return spec


def is_local(path: Any, folder: Path) -> bool:
    """Return True for a path in a folder that is no builder of datasets, such as json."""
    is_path = isinstance(path, str) and bool(path) and path not in BUILDERS
    return is_path and os.path.exists(folder / path)


def unknown_keys(spec: Any) -> Iterator[str]:
    if not isinstance(spec, dict):
        return
    members = spec.get("task")
    known = KEYS
    if isinstance(members, list) or "group" in spec:
        known = KEYS | {each.name for each in fields(GroupConfig)}
    if isinstance(members, list):
        yield from chain.from_iterable(map(unknown_keys, members))
    for name in [name for name in spec if name not in known and "class" not in spec]:
        near = nearest(str(name), known)
        yield f"{name}: there is no such key" + (f". Did you mean  {near} ?" if near else "")
    settings = spec.get("generation_kwargs")
    if not (settings is None or isinstance(settings, dict)):
        yield f"generation_kwargs: {settings} should be settings with values, as  {{until: []}}"


def fetched_metrics(spec: Any) -> Iterator[str]:
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


def is_fetched(metric: Any, options: Json) -> bool:
    is_named = isinstance(metric, str)
    return is_named and bool(options.get("hf_evaluate") or metric not in metric_registry)


def data_file_of(spec: Json) -> str:
    files = (spec.get("dataset_kwargs") or {}).get("data_files") or ""
    while not isinstance(files, str):
        files = next(iter(files.values() if isinstance(files, dict) else files), "")
    return files


def metrics_of(results: dict[str, Json]) -> Metrics:
    """Return the numeric metrics among the harness's results.

    `acc,none` is renamed to `acc`; metrics with a filter keep it: `exact_match,strict-match`.
    """
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if "," in key and isinstance(value, numbers.Real)
        }
        for task, values in results.items()
    }
