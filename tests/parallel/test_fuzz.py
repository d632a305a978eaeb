"""Ten random combinations of methods, models, optimizers and layouts give the numbers of one rank,
and one that does not is reported with as few words as possible."""

import os

import inject
import pytest
import torch
from fuzz import (
    DIMENSIONS,
    RANKS,
    Difference,
    Failed,
    Fuzz,
    Refused,
    Results,
    Tolerance,
    differences,
    refusal,
    run_all,
)

from fsdp_trainer.config.methods import METHODS

SEED, COUNT = 1, 10
SIZES = {"sharding.tensor=2", "sharding.context=2", "sharding.pipeline=2", "sharding.expert=2"}
STRATEGIES = {"sharding=ddp", "sharding=hsdp"}
SIMPLEST = {name: values[0] for name, values in DIMENSIONS.items()}


def all_words(combinations):
    return {word for one in combinations for value in one.values() for word in value.split()}


@pytest.mark.slow
@pytest.mark.further
def test_combinations_of_a_seed_give_the_numbers_of_one_rank(world, tmp_path):
    lines = []
    fuzz = Fuzz(world, tmp_path / "fuzz")
    checked, reports = run_all(fuzz, SEED, COUNT, most_ranks=2, say=lines.append)
    assert not reports, "\n".join(lines)
    assert len(lines) == COUNT
    words = all_words(checked)
    methods = {f"objective={name}" for name in METHODS} | {"data=pretrain"}
    assert methods | SIZES | STRATEGIES <= words


def too_large(real, self, scores, tokens):
    """A loss that is 0.1% too large on one of two ranks."""
    return real(self, scores, tokens) * (1.001 if os.environ["RANK"] == "1" else 1.0)


@pytest.mark.slow
def test_a_wrong_loss_on_one_rank_is_found(world, tmp_path):
    fault = inject.around("objective", too_large)
    fuzz = Fuzz(world, tmp_path / "fuzz", fault=fault)
    largest, _ = fuzz.timed(SIMPLEST | {"micro": "batch.micro_rows=3"})
    assert 2 < largest.ratio < 100
    lines = fuzz.command_lines(SIMPLEST).splitlines()
    assert [RANKS in line for line in lines] == [True, False]


class Planted(Fuzz):
    """A program with a fault: LARS differs on tensor ranks, and gemma2 does not work with it."""

    def __post_init__(self):
        """Write no data."""

    def check(self, combination):
        words = all_words([combination])
        if "sharding.context=2" in words:
            raise Refused(["sharding.context"])
        if {"optim=lars", "model.family=gemma2"} <= words:
            raise Failed("exit codes [1, 1]")
        wrong = {"optim=lars", "sharding.tensor=2"} <= words
        return Difference(3.0 if wrong else 0.1, "loss of step 2")


@pytest.mark.slow
def test_what_differs_is_reported_with_as_few_words_as_possible(tmp_path):
    lines = []
    checked, reports = run_all(Planted(None, tmp_path), 3, 200, say=lines.append)
    words = all_words(checked)
    assert "sharding.context=2" not in words
    refused = {"sharding.context=2", "sharding.context_method=ring"}
    for values in DIMENSIONS.values():
        for value in values:
            assert {*value.split()} <= words or {*value.split()} & refused, value
    assert any("exit codes" in report for report in reports)
    smallest = [line for line in lines if line.startswith("and with as few words")]
    assert len(smallest) == len(reports) > 1
    for text in smallest:
        assert "optim=lars" in text
        assert ("sharding.tensor=2" in text) != ("model.family=gemma2" in text)
        assert "objective=sft data.path" in text


def results(loss=2.0, weight=0.5, **more):
    metrics = [{"loss": 3.0, "tokens": 100.0}, {"loss": loss, "tokens": 100.0} | more]
    return Results(metrics, {"w": torch.tensor([weight, -1.0, 0.0])})


def test_metrics_and_weights_may_differ_by_rounding_only():
    allowed = Tolerance(metrics=1e-4, weights=2e-5)
    assert differences(results(loss=2.0001), results(), allowed).ratio < 1
    loss = differences(results(loss=2.0005), results(), allowed)
    assert loss.ratio > 1
    assert "loss of step 2" in loss.where
    weight = differences(results(weight=0.5001), results(), allowed)
    assert weight.ratio == pytest.approx(5, rel=0.01)
    assert differences(results(loss=float("nan")), results(), allowed).ratio == float("inf")
    assert differences(results(), results(kl=1.0), allowed).ratio == float("inf")
    lenient = Tolerance(share=0.5, outliers=0.1)
    assert differences(results(weight=0.51), results(), lenient).ratio < 1
    assert differences(results(weight=0.7), results(), lenient).ratio > 1


def test_a_refusal_is_one_message():
    text = "fsdp-trainer: a problem\n\n  sharding.tensor=3  must divide\n    Use  sharding.tensor=2"
    assert refusal(text).keys == ["sharding.tensor"]
    for wrong in ("Traceback (most recent call last)", f"{text}\n{text}"):
        with pytest.raises(Failed):
            refusal(wrong)
