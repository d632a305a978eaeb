"""The overrides of each job of a sweep, from a command line with several values.

Hydra's sweeper generates them; Hydra runs no job.
"""

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

from fsdp_trainer.config.check import Report, as_text, build, flatten
from fsdp_trainer.config.composing.compose import (
    check_files,
    check_own_recipes,
    config_flag,
    hydra,
    hydra_message,
    options,
)
from fsdp_trainer.config.composing.interpolations import require_few_interpolations
from fsdp_trainer.config.composing.overrides import (
    has_target,
    read_overrides,
    why_unknown,
    why_unparsable,
)
from fsdp_trainer.config.composing.recipe_files import as_override, label, take_files
from fsdp_trainer.config.sweep_keys import LAUNCHERS, SLURM_TEXT, SLURM_TEXTS, SWEEPERS, Slurm
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import Problem, UserError

PLACE = ("run.name", "run.root")
ONE_PLACE = "names the sweep's folder, in which each job has one of its own: it takes one value"

ENDLESS = (
    "has no end of values: Hydra's own sweeper takes  a,b  choice(a,b)  range(start,stop,step)"
    "  glob(pattern*)"
)
EXTRAS = {  # by sweeper or launcher: the package that it needs, and a message if that is missing
    "optuna": ("optuna", "optuna is not installed:  pip install 'fsdp_trainer[optuna]'"),
    "slurm": ("submitit", "submitit is not installed:  pip install 'fsdp_trainer[slurm]'"),
}

RunBatch = Callable[[Sequence[Sequence[str]]], list[float]]
"""A function that runs one job for each list of overrides and returns the jobs' objectives.

The objective is NaN for a job without one.
"""


@dataclass
class Space:
    """The values that a search may choose from.

    fixed: overrides of all jobs. varied: the varied overrides by key, as on the command line.
    integer: by key, whether its values are integers.
    """

    fixed: list[str]
    varied: dict[str, Override]
    integer: dict[str, bool]


