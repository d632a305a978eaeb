"""The trainer against plain transformers: one process, one document at a time, nothing packed,
torch's AdamW."""

import math
from fnmatch import fnmatch

import pytest
import torch
from plain import plain_training, shown
from stored import tensors
from world import write_lines
from zoo import make_model

transformers = pytest.importorskip("transformers")

STEPS, ROWS, PEAK, WARMUP, CLIP, DECAY, FLOOR = 4, 4, 3e-3, 2, 0.5, 0.1, 0.1
CASES = [
    ("llama tied", []),
    ("qwen3", ["model.layers.0.*", "*.q_proj.*"]),
    ("gpt_oss", []),
]
"""Models, and patterns of frozen weights."""


@pytest.fixture
def weighted(tmp_path):
    """Chats of two turns; some answers count less."""
    rows = [
        {"messages": [
            {"role": "user", "content": "ab"[: i % 3]},
            {"role": "assistant", "content": str(i), "weight": [1, 0, 0.5][i % 3]},
            {"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * (i % 9)},
        ]}
        for i in range(60)
    ]  # fmt: skip
    write_lines(tmp_path / "chats.jsonl", rows)
    return tmp_path / "chats.jsonl"


@pytest.mark.parametrize("name, frozen", CASES)
def test_steps_of_packed_training_on_two_ranks_are_those_of_plain_transformers(
    train, world, inputs, weighted, tmp_path, name, frozen
):
    folder = tmp_path / "model"
    model = make_model(name, vocab_size=264, max_position_embeddings=128)
    model.save_pretrained(folder)
    common = (
        f"model.init_from={folder} tokenizer.path=demo:bytes data.path={weighted}"
        f" batch.seq_len=128 batch.rows={ROWS}"
    )
    run = train(
        "ours",
        common,
        f"model=auto train.steps={STEPS} batch.micro_rows=2 optim.lr={PEAK}",
        f"schedule.warmup_steps={WARMUP} schedule.min_ratio={FLOOR}",
        f"optim.grad_clip={CLIP} optim.weight_decay={DECAY} precision=fp32",
        f"train.freeze={frozen} checkpoint.export_hf=true",
        ranks=2,
        base=["launch.timeout=60s"],
    )
    cache = f"data.cache={inputs['data.cache']}"
    rows = shown(world, STEPS * ROWS, common, cache)
    assert [row["row"] for row in rows] == list(range(STEPS * ROWS))
    assert max(len(row["documents"]) for row in rows) > 1
    assert any("weights" in row for row in rows)

    loss, norm, model = train_plainly(folder, rows, frozen)
    assert run["loss"] == pytest.approx(loss, rel=1e-4)
    assert run["grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = [len(row["tokens"]) for row in rows]
    assert run["tokens"] == [sum(tokens[: ROWS * i]) for i in range(1, STEPS + 1)]
    before, after = (tensors(one) for one in (folder, run.folder / "hf"))
    assert after.keys() == before.keys()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(after[name], before[name]), name
            torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(after[name], before[name]), name


def train_plainly(folder, rows, frozen):
    """Losses, gradient norms, and the model. frozen: patterns of names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).train()
    shared = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in shared.items():
        if any(fnmatch(name, pattern) for pattern in frozen):
            parameter.requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = [(1 + math.cos(math.pi * i / (STEPS - WARMUP))) / 2 for i in range(STEPS - WARMUP)]
    rates = [(i + 1) / WARMUP for i in range(WARMUP)] + [FLOOR + (1 - FLOOR) * s for s in shapes]
    losses, norms, _ = plain_training(
        lambda tokens: model(tokens).logits, trained, rows, [PEAK * r for r in rates], CLIP, DECAY
    )
    return losses, norms, model
