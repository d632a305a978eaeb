"""Combinations with each pair of a method, model, optimizer, layout and so on give the numbers of
one rank, and one that does not is reported with as few words as possible."""

import os
from dataclasses import replace

import inject
import pytest
import torch
from combinations import (
    DIMENSIONS,
    RANKS,
    SIMPLEST,
    Difference,
    Failed,
    Fuzz,
    Refused,
    Results,
    Tolerance,
    differences,
    refusal,
    run_all,
    title,
)
from covering_array import Dealer, all_pairs, pairs_of, refused, stored

from fsdp_trainer.config.methods import METHODS

COMBINATIONS = stored()


@pytest.fixture(scope="session")
def fuzz(world, ledger, tmp_path_factory):
    """Return what runs combinations; all of pytest's workers read the same inputs."""
    data = ledger.folder / "combinations"
    runs = Fuzz(world, tmp_path_factory.mktemp("combinations"), data)
    with ledger.once("combinations") as is_done:
        if not is_done():
            runs.write_inputs()
    return runs


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_a_combination_gives_the_numbers_of_one_rank(fuzz, number):
    combination = COMBINATIONS[number]
    largest = fuzz.check(combination)
    assert largest.ratio <= 1, f"{largest.where}\n{fuzz.command_lines(combination)}"


def test_each_pair_of_values_occurs_or_is_refused():
    """`make covering` writes the combinations again after a new value."""
    occurring = set().union(*map(pairs_of, COMBINATIONS))
    assert set(all_pairs()) == occurring | refused()
    assert not occurring & refused()
    words = {word for one in COMBINATIONS for value in one.values() for word in value.split()}
    assert {f"objective={name}" for name in METHODS} <= words
    every = {words for values in DIMENSIONS.values() for value in values for words in value}
    assert every == {words for one in COMBINATIONS for words in one.values()}


def too_large(real, self, scores, tokens):
    """A loss that is 0.1% too large on one of two ranks."""
    return real(self, scores, tokens) * (1.001 if os.environ["RANK"] == "1" else 1.0)


def test_a_wrong_loss_on_one_rank_is_found(fuzz):
    faulty = replace(fuzz, fault=inject.around("objective", too_large))
    largest, _ = faulty.timed(SIMPLEST | {"micro": "batch.micro_rows=3"})
    assert 2 < largest.ratio < 100
    lines = fuzz.command_lines(SIMPLEST).splitlines()
    assert [RANKS in line for line in lines] == [True, False]


class Planted(Fuzz):
    """A program with a fault: DoRA differs on tensor ranks, and DeepSeek's family lacks it."""

    def check(self, combination):
        self.require_accepted(combination)
        chosen = " ".join(combination.values())
        if "adapter=dora" in chosen and "model.family=deepseek_v3" in chosen:
            raise Failed("exit codes [1, 1]")
        wrong = "adapter=dora" in chosen and "sharding.tensor=2" in chosen
        return Difference(3.0 if wrong else 0.1, "loss of step 2")

    def require_accepted(self, combination):
        if "sharding.context" in combination["ranks"] and combination["precision"]:
            raise Refused(["sharding.context"])


def test_what_differs_is_reported_with_as_few_words_as_possible(tmp_path):
    planted = Planted(None, tmp_path, tmp_path)
    dealer = Dealer(5, planted.require_accepted)
    lines, combinations = [], list(dealer.deal())
    reports = run_all(planted, combinations, say=lines.append)
    occurring = set().union(*map(pairs_of, combinations))
    assert occurring | dealer.refused == set(all_pairs())
    assert {name for pair in dealer.refused for name, _ in pair} == {"precision", "ranks"}
    assert any("exit codes" in report for report in reports)
    smallest = [line for line in lines if line.startswith("and with as few words")]
    assert len(smallest) == len(reports) > 1
    for text in smallest:
        assert "adapter=dora" in text
        assert ("sharding.tensor=2" in text) != ("model.family=deepseek_v3" in text)
        assert "objective=sft data.path" in text
    assert title(SIMPLEST | {"check": "train.check_every=1"}).endswith("train.check_every=1")


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