class SweepLine:
    """A sweep's command line: sweeper, launcher, varied overrides and overrides of all jobs."""

    def __init__(self, words: list[str], config_dir: str | None = None):
        """Parse and check the words. Raises UserError for mistakes that concern all jobs."""
        self.config_dir, self.groups = config_dir, options("train", config_dir)
        self.config_flag = config_flag(config_dir)
        parsed = self._parse([as_override(word) for word in words])
        of_sweep = [
            o for o in parsed if o.key_or_group == "sweep" or o.key_or_group.startswith("hydra")
        ]
        self.settings = [(o, _word(o)) for o in parsed if o not in of_sweep]
        self.swept = {o.key_or_group: word for o, word in self.settings if o.is_sweep_override()}
        sweep_words = [str(o.input_line) for o in of_sweep]
        self._refuse_wrong_sweeps(sweep_words)
        root, name = self._set_up(sweep_words)
        recipes: list[str] = []
        for o, _ in self.settings:
            if o.key_or_group == "recipe" and not o.is_sweep_override():
                recipes += _listed(o.value())
        self.root = Path(root).expanduser()
        self.name = str(name or (label(recipes[-1]) if recipes else "sweep"))
        _require_lines(self.name, str(self.root))

    def run(self, run_batch: RunBatch) -> None:
        self._run_batch = run_batch
        try:
            self._hydra_sweeper.sweep([word for _, word in self.settings])
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(
                "the sweep cannot be set up", "composing", hydra_message(error)
            ) from None
        finally:
            self._unused_folder.cleanup()

    def _launch(self, batch: Any) -> list[float]:
        return self._run_batch(batch)  # set by `run`; Hydra needs a function earlier

    def _parse(self, words: list[str]) -> list[Override]:
        parser, overrides, problems = OverridesParser.create(), [], []
        keys = flatten(PRIMARY["train"])
        for word in words:
            try:
                overrides.append(parser.parse_override(word))
            except HydraException:
                reason = why_unparsable(word, parser, keys, self.groups)
                problems.append(Problem(word, reason))
        if problems:
            raise UserError("the command line cannot be read", problems)
        return overrides

    def _refuse_wrong_sweeps(self, sweep_words: list[str]) -> None:
        line = read_overrides(sweep_words, flatten(PRIMARY["train"]), self.groups, sweeping=True)
        report = Report({}, line.problems, set())
        report.problems += [
            Problem(word, ONE_PLACE) for key, word in self.swept.items() if key in PLACE
        ]
        for word in sweep_words:
            key, _, launcher = word.lstrip("+").partition("=")
            if key == "hydra/launcher" and launcher not in LAUNCHERS:
                there = "  ".join(f"hydra/launcher={name}" for name in LAUNCHERS)
                report.problems.append(
                    Problem(word, f"would not start the ranks of a job. There is:  {there}")
                )
        report.close()

    def _set_up(self, sweep_words: list[str]) -> tuple[str, str | None]:
        """Compose the sweep's settings.

        Returns run.root and run.name of the configuration that all jobs have in common.
        """
        fixed = [word for o, word in self.settings if not o.is_sweep_override()]
        words = take_files([*fixed, *sweep_words], self.config_dir)
        groups = options("train", self.config_dir)
        # problems in the jobs' words are reported by each job
        line = read_overrides(words, flatten(PRIMARY["train"]), groups, sweeping=True)
        report = Report(line.typed, [], set())
        check_own_recipes("train", line.hydra, self.config_dir, report)
        report.close()
        # Hydra's sweepers write a file, which is not needed
        self._unused_folder = tempfile.TemporaryDirectory(prefix="fsdp_trainer-")
        line.hydra.append(f"hydra.sweep.dir={self._unused_folder.name}")
        if not any("hydra/launcher=" in word for word in sweep_words):
            line.hydra.append("hydra/launcher=local")
        with hydra(line.hydra, self.config_dir) as given:
            check_files("train", given, self.config_dir, report)
            report.close()
            hydra_main = GlobalHydra.instance().hydra
            assert hydra_main
            cfg = hydra_main.compose_config("train", given, RunMode.MULTIRUN)
            # Hydra's own settings have many, and none may be added to them
            own = [str(name) for name in cfg if name != "hydra"]
            require_few_interpolations(OmegaConf.masked_copy(cfg, own))
            self._check_composed(cfg.hydra, report)
            if self.sweeper not in SWEEPERS:
                loader = hydra_main.config_loader
                context = HydraContext(config_loader=loader, callbacks=Callbacks())
                self._hydra_sweeper = Plugins.instance().instantiate_sweeper(
                    hydra_context=context, task_function=self._launch, config=cfg
                )
                # one wrong value must not stop the other jobs
                self._hydra_sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore
            return cfg.run.root, cfg.run.name

    def _check_composed(self, settings: Any, report: Report) -> None:
        """Check Hydra's composed settings before objects are created from them, which runs code."""
        chosen = settings.runtime.choices
        self.launcher, self.sweeper = chosen["hydra/launcher"], chosen["hydra/sweeper"]
        plain: dict[str, Any] = {
            name: OmegaConf.to_container(settings[name], resolve=True)
            for name in ("launcher", "sweeper")
        }
        for name, node in plain.items():
            if any(map(has_target, node.values())):
                reason = (
                    "a configuration cannot run code: _target_ is refused below  hydra.launcher"
                    "  and  hydra.sweeper"
                )
                report.problems.append(Problem(f"hydra.{name}", reason))
        self.params = plain["sweeper"].get("params") or {}
        for key, value in self.params.items():
            if key.lstrip("+") in PLACE:
                report.add(f"hydra.sweeper.params.{key}", value, ONE_PLACE)
        if self.sweeper == "basic":
            self._check_basic(plain["sweeper"], report)
        _check_extra("hydra/sweeper", self.sweeper, report)
        _check_extra("hydra/launcher", self.launcher, report)
        launcher = LAUNCHERS[self.launcher]
        self.launcher_settings = _read_settings(launcher, plain["launcher"], "launcher", report)
        if self.launcher == "slurm":
            _check_texts(self.launcher_settings, report)
        if self.sweeper in SWEEPERS:
            sweeper = SWEEPERS[self.sweeper]
            self.sweeper_settings = _read_settings(sweeper, plain["sweeper"], "sweeper", report)
        report.close()

    def _check_basic(self, node: dict[str, Any], report: Report) -> None:
        for name in node.keys() - {"_target_", "max_batch_size", "params"}:
            reason = "is no key of Hydra's own sweeper. To search, add  hydra/sweeper=optuna"
            report.add(f"hydra.sweeper.{name}", node[name], reason)
        for override, word in self.settings:
            if override.is_interval_sweep():
                reason = f"{ENDLESS}\nhydra/sweeper=optuna  chooses from it"
                report.problems.append(Problem(word, reason))

    @property
    def metric(self) -> str | None:
        """The metric by which jobs are compared; None for the default."""
        return self.sweeper_settings.metric if self.sweeper in SWEEPERS else None

    @property
    def best(self) -> str:
        return (
            "highest"
            if self.sweeper in SWEEPERS and self.sweeper_settings.direction == "maximize"
            else "lowest"
        )

    def space(self) -> Space:
        """Return the values to choose from, for our own sweepers.

        Raises UserError if nothing varies, or if values cannot be read.
        """
        of_files = [f"{key}={as_text(value)}" for key, value in self.params.items()]
        parsed = self._parse([*of_files, *(word for _, word in self.settings)])
        by_key = {o.get_key_element(): o for o in parsed}
        varied = {key: o for key, o in by_key.items() if o.is_sweep_override()}
        if not varied:
            reason = (
                "nothing varies. Write a key with values to choose from, as"
                "  'optim.lr=tag(log,interval(1e-6,1e-4))'  or  batch.rows=16,32"
            )
            raise UserError("the sweep cannot be set up", f"hydra/sweeper={self.sweeper}", reason)
        self.swept |= {o.key_or_group: str(o.input_line) for o in varied.values()}
        keys = flatten(PRIMARY["train"])
        integer = {
            key: o.key_or_group in keys and keys[o.key_or_group].type in (int, int | None)
            for key, o in varied.items()
        }
        fixed = [
            f"{key}={o.get_value_element_as_str()}"
            for key, o in by_key.items()
            if key not in varied
        ]
        return Space(fixed, varied, integer)


