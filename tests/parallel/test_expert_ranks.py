"""Expert parallelism: runs whose ranks divide experts, and what is refused."""

import pytest
import torch
from stored import newest, stored

SMALL = ["model.family=qwen3_moe", "model.num_experts=4", "model.num_hidden_layers=2"]


def test_an_adapter_of_experts_in_4_bits_goes_on_with_another_expert_degree(train):
    how = [
        *SMALL, "adapter=qlora", "adapter.targets=[all,experts]", "adapter.rank=4",
        "schedule=constant", "optim.eps=1e-3", "optim.lr=1e-2", "batch.rows=4",
        "batch.micro_rows=1", "checkpoint.every=1",
    ]  # fmt: skip
    expected = train("whole", *how, "train.steps=3")
    train("parts", *how, "train.steps=2", "sharding.expert=2", ranks=2)
    run = train("parts", *how, "train.steps=3")
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)
    adapters, others = stored(newest(run)), stored(newest(expected))
    assert any(".experts.lora_B.down_proj" in name for name in adapters)
    for name in adapters:
        torch.testing.assert_close(adapters[name], others[name], rtol=0, atol=1e-5)


def test_losses_of_experts_and_their_load_are_those_of_one_process(train):
    how = [
        *SMALL, "schedule=constant", "loss.load_balancing=0.1", "loss.router_z_loss=0.01",
        "train.steps=3", "batch.rows=4", "batch.micro_rows=1", "optim.lr=1e-2",
    ]  # fmt: skip
    one = train("one", *how)
    run = train("run", *how, "sharding.expert=2", "sharding.pipeline=2", ranks=4)
    names = ("objective", "grad_norm", "load_balancing_loss", "router_z_loss", "expert_load_max")
    for name in names:
        assert run.column(name) == pytest.approx(one.column(name), rel=1e-4), name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sharding.expert=3"], "must divide num_experts=4. Use sharding.expert=2"),
        (["sharding.expert=2"], "(shard × context × tensor), which are 1. Use sharding.expert=1"),
        (["sharding.expert=2", "model.family=qwen3"], "qwen3 has no experts"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(train, overrides, words):
    family = [] if "model.family=qwen3" in overrides else SMALL
    run = train("refused", *family, *overrides, code=2)
    assert words in " ".join(run.err.split())
