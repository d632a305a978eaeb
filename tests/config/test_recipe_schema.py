"""The JSON Schema of recipes accepts and refuses what the program does."""

import json
from dataclasses import fields

import jsonschema
import pytest
import yaml

from fsdp_trainer.config.check import Report, build, flatten
from fsdp_trainer.config.composing.compose import CONF
from fsdp_trainer.config.durations import parse_duration, parse_steps
from fsdp_trainer.config.rules.rules_training import DURATIONS
from fsdp_trainer.config.schema import SELECTORS, TrainConfig

KEYS = flatten(TrainConfig)
GROUP = {f.name: f.type for f in fields(TrainConfig)}
VALUES = yaml.safe_load("""
[null, true, '', word, 0s, 5x, 3..1, 10-12, 1h30m,
-1, 0, 0.5, 1.5, 1000000000, [], [a], [1], [-1.0], {}, {a: 1}]
""")
GOOD = """\
{run: {root: "${oc.env:HOME}/runs"}}
{optim: {lr: 1e-5, eps: 1.0e-9}}
{defaults: [override /precision: mine, llama8b_sft, _self_]}
{data: {path: [{path: a, weight: 0.5}, b]}}
{launch: {timeout: 1h30m}, train: {time_limit: 90}}"""
WRONG = """\
{xylophone: 1}
{optim: {learning_rate: 1.0e-5}}
{optim: {lr: -1e-5}}
{optim: null}
{defaults: [override /optim: adam]}
{defaults: [optim: muon]}
{defaults: [muon]}
{data: {path: [{weight: 1}]}}
{data: {path: [{path: a, weight: -1}]}}
{hydra: {callbacks: {}}}
{logging: {command: python x.py}}
{model: {rope_scaling: {_target_: os.system}}}"""


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def problems(key, value):
    """Return what the program's own parsers say of a value; nothing where they accept it."""
    report = Report({}, [], set())
    group, *parts = key.split(".")
    settings = build(GROUP[group], nested(key, value)[group], report, f"{group}.")
    for part in parts:
        settings = getattr(settings, part)
    try:
        if key in DURATIONS and settings is not None and parse_duration(settings) <= 0:
            return "no time"
        if key == "profile.steps" and settings:
            parse_steps(settings)
    except ValueError as error:
        return str(error)
    return report.problems


@pytest.fixture
def recipes(program, tmp_path):
    own = tmp_path / "precision"
    own.mkdir()
    (own / "mine.yaml").write_text("param_dtype: float32\n")
    schema = program("config", "schema=true", "--config-dir", tmp_path)
    return jsonschema.Draft202012Validator(json.loads(schema))


def test_a_schema_accepts_recipes_and_refuses_what_the_program_refuses_of_one_key(recipes):
    for file in [*CONF.glob("recipe/*.yaml"), *CONF.glob("sweep/*.yaml")]:
        assert not [*recipes.iter_errors(yaml.safe_load(file.read_text()))], file
    for key in KEYS:
        group, _, name = key.partition(".")
        for value in VALUES:
            refused = SELECTORS.get(group) == name or bool(problems(key, value))
            by_range = value == "3..1" and key == "profile.steps"  # compared, not matched
            if refused and not by_range:
                assert not recipes.is_valid(nested(key, value)), (key, value)
    for text in GOOD.splitlines():
        assert recipes.is_valid(yaml.safe_load(text)), text
    for text in WRONG.splitlines():
        assert not recipes.is_valid(yaml.safe_load(text)), text
