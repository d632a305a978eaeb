"""Rollouts over several turns: what is learnt of them, on any ranks, and what may go wrong."""

import json
import math

import numpy as np
import pytest
import torch
from recipe import planned
from world import read_lines

from fsdp_trainer.apps.quickstart import quickstart_rl, quickstart_tools
from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.methods.answers import ADVANTAGE, SAMPLED, PackedAnswers, turn_advantages
from fsdp_trainer.methods.policy_gradient import RolloutForwardBackward
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.rollouts.rollout import EpisodeFacts, Rollout, decode_rollouts, encode_rollouts
from fsdp_trainer.rollouts.sampler import SampledAnswer
from fsdp_trainer.training.batches import Assembler

ECHO = """
class Echo:
    def reset(self, row):
        return row["messages"], None
    async def step(self, messages):
        count = sum(turn["role"] == "assistant" for turn in messages)
        return [{"role": "user", "content": f"again {count}"}], count >= 3
    def reward(self, messages):
        own = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        return %s
"""
WHOLE = 'float(sum(each in "abcdefghijklm" for text in own for each in text))'
TURNS = '[float(sum(each in "abcdefghijklm" for each in text)) for text in own]'
GRPO = [
    "objective=grpo", "objective.max_new_tokens=24", "objective.samples=4", "objective.turns=4",
    "data.path=demo:sums", "tokenizer.path=demo:bytes", "batch.rows=4", "batch.micro_rows=2",
    "batch.seq_len=160", "train.steps=3", "schedule=constant", "model.initializer_range=0.5",
]  # fmt: skip
FIGURES = ["loss", "reward", "reward/Echo", "answer_tokens", "turns", "entropy", "grad_norm"]


def own(folder, source, name="Echo"):
    """Return the override for an environment in a file."""
    file = folder / f"{name.lower()}.py"
    file.write_text(source)
    return f"objective.environment={file}:{name}"


def rollout(row, sample, prompt, turns, reward, by_turn=(), seed=0):
    """Return a rollout with random tokens. turns: lengths, the model's and the environment's."""
    generator = np.random.default_rng(seed + 10 * row + sample)
    tokens = generator.integers(0, 200, sum(turns)).tolist()
    own = np.concatenate([np.full(n, i % 2 == 0) for i, n in enumerate(turns)])
    chosen = np.where(own, -generator.random(len(own)), 0).astype(np.float32)
    answer = SampledAnswer(tokens, chosen.tolist(), True, 3, tuple(turns))
    facts = EpisodeFacts(sample, 0.5, "step: lost" if math.isnan(reward) else None)
    return Rollout(row, sample, [row + 1] * prompt, answer, reward, [reward], by_turn, facts)


ROLLOUTS = [
    rollout(4, 0, 3, [5, 2, 4], 1.0),
    rollout(4, 1, 3, [2], 0.0),
    rollout(5, 0, 6, [3, 4, 2, 1, 2], 0.5),
    rollout(5, 1, 6, [9, 2, 1], math.nan),
    rollout(5, 2, 6, [4], 0.0),
]


def test_rollouts_survive_a_checkpoint():
    again, _ = decode_rollouts(encode_rollouts(ROLLOUTS))
    assert [r.answer for r in again] == [r.answer for r in ROLLOUTS]
    assert [r.episode for r in again] == [r.episode for r in ROLLOUTS]
    assert [r.turn_rewards for r in again] == [() for _ in ROLLOUTS]
    assert [r.is_used for r in again] == [True, True, True, False, True]


def test_rewards_of_turns_are_normalised_in_the_group_and_discounted():
    cfg = ObjectiveChoice(name="grpo", samples=3, discount=0.5)
    group = [
        rollout(1, 0, 3, [2, 1, 2, 1, 2], 6.0, (1.0, 2.0, 3.0)),
        rollout(1, 1, 3, [2, 1, 2], 4.0, (0.0, 4.0)),
        rollout(1, 2, 3, [2], math.nan),
    ]
    every = np.array([1.0, 2.0, 3.0, 0.0, 4.0])
    n = (every - every.mean()) / (every.std(ddof=1) + 1e-4)
    first, second, failed = turn_advantages(cfg, group)
    assert first == pytest.approx([n[0] + 0.5 * (n[1] + 0.5 * n[2]), n[1] + 0.5 * n[2], n[2]])
    assert second == pytest.approx([n[3] + 0.5 * n[4], n[4]])
    assert failed.tolist() == [0]


