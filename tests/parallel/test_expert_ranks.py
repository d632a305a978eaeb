"""Expert parallelism: a run goes on whose ranks divide experts otherwise."""

import torch
from stored import assert_near, newest, stored

SMALL = ["model.family=qwen3_moe model.num_experts=4 model.num_hidden_layers=2"]


def test_an_adapter_of_experts_in_4_bits_goes_on_with_another_expert_degree(train):
    how = [
        *SMALL, "adapter=qlora adapter.targets=[all,experts] adapter.rank=4",
        "schedule=constant optim.eps=1e-3 optim.lr=1e-2 batch.rows=4",
        "batch.micro_rows=1 checkpoint.every=1",
    ]  # fmt: skip
    expected = train("whole", *how, "train.steps=3")
    train("parts", *how, "train.steps=2 sharding.expert=2", ranks=2)
    run = train("parts", *how, "train.steps=3")
    assert_near(run, expected, loss=1e-5, grad_norm=1e-4)
    adapters, others = stored(newest(run)), stored(newest(expected))
    assert any(".experts.lora_B.down_proj" in name for name in adapters)
    torch.testing.assert_close(adapters, others, rtol=0, atol=1e-5)
