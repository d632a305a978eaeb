"""The same data gives the same losses and gradient norms, however the work is split into ranks,
micro-batches and rows, and nearly the same in fewer bits."""

import math

import inject
import pytest
import torch
import torch.nn.functional as F
from plain import shown
from stored import assert_byte_equal, newest, stored
from world import write_chats

import fsdp_trainer

CONSTANT = "data.path=DATA/chats.jsonl schedule=constant optim.grad_clip=0.5"
BF16 = "precision.param_dtype=bfloat16"


@pytest.fixture(scope="module")
def alone(ledger):
    """The reference: one rank, one micro-batch a step; it learns, and its gradient is clipped."""
    run = ledger.run(words=[CONSTANT, "train.steps=20"])
    loss, norm = run["loss"], run["grad_norm"]
    assert loss[-1] < loss[0] - 0.5
    assert max(norm) > 0.5
    return loss, norm


def test_pure_bf16_trains_with_states_of_two_bytes_and_is_near_fp32(alone, ledger):
    pure = [BF16, "precision.master_dtype=bfloat16 train.steps=10"]
    run = ledger.run(words=[CONSTANT, *pure], ranks=2)
    # weights are rounded at every step: not as near as bf16 compute alone
    assert run["loss"] == pytest.approx(alone[0][:10], rel=0.05)
    state = {
        name: tensor for name, tensor in stored(newest(run)).items() if not name.endswith("/step")
    }
    moments = [name for name in state if name.startswith("optimizer/")]
    assert len(state) == 1.5 * len(moments)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def print_formats(rotate, x, cosine, sine):
    """Print the formats in which a block rotates its queries and keys."""
    print("rotates", x.dtype, "by", cosine.dtype, sine.dtype)
    return rotate(x, cosine, sine)


@pytest.mark.parametrize("family, rotations", [("olmo2", torch.float32), ("llama", torch.bfloat16)])
def test_rotations_that_a_family_keeps_in_float32_are_not_rounded_in_bf16(train, family, rotations):
    how = [f"model.family={family} model.num_key_value_heads=4", BF16, "train.steps=1"]
    seam = inject.around("rotary_embedding", print_formats)
    run = train(family, *how, "activation_checkpoint=full", seam=seam)
    lines = {line for line in run.out.splitlines() if line.startswith("rotates")}
    assert lines == {f"rotates torch.bfloat16 by {rotations} {rotations}"}, "in recomputation too"


def test_weights_at_the_start_do_not_depend_on_ranks(ledger):
    first, on_three, other_seed = (
        fsdp_trainer.load_model(ledger.run(words=words, ranks=ranks).folder).state_dict()
        for words, ranks in (
            (["train.steps=0"], 1),
            (["train.steps=0"], 3),
            (["train.steps=0 run.seed=1"], 1),
        )
    )
    assert_byte_equal(first, on_three)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other_seed[name])
    sums = {tensor.float().sum().item() for name, tensor in first.items() if "proj" in name}
    assert len(sums) == 14, "every matrix has its own numbers"


def test_the_validation_loss_is_the_mean_over_exactly_the_validation_set(
    train, tmp_path, inputs, world
):
    """Validating changes nothing of training."""
    held_out = write_chats(tmp_path / "held_out.jsonl", 13, start=500)
    how = f"train.steps=4 data.validation={held_out} batch.micro_rows=2"
    often = train("often", how, "train.validate_every=2", ranks=3)
    once = train("once", how, ranks=3)
    assert often["loss"] == once["loss"]
    assert [event["step"] for event in often.event("evaluation")] == [0, 2, 4]
    assert [event["step"] for event in once.event("evaluation")] == [0, 4]
    losses = [event["loss"] for event in often.event("evaluation")]
    assert often.metrics[1]["validation_loss"] == losses[1]
    assert [event["loss"] for event in once.event("evaluation")] == [losses[0], losses[2]]
    assert once.metrics[-1]["validation_loss"] == losses[2]

    words = f"data.path={held_out} tokenizer.path=demo:bytes batch.seq_len=64 data.packing=none"
    rows = shown(world, 13, words, f"data.shuffle=false data.cache={inputs['data.cache']}")
    model, total, count, nats, text = fsdp_trainer.load_model(often.folder), 0.0, 0, 0.0, []
    for row in rows:
        labels = torch.tensor(row["labels"])
        logits = model.logits(torch.tensor([row["tokens"]]))[0]
        each = F.cross_entropy(logits, labels, reduction="none")
        total += each.sum().item()
        count += int((labels != -100).sum())
        is_text = (labels >= 0) & (labels < 256)  # of demo:bytes; special tokens come behind
        nats += each[is_text].sum().item()
        text += labels[is_text].tolist()
    assert losses[-1] == pytest.approx(total / count, rel=1e-5)
    bits = often.metrics[-1]["validation_bits_per_byte"]
    assert bits == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert often.event("evaluation")[-1]["bits_per_byte"] == bits
    assert "bits/byte" in often.out