def test_one_reward_counts_for_all_turns_and_a_failed_rollout_for_none():
    cfg = ObjectiveChoice(name="grpo", samples=3)
    group = [rollout(1, i, 3, [2, 1, 2], r) for i, r in enumerate((1.0, math.nan, 3.0))]
    first, failed, last = turn_advantages(cfg, group)
    assert first == pytest.approx([-(0.5**0.5)] * 2, rel=1e-3)
    assert last == pytest.approx([0.5**0.5] * 2, rel=1e-3)
    assert failed.tolist() == [0, 0]
    alone = [rollout(1, i, 3, [2], r) for i, r in enumerate((1.0, math.nan, math.nan))]
    assert [gain.tolist() for gain in turn_advantages(cfg, alone)] == [[0]] * 3


@pytest.mark.parametrize("weighting", ["dapo", "grpo"])
def test_every_gradient_is_that_of_the_models_own_tokens_in_float64(weighting):
    cfg = ObjectiveChoice(
        name="grpo", samples=1, max_new_tokens=16, weighting=weighting, updates=2, clip_high=0.3
    )
    answers = PackedAnswers(cfg, 40, ROLLOUTS, np.square, lambda row: [f"f:{row}"])
    gains = {0: [0.7, -0.2], 1: [0.4], 2: [-1.0, 0.3, 0.1], 4: [0.9]}
    answers.advantages = [np.array(gains.get(i, [0.0, 0.0])) for i in range(len(ROLLOUTS))]
    sizes = {
        "vocab_size": 200, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3,
    }  # fmt: skip
    model, exact = (Decoder(ModelConfig(**sizes)) for _ in range(2))
    for each in (model, exact):
        initialize_weights(each, 1)
    batch = Assembler(40, 1, len(answers), 0, 1, torch.device("cpu")).assemble(
        answers.read_rows(range(len(answers)))
    )
    step = RolloutForwardBackward(model, *[None] * 6, choice=cfg)
    result = step.compute(answers.plan(1, 0, 2, {}), batch)

    exact = exact.double()
    total, own_tokens = torch.zeros((), dtype=torch.float64), 0
    used = [(i, one) for i, one in enumerate(ROLLOUTS) if one.is_used]
    for i, one in used:
        tokens = torch.tensor([*one.prompt, *one.answer.tokens])
        scores = exact.logits(tokens[None])[0].double().log_softmax(-1)
        start, losses = len(one.prompt), []
        for turn, length in enumerate(one.answer.turns):
            places = torch.arange(start, start + length)
            start += length
            if turn % 2:
                continue
            chosen = scores[places - 1].gather(1, tokens[places, None])[:, 0]
            sampled = torch.tensor(one.answer.log_probabilities, dtype=torch.float64)
            ratio = (chosen - sampled[places - len(one.prompt)]).exp()
            gain, capped = gains[i][turn // 2], ratio.clamp(max=cfg.importance_cap)
            losses.append(-torch.min(capped * gain, ratio.clamp(0.8, 1.3) * gain))
        loss = torch.cat(losses)
        own_tokens += len(loss)
        total = total + (loss.sum() if weighting == "dapo" else loss.mean())
    total = total / (own_tokens if weighting == "dapo" else len(used))
    total.backward()
    assert result.loss.item() == pytest.approx(total.item(), rel=1e-5)
    wanted = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error < 2e-5, name
    columns = answers.read_rows(range(len(answers))).columns
    assert set(columns) == {ADVANTAGE, SAMPLED}


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("reward", [WHOLE, TURNS], ids=["whole", "turns"])
@pytest.mark.further
def test_any_ranks_play_the_same_rollouts_and_learn_the_same(world, tmp_path, reward):
    words = [*GRPO, own(tmp_path, ECHO % reward), f"data.cache={tmp_path / 'c'}"]
    layouts = [(1, []), (2, []), (2, ["sharding.tensor=2"]), (2, ["sharding.context=2"])]
    first, *others = [
        world.train(tmp_path / f"{i}", *words, *more, ranks=ranks)
        for i, (ranks, more) in enumerate(layouts)
    ]
    # tokens are trained on as they were sampled: their probabilities are the same
    assert first.metrics[0]["sampler_difference"] < 1e-5
    assert max(first.column("turns_max")) > 1
    assert min(first.column("grad_norm")) > 0
    samples = read_lines(first.folder / "samples.jsonl")
    assert any("again 1" in line["text"] for line in samples)
    for line in samples:
        assert "".join(turn["text"] for turn in line["turns"]) == line["text"]
        assert [turn["own"] for turn in line["turns"]] == [
            i % 2 == 0 for i in range(len(line["turns"]))
        ]
        assert all(
            ("reward" in turn) == (turn["own"] and reward == TURNS) for turn in line["turns"]
        )
    for run in others:
        for name in FIGURES:
            assert run.column(name) == pytest.approx(first.column(name), rel=5e-4, abs=5e-6), name


@pytest.mark.slow
@pytest.mark.further
def test_a_run_goes_on_amid_rollouts_that_were_made_together(world, tmp_path):
    words = [*GRPO, own(tmp_path, ECHO % TURNS), f"data.cache={tmp_path / 'c'}"]
    words += ["objective.updates=2", "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9"]
    whole = world.train(tmp_path / "whole", *words)
    middle = whole.folder / "checkpoints" / "step-00000003"
    rest = world.train(tmp_path / "rest", *words, f"checkpoint.resume={middle}")
    for name in (*FIGURES, "staleness", "wrong_calls", "turns_max"):
        assert rest.column(name) == whole.column(name)[3:], name


PROGRAM = """
import openai

def rollout(address, row):
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    messages, score = [*row["messages"]], 0.0
    for i in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages)
        is_last = answer.choices[0].finish_reason == "length"
        text = answer.choices[0].message.content
        score += sum(each in "abcdefghijklm" for each in text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        if is_last:
            break
    return score
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["objective.ahead=1", "launch.rollout_ranks=1"]])
@pytest.mark.further
def test_a_run_learns_from_programs_that_ask_the_model(world, tmp_path, more):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    words = [*GRPO, f'objective.environment={{name: endpoint, run: "{file}:rollout"}}', *more]
    run = world.train(tmp_path / "run", *words, f"data.cache={tmp_path / 'c'}", ranks=2)
    assert max(run.column("turns_max")) == 2
    assert max(run.column("grad_norm")) > 0
    assert not run.event("environment_failed")


FAULTY = """
import time
class Faulty:
    number_made = 0
    def reset(self, row):
        Faulty.number_made += 1
        self.number = Faulty.number_made
        if self.number %% 4 == 0:
            raise ValueError("no such task")
        return row["messages"], None
    def step(self, messages):
        if self.number %% 4 == 1:
            time.sleep(600)
        return [], True
    def reward(self, messages):
        return 1.0 if self.number %% 4 == 2 else %s
"""


@pytest.mark.slow
def test_a_failed_rollout_ends_alone_and_is_counted_with_its_reason(world, tmp_path):
    words = [*GRPO, own(tmp_path, FAULTY % "0.0", "Faulty"), "objective.environment_seconds=4"]
    run = world.train(tmp_path / "run", *words, "train.steps=2", f"data.cache={tmp_path / 'c'}")
    assert all(0.2 <= share <= 0.6 for share in run.column("environment_failures"))
    reasons = {reason for event in run.event("environment_failed") for reason in event["reasons"]}
    assert "reset: ValueError: no such task" in reasons
    assert all(math.isfinite(loss) for loss in run.column("loss"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "reason"),
    [("None", "returned None, not a number"), ("[1.0, 2.0, 3.0]", "3 numbers for 1 turns")],
)
def test_a_run_whose_rollouts_all_fail_ends_with_the_reason(world, tmp_path, reward, reason):
    source = (
        (FAULTY % reward)
        .replace("self.number % 4 == 2", "False")
        .replace("self.number % 4 in (0, 1)", "False")
        .replace("% 4 == 0", "< 0")
        .replace("% 4 == 1", "< 0")
    )
    words = [*GRPO, own(tmp_path, source, "Faulty"), f"data.cache={tmp_path / 'c'}"]
    run = world.train(tmp_path / "run", *words, code=1)
    assert "rollouts failed, the first with" in run.err
    assert reason in run.err


ODD = """
class Odd:
    def reset(self, row):
        return row["messages"], None
    def step(self, messages):
        odd = len(messages[-1]["content"]) % 2
        return [{"role": "user", "content": {"a": object()} if odd else "go on"}], False
    def reward(self, messages):
        return float(len(messages[-1]["content"]))
"""


@pytest.mark.slow
def test_turns_that_cannot_be_rendered_fail_their_rollout_alone(world, tmp_path):
    words = [*GRPO, own(tmp_path, ODD, "Odd")]
    run = world.train(tmp_path / "run", *words, "train.steps=2", f"data.cache={tmp_path / 'c'}")
    assert 0 < max(run.column("environment_failures")) < 1
    [event, *_] = run.event("environment_failed")
    assert event["reasons"]


LONG = """
class Long:
    def reset(self, row):
        text = row["messages"][0]["content"]
        return [{"role": "user", "content": text * (1 if int(text[0]) % 3 else 100)}], None
    def step(self, messages):
        return [{"role": "user", "content": "y" * 500}], False
    def reward(self, messages):
        return float(len(messages[1]["content"]))
"""


@pytest.mark.slow
def test_a_prompt_without_room_fails_and_a_reply_without_room_ends_a_rollout(world, tmp_path):
    words = [*GRPO, own(tmp_path, LONG, "Long"), f"data.cache={tmp_path / 'c'}"]
    run = world.train(tmp_path / "run", *words, "train.steps=4")
    reasons = {reason for event in run.event("environment_failed") for reason in event["reasons"]}
    assert all("leaves no room" in reason for reason in reasons)
    assert 0 < max(run.column("environment_failures")) < 1
    assert set(run.column("turns_max")) == {1}
    assert set(run.column("truncated_share")) == {1}


REFUSED = {
    "objective.turns=3": "objective.environment=NAME",
    "objective.environment=calculater": "Did you mean  calculator",
    "objective.environment=gone.py:Name": "gone.py is no file",
    "objective.environment=calculator": "gives no rewards",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_played_is_refused_by_name(world, tmp_path, typed):
    words = ["objective=grpo", "data.path=demo:sums", "tokenizer.path=demo:bytes"]
    words += ["batch.seq_len=512"]
    words += ["objective.rewards=[exact]"] if typed == "objective.turns=3" else []
    run = world.train(tmp_path / "run", *words, typed, code=2)
    assert REFUSED[typed] in run.err


@pytest.mark.slow
def test_a_plan_counts_every_turn():
    keys = ["model=qwen3_0_6b", "model.vocab_size=151936", "objective=grpo", "plan.world_size=8"]
    keys += ["objective.rewards=[exact]", "objective.max_new_tokens=256", "plan.gpu=h100"]
    keys += ["batch.seq_len=2048", "tokenizer.path=demo:bytes"]
    one = planned(*keys).rollouts
    four = planned(*keys, "objective.environment=calculator", "objective.turns=4").rollouts
    assert four.seconds[1] == pytest.approx(4 * one.seconds[1])
    assert four.cache == pytest.approx(one.cache * (256 + 4 * 256) / 512)


@pytest.mark.slow
@pytest.mark.further
def test_the_quickstart_of_tools_trains_twice_and_asks_the_exported_model(
    world, tmp_path, monkeypatch, capsys
):
    def start_ranks(_cfg, words):
        return world.command("train", *words)[0].code

    monkeypatch.setattr(quickstart_rl, "start_ranks", start_ranks)
    monkeypatch.setattr(quickstart_tools, "ROWS", 60)
    assert main(["quickstart", "task=tools", "steps=2", "questions=4", f"root={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "before rewards: 0 of 4 held-out sums right" in said
    assert "asked of the exported folder" in said
    rows = read_lines(tmp_path / "tools-data" / "chats.jsonl")
    calls = [json.dumps(turn) for row in rows for turn in row["messages"] if "tool_calls" in turn]
    assert calls
