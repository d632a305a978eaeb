"""Recipes that `convert` makes train what transformers and TRL did, which was run for real."""

import contextlib
import math
from functools import cache

import pytest
from world import read_json

from fsdp_trainer.optim.schedules import learning_rate, steps_between
from tools.convert_truth import CASES, TRUTH, converted, differences, train_here, write_inputs

STORED = read_json(TRUTH)
conversion = cache(converted)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    write_inputs(folder)
    return folder


def at_intervals(every, steps):
    """The steps at which something is done that is also done at the end."""
    between = steps_between(every, steps) or steps
    return sorted({*range(between, steps + 1, between), steps})


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_has_the_steps_rates_and_parameters_of_the_real_run(name, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    there = STORED[name]
    result = conversion(name, inputs)
    cfg, length = result.cfg, result.length()
    rates = [learning_rate(cfg.schedule, cfg.optim.lr, n + 1, length.steps)
             for n in range(length.steps)]  # fmt: skip
    assert length.steps == there["steps"]
    assert rates == pytest.approx(there["rates"], rel=1e-9)
    assert at_intervals(cfg.checkpoint.every, length.steps) == (there["saved"] or [length.steps])
    assert not there["validated"] or (
        at_intervals(cfg.train.validate_every, length.steps) == there["validated"]
    )
    table = {what: numbers for what, *numbers in result.comparison()}
    assert table["trained parameters"] == [f"{there['trained']:,}"] * 2
    assert table["steps"] == [str(there["steps"])] * 2
    assert table.pop("text around a prompt", ["none"] * 2) == ["none"] * 2
    others = table.keys() - {"", "trained parameters", "steps"}
    assert len(others) == 3
    assert all(math.isclose(*map(float, table[what])) for what in others)
    assert float(table["highest learning rate"][1]) == pytest.approx(max(rates), rel=1e-3)


def test_only_samples_that_are_texts_have_none_around_them(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    templates = {name: conversion(name, inputs).cfg.data.template for name in CASES}
    assert {name for name, template in templates.items() if template == "none"} == {
        "sft of texts", "sft of plain prompts", "dpo of plain prompts"
    }  # fmt: skip


def losses_of(name, folder):
    """Train the recipe of a case in a rank's process, in which a small run costs least."""
    with contextlib.chdir(folder):
        return train_here(converted(name, folder), folder)


@pytest.mark.parametrize("name", [name for name, there in STORED.items() if there["losses"]])
def test_a_recipe_trains_with_the_losses_of_the_real_run(name, inputs, world):
    (losses,) = world.call(1, losses_of, name, inputs)
    assert not differences({"losses": STORED[name]["losses"]}, {"losses": losses})
