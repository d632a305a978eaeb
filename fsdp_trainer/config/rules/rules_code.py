"""The rule that code runs only if the command line names it. See config/rules/rules.py."""

import re
from typing import Any

from fsdp_trainer.config.check import Report, Violations, as_text, flatten, value_of
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.rl.environments.known_environments import ENVIRONMENTS, code_of
from fsdp_trainer.rl.rewards.table import KEY as REWARDS
from fsdp_trainer.rl.rewards.table import names_of_code

RUN_CODE = {
    "logging.command": "a file cannot start a program",
    "logging.trackers": "a file cannot name code",
    "model.trust_remote_code": "a file cannot trust code",
    "evaluation.code": "a file cannot name code",
    "code": "a file cannot name code",
    "setup": "a file cannot add commands",
    "image": "a file cannot name what runs",
}
"""Keys whose value runs code, with the reason why a file cannot set them.

Recipes, converted files and folders with groups may come from anybody.
"""
OWN_PARTS = {key for key, f in flatten(TrainConfig).items() if f.metadata["part"]} | {REWARDS}
"""Keys that take parts of the user's own. An installed one may stand in a file."""
ENVIRONMENT = "objective.environment"
CODE_OF_PARTS = {f".{part}" for kind in ENVIRONMENTS.values() for part in kind.names_code}
SLURM = re.compile(r"hydra\.launcher\.(setup|additional_parameters)\b")
"""Commands and options that a sweep's jobs are submitted with."""
PARAMS = re.compile(r"hydra\.sweeper\.params\.\+*")
TYPE_IT = "type it on the command line"


def typed_code(cfg: TrainConfig, report: Report) -> Violations:
    keys = flatten(type(cfg))
    for key in RUN_CODE.keys() & keys.keys() - report.typed.keys():
        if value_of(cfg, key) != default_of(keys[key]):
            yield key, f"{RUN_CODE[key]}: {TYPE_IT}"
    parts = {key for key, f in keys.items() if f.metadata["part"]}
    for key in parts - report.typed.keys():
        if ":" in (name := str(value_of(cfg, key))):
            yield key, f"a file cannot name code, as {name}: {TYPE_IT}"
    for name in names_of_code(cfg.objective.rewards):
        if name not in report.typed.get(REWARDS, ""):
            yield REWARDS, f"a file cannot name code, as {name}: {TYPE_IT}"
    yield from _typed_environment(cfg.objective.environment, report)


def _typed_environment(entry: Any, report: Report) -> Violations:
    # parts may be typed one by one, and a recipe's entry keeps those that are not
    places = {ENVIRONMENT, f"{ENVIRONMENT}.name", *(ENVIRONMENT + part for part in CODE_OF_PARTS)}
    typed = [text for key, text in report.typed.items() if key in places]
    for name in [] if entry is None else code_of(entry):
        if not any(name in text for text in typed):
            reason = f"a file cannot name code, as {name}: {TYPE_IT}"
            yield ENVIRONMENT, f"{reason}:\n'{ENVIRONMENT}={as_text(entry)}'"


def code_of_sweep(key: str, value: object) -> str | None:
    """Return the reason why a file may not set a key of hydra.*, which would run code, or None."""
    swept = PARAMS.sub("", key)
    mark = ".py:" if swept == REWARDS else ":"  # a reward's settings may have an address
    names_code = swept in RUN_CODE or (swept in OWN_PARTS and mark in str(value))
    if (SLURM.match(key) and value) or names_code:
        return f"a file cannot run code: {TYPE_IT}"
    part = swept.removeprefix(ENVIRONMENT)
    names = {*re.split(r"[\s,()'\"]+", str(value))} - {"", "choice", "null"}
    is_other = part in ("", ".name") and not names <= ENVIRONMENTS.keys()
    if part != swept and (part in CODE_OF_PARTS or is_other):
        return f"a file cannot name code: {TYPE_IT}"
    return None
