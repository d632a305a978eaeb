"""From a command line with several values to the overrides of each job: Hydra's sweeper says which, nothing of Hydra runs a job."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_trainer.config.check import Report, build, flatten, show
from fsdp_trainer.config.compose import (
    check_files,
    config_flag,
    hydra,
    options,
    own_recipes_compose,
    told_by_hydra,
)
from fsdp_trainer.config.overrides import has_target, read_overrides, why_unknown, why_unparsable
from fsdp_trainer.config.recipe_files import as_override, label, take_files
from fsdp_trainer.config.sweeping import LAUNCHERS, SWEEPERS
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import Problem, UserError

PLACE = ("run.name", "run.root")
ONE_PLACE = "names the sweep's folder, in which each job has one of its own: it takes one value"

ENDLESS = "has no end of values: Hydra's own sweeper takes  a,b  choice(a,b)  range(start,stop,step)  glob(pattern*)"

RunBatch = Callable[[Sequence[Sequence[str]]], list[float]]
"""Runs one job for each list of overrides; gives their objectives, NaN where there is none."""


@dataclass
class Space:
    """What a search may choose from. varied: by key, as on the command line; whole: whether a key takes whole numbers only; fixed: other overrides."""

    fixed: list[str]
    varied: dict[str, Override]
    whole: dict[str, bool]


class SweepLine:
    """A sweep's command line: how it varies (`+sweep`, hydra.*), what it varies, and what all jobs have in common."""

    def __init__(self, words: list[str], config_dir: str | None = None):
        """Raises UserError for words that cannot be read, and for what is wrong with the sweep itself."""
        self.config_dir, self.groups = config_dir, options("train", config_dir)
        self.config_flag = config_flag(config_dir)
        parsed = self._parse([as_override(word) for word in words])
        how = [o for o in parsed if o.key_or_group == "sweep" or o.key_or_group.startswith("hydra")]
        self.settings = [
            (o, str(o.input_line).lstrip("+") if o.key_or_group != "recipe" else str(o.input_line))
            for o in parsed
            if o not in how
        ]
        self.swept = {o.key_or_group: word for o, word in self.settings if o.is_sweep_override()}
        self._refuse_wrong_sweeps([str(o.input_line) for o in how])
        root, name = self._set_up([str(o.input_line) for o in how])
        recipes = [
            r
            for o, _ in self.settings
            if o.key_or_group == "recipe" and not o.is_sweep_override()
            for r in _listed(o.value())
        ]
        self.root = Path(root).expanduser()
        self.name = str(name or (label(recipes[-1]) if recipes else "sweep"))

    def run(self, run_batch: RunBatch) -> None:
        """Let the sweeper hand its jobs' overrides to `run_batch`, in one batch or several."""
        self._run_batch = run_batch
        try:
            self._hydras.sweep([word for _, word in self.settings])
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(
                "the sweep cannot be set up", [Problem("composing", told_by_hydra(error))]
            ) from None
        finally:
            self._nowhere.cleanup()

    def _launch(self, batch: Any) -> list[float]:
        return self._run_batch(batch)  # told later than Hydra wants to know it

    def _parse(self, words: list[str]) -> list[Override]:
        parser, found, problems = OverridesParser.create(), [], []
        for word in words:
            try:
                found.append(parser.parse_override(word))
            except HydraException:
                problems.append(
                    Problem(
                        word, why_unparsable(word, parser, flatten(PRIMARY["train"]), self.groups)
                    )
                )
        if problems:
            raise UserError("the command line cannot be read", problems)
        return found

    def _refuse_wrong_sweeps(self, how: list[str]) -> None:
        report = Report(
            {},
            read_overrides(how, flatten(PRIMARY["train"]), self.groups, sweeping=True).problems,
            set(),
        )
        report.problems += [
            Problem(word, ONE_PLACE) for key, word in self.swept.items() if key in PLACE
        ]
        for word in how:
            key, _, launcher = word.lstrip("+").partition("=")
            if key == "hydra/launcher" and launcher not in LAUNCHERS:
                there = "  ".join(f"hydra/launcher={name}" for name in LAUNCHERS)
                report.problems.append(
                    Problem(word, f"would not start the ranks of a job. There is:  {there}")
                )
        report.close()

    def _set_up(self, how: list[str]) -> tuple[str, str | None]:
        """Read how it is swept. Returns run.root and run.name of the configuration that all jobs start from."""
        fixed = [word for o, word in self.settings if not o.is_sweep_override()]
        words = take_files([*fixed, *how], self.config_dir)
        groups = options("train", self.config_dir)
        line = read_overrides(
            words, flatten(PRIMARY["train"]), groups, sweeping=True
        )  # each job tells its problems itself
        report = Report(line.typed, [], set())
        own_recipes_compose("train", line.hydra, self.config_dir, report)
        report.close()
        self._nowhere = tempfile.TemporaryDirectory(
            prefix="fsdp_trainer-"
        )  # for the file that Hydra's sweepers leave
        launcher = (
            [] if any("hydra/launcher=" in word for word in how) else ["hydra/launcher=local"]
        )
        with hydra(
            [*line.hydra, *launcher, f"hydra.sweep.dir={self._nowhere.name}"], self.config_dir
        ) as given:
            check_files("train", given, self.config_dir, report)
            report.close()
            whole = GlobalHydra.instance().hydra
            assert whole
            cfg = whole.compose_config("train", given, RunMode.MULTIRUN)
            self._check_composed(cfg.hydra, report)
            if self.sweeper not in SWEEPERS:
                context = HydraContext(config_loader=whole.config_loader, callbacks=Callbacks())
                self._hydras = Plugins.instance().instantiate_sweeper(
                    hydra_context=context, task_function=self._launch, config=cfg
                )
                self._hydras.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]  # one bad value must not stop the others
            return cfg.run.root, cfg.run.name

    def _check_composed(self, settings: Any, report: Report) -> None:
        """Refuse what only shows once Hydra's settings are composed. Before objects are made of them: that runs code."""
        self.launcher, self.sweeper = (
            settings.runtime.choices[f"hydra/{name}"] for name in ("launcher", "sweeper")
        )
        plain: dict[str, Any] = {
            name: OmegaConf.to_container(settings[name], resolve=True)
            for name in ("launcher", "sweeper")
        }
        for name, node in plain.items():
            if any(map(has_target, node.values())):
                why = "a configuration cannot run code: _target_ is refused below  hydra.launcher  and  hydra.sweeper"
                report.problems.append(Problem(f"hydra.{name}", why))
        self.params = plain["sweeper"].get("params") or {}
        for key, value in self.params.items():
            if key.lstrip("+") in PLACE:
                report.add(f"hydra.sweeper.params.{key}", value, ONE_PLACE)
        if self.sweeper == "basic":
            for name in plain["sweeper"].keys() - {"_target_", "max_batch_size", "params"}:
                report.add(
                    f"hydra.sweeper.{name}",
                    plain["sweeper"][name],
                    "is no key of Hydra's own sweeper. To search, add  hydra/sweeper=optuna",
                )
            report.problems += [
                Problem(word, f"{ENDLESS}\nhydra/sweeper=optuna  chooses from it")
                for o, word in self.settings
                if o.is_interval_sweep()
            ]
        if self.sweeper == "optuna" and not find_spec("optuna"):
            report.problems.append(
                Problem(
                    "hydra/sweeper=optuna",
                    "optuna is not installed:  pip install 'fsdp_trainer[optuna]'",
                )
            )
        if self.launcher == "slurm" and not find_spec("submitit"):
            report.problems.append(
                Problem(
                    "hydra/launcher=slurm",
                    "submitit is not installed:  pip install 'fsdp_trainer[slurm]'",
                )
            )
        self.launcher_settings = _read_settings(
            LAUNCHERS[self.launcher], plain["launcher"], "hydra.launcher.", report
        )
        if self.sweeper in SWEEPERS:
            self.sweeper_settings = _read_settings(
                SWEEPERS[self.sweeper], plain["sweeper"], "hydra.sweeper.", report
            )
        report.close()

    @property
    def metric(self) -> str | None:
        """What of metrics.jsonl a job is judged by."""
        return self.sweeper_settings.metric if self.sweeper in SWEEPERS else None

    @property
    def best(self) -> str:
        """Which objective is."""
        return (
            "highest"
            if self.sweeper in SWEEPERS and self.sweeper_settings.direction == "maximize"
            else "lowest"
        )

    def space(self) -> Space:
        """For sweepers of ours. Raises UserError if nothing varies, or values cannot be read."""
        of_files = [f"{key}={show(value)}" for key, value in self.params.items()]
        by_key = {
            o.get_key_element(): o
            for o in self._parse([*of_files, *(word for _, word in self.settings)])
        }
        varied = {key: o for key, o in by_key.items() if o.is_sweep_override()}
        if not varied:
            why = "nothing varies. Write a key with values to choose from, as  'optim.lr=tag(log,interval(1e-6,1e-4))'  or  batch.rows=16,32"
            raise UserError(
                "the sweep cannot be set up", [Problem(f"hydra/sweeper={self.sweeper}", why)]
            )
        self.swept |= {o.key_or_group: str(o.input_line) for o in varied.values()}
        keys = flatten(PRIMARY["train"])
        whole = {
            key: o.key_or_group in keys and keys[o.key_or_group].type in (int, int | None)
            for key, o in varied.items()
        }
        fixed = [
            f"{key}={o.get_value_element_as_str()}"
            for key, o in by_key.items()
            if key not in varied
        ]
        return Space(fixed, varied, whole)


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _read_settings(cls: Any, node: dict[str, Any], prefix: str, report: Report) -> Any:
    """`cls` from what was composed of it."""
    keys = flatten(cls, prefix)
    for name, value in node.items():
        if prefix + name not in keys and name != "_target_":
            report.add(prefix + name, value, why_unknown(prefix + name, show(value), keys, {}))
    return build(cls, node, report, prefix)
