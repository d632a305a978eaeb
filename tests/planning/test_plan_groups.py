"""The figures of `plan` for groups of ranks that share a run."""

import pytest
from plans import plan_json

WORDS = (
    "model=llama3_8b plan.gpu=h100 plan.world_size=8 batch.rows=64 checkpoint.every=100"
    " activation_checkpoint=full"
)
PARAMETERS = 8_030_261_248


def planned(*words):
    return plan_json(WORDS, *words)


def test_groups_divide_the_rows_and_sum_their_gradients_in_each_step():
    alone, one = planned(), planned("replicas.method=sync launch.groups=4 batch.rows=256")
    assert one["groups"]["groups"] == 4
    assert one["micro_batches"] == alone["micro_batches"]
    assert one["peak_gib"] == alone["peak_gib"]
    # a ring sends 2 (n - 1) / n of a rank's float32 gradients
    expected = 2 * 3 / 4 * 4 * PARAMETERS / 8
    assert one["groups"]["bytes_per_exchange"] == pytest.approx(expected, rel=1e-3)
    assert one["bytes_by_link"]["groups"] == one["groups"]["bytes_per_exchange"]
    waited = [b - a for a, b in zip(alone["step_seconds"], one["step_seconds"], strict=True)]
    assert waited[0] > one["groups"]["seconds_per_exchange"]
    assert one["groups"]["lost_seconds_with_groups"] == pytest.approx(
        5 + sum(one["step_seconds"]) / 2
    )
    assert one["tokens_per_second"] > 3.5 * alone["tokens_per_second"]


def test_outer_steps_are_exchanged_seldom_and_keep_two_more_copies():
    seldom = ["replicas.method=diloco", "replicas.every=50", "launch.groups=2"]
    alone, one = planned("batch.rows=32"), planned(*seldom, "plan.groups_gbps=10")
    assert one["groups"]["every"] == 50
    assert one["groups"]["bytes_per_exchange"] == pytest.approx(PARAMETERS / 8 * 4, rel=1e-3)
    assert one["bytes_by_link"]["groups"] == pytest.approx(
        one["groups"]["bytes_per_exchange"] / 50, rel=1e-3
    )
    assert one["groups"]["seconds_per_exchange"] == pytest.approx(
        one["groups"]["bytes_per_exchange"] / (10e9 / 8)
    )
    outer = 2 * 4 * PARAMETERS / 8 / 2**30
    optimizers = [plan["by_category"]["optimizer"] for plan in (alone, one)]
    assert optimizers[1] - optimizers[0] == pytest.approx(outer, rel=0.001)
    assert one["peak_gib"] - alone["peak_gib"] >= outer
    small = planned(*seldom, "replicas.quantize=true")["groups"]["bytes_per_exchange"]
    assert small / one["groups"]["bytes_per_exchange"] == pytest.approx(0.254, rel=0.01)


def test_a_run_without_groups_has_none():
    assert planned()["groups"] is None
