"""Rollouts over several turns: what is learnt of them, on any ranks, and what may go wrong."""

import math

import pytest
from named_runs import GRPO
from rollouts import with_environment
from stored import assert_near
from world import read_lines

KEYS = [
    *GRPO,
    "objective.rewards=[] objective.max_new_tokens=24 objective.turns=4",
    "batch.rows=4 batch.micro_rows=2 batch.seq_len=160",
    "model.initializer_range=0.5 objective.samples=2 train.steps=2",
]
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
FIGURES = ["loss", "reward", "reward/Echo", "answer_tokens", "turns", "entropy", "grad_norm"]


@pytest.mark.parametrize("reward", [WHOLE, TURNS], ids=["whole", "turns"])
def test_any_ranks_play_the_same_rollouts_and_learn_the_same(train, tmp_path, reward):
    words = [*KEYS, *with_environment(tmp_path, ECHO % reward, "Echo")]
    layout = [] if reward == WHOLE else ["sharding.context=2"]
    first, other = train("first", *words), train("other", *words, *layout, ranks=2)
    # tokens are trained on as they were sampled: their probabilities are the same
    assert first.metrics[0]["sampler_difference"] < 1e-5
    assert max(first["turns_max"]) > 1
    assert min(first["grad_norm"]) > 0
    samples = read_lines(first.folder / "samples.jsonl")
    assert any("again 1" in line["text"] for line in samples)
    for line in samples:
        turns = line["turns"]
        assert "".join(turn["text"] for turn in turns) == line["text"]
        assert [turn["own"] for turn in turns] == [i % 2 == 0 for i in range(len(turns))]
        rewarded = ["reward" in turn for turn in turns]
        assert rewarded == [turn["own"] and reward == TURNS for turn in turns]
    assert_near(other, first, *FIGURES, rel=5e-4, abs=5e-6)


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


def test_a_run_learns_from_programs_that_ask_the_model(train, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    words = [*KEYS, f'objective.environment={{name: endpoint, run: "{file}:rollout"}}']
    run = train("run", *words, "objective.ahead=1 launch.rollout_ranks=1", ranks=2)
    assert max(run["turns_max"]) == 2
    assert max(run["grad_norm"]) > 0
    assert not run.event("environment_failed")


FAULTY = """
import time
class Faulty:
    def reset(self, row):
        text = row["messages"][0]["content"]
        self.kind = sum(map(ord, text)) % 4
        if self.kind == 0:
            raise ValueError("no such task")
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        return [{"role": "user", "content": text * (100 if self.kind == 1 else 1)}], tools
    def step(self, messages):
        content = {"a": object()} if len(messages[-1]["content"]) % 2 else "y" * 500
        if self.kind == 2 and content == "y" * 500:
            time.sleep(600)
        return [{"role": "user", "content": content}], False
    def reward(self, messages):
        return float(len(messages[1]["content"]))
"""


def test_a_failed_rollout_ends_alone_and_is_counted_with_its_reason(train, tmp_path):
    words = [*KEYS, *with_environment(tmp_path, FAULTY, "Faulty"), "objective.samples=4"]
    words += ["objective.environment_seconds=4 objective.max_new_tokens=64"]
    run = train("run", *words, "batch.seq_len=192")
    assert all(0 < share < 1 for share in run["environment_failures"])
    reasons = " ".join(str(event["reasons"]) for event in run.event("environment_failed"))
    for part in ("reset: ValueError: no such task", "leaves no room", "cannot show turns", "4 s"):
        assert part in reasons
    assert len(run.event("tools_not_shown")) == 1, "the template shows no tools"
    assert all(math.isfinite(loss) for loss in run["loss"])
    assert set(run["turns_max"]) == {1}, "a reply without room ends a rollout"
    assert set(run["truncated_share"]) == {1}


BAD = """
class Bad:
    def reset(self, row):
        return row["messages"], None
    def step(self, messages):
        return [], True
    def reward(self, messages):
        return %s
"""


@pytest.mark.parametrize(
    "reward, reason",
    [("'1'", "returned '1', not a finite number"), ("[1.0, 2.0, 3.0]", "3 numbers for 1 turn")],
)
def test_a_run_whose_rollouts_all_fail_ends_with_the_reason(train, tmp_path, reward, reason):
    words = [*KEYS, *with_environment(tmp_path, BAD % reward, "Bad")]
    said = train("run", *words, code=1).err
    assert "rollouts failed, the first with" in said
    assert reason in said
