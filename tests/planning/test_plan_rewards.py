"""A plan of objective=grpo counts the reward models, which every rank has as a whole."""

from dataclasses import replace

import pytest
import torch
from memory_of_a_step import LiveBytes
from plans import plan, plan_json
from recipe import planned
from texts import make_tokenizer
from world import write_json

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.models.config import ONE_LABEL, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.scoring_models import scoring_models
from fsdp_trainer.rl.rounds.reward_scores import RewardModel

REWARDER = replace(
    ModelConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=704, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
    ),
    tie_word_embeddings=False, labels=ONE_LABEL,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / "config.json", REWARDER.to_hf("float32"))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reward_model_needs_what_the_plan_says_while_it_scores(folder, dtype):
    cfg = TrainConfig()
    cfg.objective = replace(
        cfg.objective, name="grpo", samples=4, max_new_tokens=256,
        rewards=["exact", {"name": "model", "source": str(folder), "dtype": dtype, "label": "rm"}],
    )  # fmt: skip
    cfg.batch = replace(cfg.batch, seq_len=2048, rows=2)
    [one] = scoring_models(cfg, 4, KnownModels())
    assert (one.title, one.rows, one.model.layout.tokens) == ("rm", 1, 1024)

    model = initialized(getattr(torch, dtype))
    scorer = RewardModel(
        model, TextTokenizer(make_tokenizer(), {}, set(), None), torch.device("cpu")
    )
    with LiveBytes() as measure:
        for parameter in model.parameters():
            measure.add(parameter.detach())
        assert measure.total == one.weights
        scorer.scores_of_tokens([list(range(512))] * 2)
    assert one.weights + one.activations("cpu") == pytest.approx(measure.most, rel=0.03)


def initialized(dtype):
    model = Decoder(REWARDER)
    initialize_weights(model, 0)
    return model.to(dtype).eval().requires_grad_(False)


def test_a_plan_counts_a_reward_model_on_every_rank(folder):
    words = "model=qwen3_0_6b plan.gpu=h100 plan.world_size=8 objective=grpo"
    with_model = f"objective.rewards=[exact,{{name: model, source: {folder}}}]"
    plain = planned(words, "objective.rewards=[exact]")
    more = planned(words, with_model)
    weights = REWARDER.parameters() * 4
    assert not plain.rollouts.scored
    for before, after in zip(plain.memory.moments, more.memory.moments, strict=True):
        added = after.bytes["parameters"] - before.bytes["parameters"]
        assert (before.phase, added) == (after.phase, weights)
    [one] = more.rollouts.scored
    assert one.weights == weights
    assert 0 < one.seconds[0] < one.seconds[1]
    offloaded = planned(words, with_model, "sharding.cpu_offload=true").memory.peak
    assert offloaded.bytes["parameters"] == weights

    on_ranks = planned(words, with_model, "launch.rollout_ranks=2").memory.peak
    assert on_ranks.bytes["parameters"] == plain.memory.peak.bytes["parameters"]

    [as_json] = plan_json(words, with_model)["rollouts"]["reward_models"]
    assert as_json["reward"] == "model"
    assert as_json["weights_gib"] == pytest.approx(weights / 2**30, abs=1e-3)
    elsewhere = "objective.rewards=[{name: model, source: someone/reward}]"
    said = " ".join(plan(words, elsewhere).out.split())
    assert "someone/reward is not on this disk: its memory and time are not counted" in said


def test_a_large_row_of_answers_can_be_the_peak(folder):
    config = replace(REWARDER, intermediate_size=60_000)
    write_json(folder / "config.json", config.to_hf("float32"))
    rewards = f"objective.rewards=[{{name: model, source: {folder}, label: rm}}]"
    words = ["model=tiny", "plan.gpu=h100", "plan.world_size=1", "objective=grpo", rewards]
    peak = planned(*words, "batch.seq_len=512 batch.rows=64").memory.peak
    assert peak.when == "the forward of the reward rm"