def _word(override: Override) -> str:
    word = str(override.input_line)
    return word if override.key_or_group == "recipe" else word.lstrip("+")


def _check_extra(group: str, name: str, report: Report) -> None:
    package, reason = EXTRAS.get(name, ("hydra", ""))
    if not find_spec(package):
        report.problems.append(Problem(f"{group}={name}", reason))


def _check_texts(settings: Slurm, report: Report) -> None:
    """Check what is copied into a batch script, where it could begin a command."""
    for name in SLURM_TEXTS:
        value = getattr(settings, name)
        if value is not None and not SLURM_TEXT.fullmatch(value):
            reason = "must be a name, of letters, digits and  _ . , : @ / + & | ( ) [ ] * -"
            report.add(f"hydra.launcher.{name}", value, reason)


def _require_lines(*place: str) -> None:
    """Raise UserError for a line break in the sweep's folder. place: the values of `PLACE`."""
    for key, text in zip(PLACE, place, strict=True):
        if "\n" in text:  # it would begin a command in a batch script
            raise UserError("the sweep cannot be set up", f"{key}={text}", "must be one line")


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _read_settings(cls: Any, node: dict[str, Any], name: str, report: Report) -> Any:
    """Build the dataclass `cls` from the composed hydra.NAME, adding problems to the report."""
    prefix = f"hydra.{name}."
    keys = flatten(cls, prefix)
    for leaf, value in node.items():
        key = prefix + leaf
        if key not in keys and leaf != "_target_":
            report.add(key, value, why_unknown(key, as_text(value), keys, {}))
    return build(cls, node, report, prefix)
