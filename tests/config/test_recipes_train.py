"""Promises of every recipe, trained: two steps of the recipe as it is, but for its size; and the
three stages of the chain."""

import json

import pytest
import torch
import torch.nn.functional as F
from pairs import write_pairs
from recipe import RECIPES, recipe_as_it_is
from safetensors.torch import save_file

import fsdp_trainer
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.new_model import meta_decoder

SMALLER = [
    "model.num_hidden_layers=2", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.head_dim=8", "batch.rows=4", "tokenizer.path=demo:bytes",
    "compile=disabled",
]  # fmt: skip


FURTHER_SIZES = {
    "llama405b_pretrain_pp": ["model.num_hidden_layers=4"],  # two stages of each rank
    "qwen3_30b_a3b_sft": ["model.num_experts=8", "model.moe_intermediate_size=16"],
    "olmoe_pretrain": ["model.num_experts=8"],
    "gpt_oss_20b_lora": ["model.num_experts=8"],
    "chain_depth": ["model.depth=2"],
    "deepseek_v3_sft": [
        "model.num_key_value_heads=4", "model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4",
        "model.v_head_dim=8", "model.kv_lora_rank=16", "model.q_lora_rank=16",
        "model.num_experts=8", "model.n_group=2", "model.topk_group=1",
        "model.num_experts_per_tok=2", "model.moe_intermediate_size=16",
        "model.first_k_dense_replace=1",
    ],
}  # fmt: skip

SHORT_ANSWERS = ["objective.max_new_tokens=8", "objective.samples=2"]


@pytest.fixture
def text(tmp_path):
    """Plain text, some of it longer than a row."""
    (tmp_path / "text.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{i} times two is {2 * i}. " * (1 + i % 9)}) + "\n"
            for i in range(80)
        )
    )
    return tmp_path / "text.jsonl"


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name == "quickstart" else pytest.mark.slow)
        for name in RECIPES
    ],
)
@pytest.mark.grid(3)
def test_every_recipe_trains_and_ends_with_a_checkpoint(world, inputs, text, tmp_path, recipe):
    cfg = recipe_as_it_is(recipe)
    answers = cfg.objective.method.samples
    teacher = [f"objective.teacher={small_model(tmp_path)}"] if cfg.objective.teacher else []
    run = world.train(
        tmp_path / "run",
        f"+recipe={recipe}",
        *SMALLER,
        "model.init_from=null",
        f"data.path={data_of(cfg, text)}",
        f"data.cache={inputs['data.cache']}",
        "batch.seq_len=128",
        "train.steps=2",
        *teacher,
        *smaller_mesh(recipe),
        *FURTHER_SIZES.get(recipe, []),
        *(SHORT_ANSWERS if answers else []),
        ranks=2 if dimensions_of(recipe) or cfg.sharding.strategy != "fsdp" else 1,
        base=[],
    )
    assert run.column("step") == [1, 2]
    if answers:  # whose loss is around 0
        assert all(0 < tokens <= 8 for tokens in run.column("answer_tokens"))
        assert all(0 <= reward <= 1 for reward in run.column("reward"))
    else:
        assert all(loss > 0 for loss in run.column("loss"))
    assert run.events[-1]["exit_code"] == 0
    assert run.checkpoints == ["step-00000002"]


def data_of(cfg, text):
    """Return data of the kind that a recipe's objective learns from."""
    if cfg.objective.method.samples:
        return "demo:sums"
    if cfg.objective.method.reads == "pairs":
        return write_pairs(text.with_name("pairs.jsonl"))
    return text if cfg.data.format == "text" else "demo:backwards"


def small_model(folder):
    """A Hugging Face folder of random weights, with the vocabulary of demo:bytes."""
    config = ModelConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    weights = {n: torch.randn(p.shape) for n, p in meta_decoder(config).named_parameters()}
    (folder / "config.json").write_text(json.dumps(config.to_hf("float32")))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def dimensions_of(recipe) -> list[str]:
    """The mesh dimensions that a recipe uses beside sharding."""
    sharding = recipe_as_it_is(recipe).sharding
    dimensions = ("pipeline", "tensor", "context", "expert")
    return [name for name in dimensions if getattr(sharding, name) > 1]


def smaller_mesh(recipe) -> list[str]:
    """The overrides that give two ranks to the first mesh dimension that a recipe uses."""
    used = dimensions_of(recipe)
    return [f"sharding.{name}={2 if name == used[0] else 1}" for name in used]


@pytest.mark.slow
@pytest.mark.further
def test_each_stage_of_the_chain_starts_from_the_weights_of_the_one_before(
    world, text, chats, tmp_path
):
    shorter = [
        "train.steps=6",
        "schedule.warmup_steps=2",
        "batch.rows=4",
        "precision=fp32",
        "optim.lr=3e-3",
    ]
    stages = {
        "chain_pretrain": [f"data.path={text}", "batch.seq_len=64", *SMALLER],
        "chain_mid": [f"data.path={text}", "batch.seq_len=128", "compile=disabled"],
        "chain_sft": [f"data.path={chats}", "batch.seq_len=64", "compile=disabled"],
    }
    before = None
    for ranks, (stage, own) in enumerate(stages.items(), start=1):
        overrides = [f"+recipe={stage}", *shorter, *own]
        run = world.train(tmp_path / stage, *overrides, ranks=min(ranks, 2), base=[])
        losses = run.column("loss")
        if before:
            shown = world.command(
                "preview",
                *overrides,
                f"run.root={tmp_path}",
                "preview.format=json",
                "preview.rows=4",
            )[0].out
            assert losses[0] == pytest.approx(
                loss_of(before, [json.loads(line) for line in shown.splitlines()]), rel=1e-4
            )
        assert losses[-1] < losses[0]
        before = run.folder
    assert (tmp_path / "chain_sft" / "hf" / "model.safetensors").exists()


def loss_of(run, rows) -> float:
    """A run's model over rows, one document at a time."""
    model, total, count = fsdp_trainer.load_model(str(run)), 0.0, 0
    for row in rows:
        parts = zip(
            *(torch.tensor(row[name]).split(row["documents"]) for name in ("tokens", "labels")),
            strict=True,
        )
        for tokens, labels in parts:
            total += F.cross_entropy(
                model.logits(tokens[None])[0], labels, reduction="sum", ignore_index=-100
            ).item()
        count += sum(label != -100 for label in row["labels"])
    return total / count
