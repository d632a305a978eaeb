"""The trainer beside accelerate's FSDP2 and transformers' own loss: the same padded rows on two
ranks, in float32."""

from functools import partial

import pytest
import torch
from plain import shown
from torch.distributed.tensor import DTensor
from zoo import make_folder

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS, ROWS, PEAK, CLIP, DECAY = 8, 8, 3e-3, 0.5, 0.1
IGNORED = -100


def test_losses_on_two_ranks_are_those_of_accelerate_and_transformers(
    train, world, inputs, tmp_path
):
    folder = make_folder(tmp_path / "hf", tie_word_embeddings=False)
    common = [f"model.init_from={folder} batch.seq_len=64 batch.rows={ROWS}"]
    common.append("data.packing=none")
    run = train(
        "ours", *common, f"train.steps={STEPS} batch.micro_rows=2 optim.lr={PEAK}",
        f"optim.grad_clip={CLIP} optim.weight_decay={DECAY} precision=fp32",
        "checkpoint.every=null", ranks=2, base=["launch.timeout=60s"],
    )  # fmt: skip
    data = [f"{key}={inputs[key]}" for key in ("data.path", "data.cache")]
    rows = shown(world, STEPS * ROWS, *common, *data)
    assert len({len(row["tokens"]) for row in rows}) > 1
    assert all(len(row["documents"]) == 1 for row in rows)
    losses, norms = world.call(2, train_with_accelerate, str(folder), rows)[0]
    assert run["loss"] == pytest.approx(losses, abs=1e-4, rel=0)
    assert run["grad_norm"] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < losses[0] - 0.5


def train_with_accelerate(folder, rows):
    """One rank's training, each step in one forward of its part of the rows; the losses and
    gradient norms of all ranks together."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # On CPUs accelerate only ever chooses plain data parallelism; told that it is FSDP, it shards
    # there as it does on GPUs.
    accelerate.PartialState().distributed_type = accelerator.state.distributed_type = (
        accelerate.DistributedType.FSDP
    )
    accelerator.state.fsdp_plugin = plugin
    try:
        of_folder = transformers.AutoModelForCausalLM.from_pretrained
        model = of_folder(folder, dtype=torch.float32).train()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert accelerator.is_fsdp2
        assert all(isinstance(p, DTensor) for p in model.parameters())
        losses, norms = [], []
        for step in range(STEPS):
            of_step = rows[step * ROWS : (step + 1) * ROWS]
            batch = padded(of_step[accelerator.process_index :: accelerator.num_processes])
            supervised = accelerator.reduce((batch["labels"][:, 1:] != IGNORED).sum(), "sum")
            # the rank's sum over the tokens of all ranks
            share = model(**batch, num_items_in_batch=supervised).loss
            # gradients are averaged over the ranks
            accelerator.backward(share * accelerator.num_processes)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(share.detach(), "sum").item())
        return losses, norms
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def padded(rows):
    """Rows as a transformers collator makes them: labels stand where their token does, and the
    model shifts them."""
    assert all(row["labels"][-1] == IGNORED for row in rows)
    tokens = [torch.tensor(row["tokens"]) for row in rows]
    labels = [torch.tensor([IGNORED, *row["labels"][:-1]]) for row in rows]
    ones = [torch.ones_like(row) for row in tokens]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad(tokens),
        "attention_mask": pad(ones),
        "labels": pad(labels, padding_value=IGNORED),
    }
