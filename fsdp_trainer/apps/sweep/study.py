"""The search of `hydra/sweeper=optuna`, which chooses jobs and ends bad ones early."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from fsdp_trainer.apps.sweep.jobs import Job, job_id
from fsdp_trainer.config.composing.sweep_overrides import Space
from fsdp_trainer.config.sweep_keys import Optuna
from fsdp_trainer.errors import UserError

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """A search stored in the sweep's folder as optuna.journal, which optuna's own tools can read.

    Each trial is a job. A trial that was stopped, killed or failed stays open, and the same command
    resumes it.
    """

    def __init__(self, settings: Optuna, space: Space):
        """Prepare the search. Raises UserError for values that cannot be searched."""
        self.settings, self.space = settings, space
        self.distributions = {
            key: distribution(override, space.integer[key])
            for key, override in space.varied.items()
        }
        self._open: dict[str, list[Trial]] = defaultdict(list)  # by job
        self._again: list[Trial] = []
        self._last_step: dict[str, int] = {}  # by job: the last step read
        self._window: dict[str, list[float]] = defaultdict(list)

    def open(self, folder: Path) -> None:
        """Begin the study, or continue that of an earlier command with equal settings and values.

        Raises UserError if the journal cannot be read.
        """
        described = [
            *self.space.fixed,
            *(f"{key}={d!r}" for key, d in self.distributions.items()),
            str(self.settings.metric),
            self.settings.direction,
        ]
        journal = folder / "optuna.journal"
        mend(journal)
        try:
            self.study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal))),
                study_name=job_id(described),
                direction=StudyDirection[self.settings.direction.upper()],
                pruner=PRUNERS[self.settings.pruner](self.settings),
                load_if_exists=True,
            )
        except (ValueError, KeyError, TypeError) as error:
            reason = (
                f"cannot be read: {error}. Move it away to search from the start; jobs that have"
                " finished count again"
            )
            raise UserError("the sweep cannot continue", str(journal), reason) from None
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            if trial.params.keys() == self.distributions.keys():
                self._again.append(Trial(self.study, trial._trial_id))
            else:  # the sweep was killed before all parameters were recorded
                self.study.tell(trial.number, state=TrialState.FAIL)

    def example(self) -> list[str]:
        return self._words({key: lowest(d) for key, d in self.distributions.items()})

    def jobs(self) -> list[str]:
        """Return the ids of the jobs chosen so far, in the order of choice."""
        return [
            trial.user_attrs["job"]
            for trial in self.study.get_trials(deepcopy=False)
            if "job" in trial.user_attrs
        ]

    def ask(self, room: int) -> list[list[str]]:
        """Return the overrides of up to `room` jobs, first those an earlier command left open."""
        chosen: list[list[str]] = []
        while len(chosen) < room and (
            self._again or len(self.study.get_trials(deepcopy=False)) < self.settings.n_trials
        ):
            trial = self._again.pop(0) if self._again else self._new()
            words = self._words(trial.params)
            trial.set_user_attr("job", job_id(words))
            self._open[job_id(words)].append(trial)
            chosen.append(words)
        return chosen

    def tell(self, job: Job) -> None:
        """Record how a job ended. A trial fails if running its job again would not help."""
        ended = {
            "pruned": TrialState.PRUNED,
            "refused": TrialState.FAIL,
            "does not fit": TrialState.FAIL,
        }
        for trial in self._open.pop(job.job, []):
            if job.state in ("finished", "skipped"):
                done = job.objective is not None
                self.study.tell(
                    trial, job.objective, state=TrialState.COMPLETE if done else TrialState.FAIL
                )
            elif job.state in ended:
                trial.set_user_attr("reason", job.reason)
                self.study.tell(trial, state=ended[job.state])

    def prunes(self, job: Job, validates: bool, lines: list[dict[str, Any]]) -> bool:
        """Report the metrics in `lines` to the pruner. Returns True if the job must end early.

        validates: True if the job computes a validation loss.
        """
        trial, reported = self._open[job.job][0], False
        if job.job not in self._last_step:
            self._last_step[job.job] = max(
                self.study._storage.get_trial(trial._trial_id).intermediate_values, default=0
            )
        for step, value in self._values(job.job, validates, lines):
            trial.report(value, step)
            reported = True
        return reported and trial.should_prune()

    def _new(self) -> Trial:
        number = len(self.study.get_trials(deepcopy=False))
        # each trial has its own seed: with the study's seed a restarted sampler would repeat itself
        self.study.sampler = SAMPLERS[self.settings.sampler](
            self.settings, (self.settings.seed * 1_000_003 + number) % 2**32
        )
        return self.study.ask(fixed_distributions=self.distributions)

    def _words(self, params: Mapping[str, Any]) -> list[str]:
        return [
            *self.space.fixed,
            *(f"{key}={f'{v:.4g}' if isinstance(v, float) else v}" for key, v in params.items()),
        ]

    def _values(
        self, job: str, validates: bool, lines: list[dict[str, Any]]
    ) -> Iterator[tuple[int, float]]:
        """Yield (step, value) at the same steps in every job.

        The values are validation losses, or means of another metric over `prune_every` steps.
        """
        name = self.settings.metric or ("validation_loss" if validates else "loss")
        for line in lines:
            value = line.get(name)
            if line["step"] <= self._last_step[job] or value is None:
                continue
            self._last_step[job] = line["step"]
            if name == "validation_loss":
                yield line["step"], value
                continue
            self._window[job].append(value)
            if line["step"] % self.settings.prune_every == 0:
                window = self._window.pop(job)
                yield line["step"], sum(window) / len(window)


def mend(journal: Path) -> None:
    """Repair the journal of a killed sweep.

    Otherwise optuna would append to an incomplete line, and wait for the dead process's lock.
    """
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists() and not (lines := journal.read_bytes()).endswith(b"\n"):
        os.truncate(journal, lines.rfind(b"\n") + 1)


def distribution(override: Any, integer: bool) -> BaseDistribution:
    """Return the optuna distribution of the values of an override.

    integer: True if the key accepts only integers. Raises UserError for values that optuna
    rejects.
    """
    value, log = override.value(), "log" in override.value().tags
    try:
        if override.is_interval_sweep():
            if integer or (isinstance(value.start, int) and isinstance(value.end, int)):
                return IntDistribution(int(value.start), int(value.end), log=log)
            return FloatDistribution(value.start, value.end, log=log)
        if override.is_range_sweep() and value.step > 0:
            numbers = [float(text) for text in override.sweep_string_iterator()]
            if all(map(float.is_integer, (*numbers, float(value.step)))):
                return IntDistribution(int(numbers[0]), int(numbers[-1]), step=int(value.step))
            return FloatDistribution(numbers[0], numbers[-1], step=value.step)
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    except ValueError as error:
        raise UserError(
            "the sweep cannot be set up", str(override.input_line), str(error)
        ) from None


def lowest(values: BaseDistribution) -> Any:
    """Return the first choice or the lowest value of a distribution."""
    if isinstance(values, IntDistribution | FloatDistribution):
        return values.low
    assert isinstance(values, CategoricalDistribution)
    return values.choices[0]


SAMPLERS: dict[str, Any] = {
    "tpe": lambda s, seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=s.startup_trials),
    "random": lambda s, seed: optuna.samplers.RandomSampler(seed=seed),
}
PRUNERS: dict[str, Any] = {
    "none": lambda s: optuna.pruners.NopPruner(),
    "median": lambda s: optuna.pruners.MedianPruner(
        s.startup_trials, n_warmup_steps=s.prune_from - 1
    ),
    "asha": lambda s: optuna.pruners.SuccessiveHalvingPruner(min_resource=s.prune_from),
    "hyperband": lambda s: optuna.pruners.HyperbandPruner(min_resource=s.prune_from),
}
