"""Stand for the packages of trackers and their services: what was logged to each run, by id.

Each function has those parameters of the package's that are used, so another one raises TypeError.
SIGNATURES lists them, to be compared with the packages where they are installed: wandb 0.31,
trackio 0.43, comet_ml 3.58, swanlab 0.10.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class StoredRun:
    """A run of a service: its steps with their losses, in the order of their arrival."""

    steps: list = field(default_factory=list)
    names: list = field(default_factory=list)
    config: dict = field(default_factory=dict)

    def open(self, name, config):
        """Return the run, after a start with these."""
        self.names.append(name)
        self.config |= config
        return self

    def newest(self):
        """Return the last step; -1 if there is none."""
        return max((step for step, _ in self.steps), default=-1)


class WandbRun:
    """Offline, each start counts from 0."""

    def __init__(self, stored, mode):
        self.stored, self.step = stored, stored.newest() + 1 if mode == "online" else 0

    def log(self, data, *, step):
        assert step >= self.step, "W&B drops it"
        self.stored.steps.append((step, data["loss"]))
        self.step = step

    def finish(self, *, exit_code):
        pass


class Wandb:
    """Stands for the package wandb."""

    def __init__(self):
        self.runs = defaultdict(StoredRun)

    def init(self, *, project, name, id, resume, mode, dir, config):
        return WandbRun(self.runs[id].open(name, config), mode)


class TrackioRun:
    """Sends at `finish` and every half second, which does not come before a kill here."""

    def __init__(self, stored):
        self.stored, self.unsent, self._next_step = stored, [], stored.newest() + 1

    def log(self, metrics, step):
        self.unsent.append((step, metrics["loss"]))

    def finish(self):
        self.stored.steps += self.unsent


class Trackio:
    """Stands for the package trackio, whose runs are found by their name."""

    def __init__(self):
        self.runs, self.Markdown = defaultdict(StoredRun), str

    def init(self, project, name, *, config, resume, embed):
        return TrackioRun(self.runs[name].open(name, config))


class CometExperiment:
    """Online, steps are sent at once; offline, `end` writes the archive."""

    def __init__(self, stored, online):
        self.stored, self.unsent = stored, stored.steps if online else []

    def log_metrics(self, dic, *, step):
        self.unsent.append((step, dic["loss"]))

    def log_parameters(self, parameters):
        self.stored.config |= parameters

    def log_text(self, text, *, step, metadata):
        pass

    def end(self):
        if self.unsent is not self.stored.steps:
            self.stored.steps += self.unsent


class Comet:
    """Stands for the package comet_ml."""

    def __init__(self):
        self.runs = defaultdict(StoredRun)

    def start(self, *, project_name, experiment_key, mode, online, experiment_config):
        assert 32 <= len(experiment_key) <= 50
        assert mode == "get_or_create" or experiment_key not in self.runs
        stored = self.runs[experiment_key].open(experiment_config.name, {})
        return CometExperiment(stored, online)

    def ExperimentConfig(
        self, *, name, offline_directory, log_code, log_graph, parse_args, auto_param_logging,
        auto_metric_logging, auto_output_logging,
    ):  # fmt: skip
        return SimpleNamespace(name=name)

    def API(self):
        return CometApi(self.runs)


class CometApi:
    def __init__(self, runs):
        self.runs = runs

    def get_experiment_by_key(self, experiment_key):
        stored = self.runs[experiment_key]
        summary = {"stepCurrent": stored.newest()} if stored.steps else []
        return SimpleNamespace(get_metrics_summary=lambda metric: summary)


class SwanlabRun:
    """Drops steps that the service has."""

    def __init__(self, stored):
        self.stored, self.newest = stored, stored.newest()

    def log(self, data, *, step):
        if step > self.newest:
            self.stored.steps.append((step, data["loss"]))

    def log_text(self, *, key, data, step):
        pass

    def finish(self, *, state="success", error=None):
        pass


class Swanlab:
    """Stands for the package swanlab."""

    def __init__(self):
        self.runs = defaultdict(StoredRun)

    def init(self, *, project, name, id, resume, mode, log_dir, config, reinit):
        return SwanlabRun(self.runs[id].open(name, config))


SERVICES = {"wandb": Wandb, "trackio": Trackio, "comet_ml": Comet, "swanlab": Swanlab}
STAND_INS = {
    "wandb:": Wandb,
    "wandb:Run.": WandbRun,
    "trackio:": Trackio,
    "comet_ml:": Comet,
    "comet_ml:CometExperiment.": CometExperiment,
    "comet_ml:API.": CometApi,
    "swanlab:": Swanlab,
    "swanlab:Run.": SwanlabRun,
}
SIGNATURES = {
    f"{place}{name}": method
    for place, kind in STAND_INS.items()
    for name, method in vars(kind).items()
    if not name.startswith("__") and callable(method)
}
