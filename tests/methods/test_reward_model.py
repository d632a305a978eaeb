"""A reward model: pairs teach it, transformers gives its export's scores, and answers are rewarded
by them."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from named_runs import PAIRS
from refused import refusal
from texts import function, make_tokenizer, turn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from world import cli, read_json, read_lines, write_json, write_lines

from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.methods.policy_gradient import short_contexts
from fsdp_trainer.rl.rewards.exact import Exact
from fsdp_trainer.rl.rewards.model import ModelReward
from fsdp_trainer.rl.rewards.reward import Attempt
from fsdp_trainer.rl.rounds.reward_scores import RewardModel, open_reward_model

TOOL = function("weather", description="", parameters={})
SHOWS_TOOLS = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}"""


def test_pairs_teach_a_model_to_tell_good_answers(ledger):
    run = ledger.run("reward")
    assert run["loss"][-1] < run["loss"][0]
    assert run["reward_accuracy"][-1] > 0.9
    assert "log_probability_chosen" not in run.metrics[0]
    last = run.metrics[-1]
    assert last["validation_reward_accuracy"] > 0.9
    assert last["validation_bits_per_byte"] is None


class Writes(RewardModel):
    """A reward model that keeps the texts that it should score."""

    def scores(self, texts):
        self.texts.extend(texts)
        return [0.0] * len(texts)


def test_a_reward_model_reads_the_tools_of_each_row():
    tokenizer = TextTokenizer(make_tokenizer(), {}, set(), SHOWS_TOOLS)
    model = Writes(None, tokenizer, torch.device("cpu"))
    object.__setattr__(model, "texts", [])
    attempts = [Attempt("Rain?", "no", {}, tools=tools) for tools in ([TOOL], None)]
    ModelReward(source="m", scorer=model).score(attempts)
    plain = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    assert model.texts == [f"{json.dumps([TOOL])}\n{plain}", plain]


def test_a_reward_model_with_a_short_context_is_named_at_the_start():
    reads_64 = ModelReward(source="m", label="rm", scorer=SimpleNamespace(longest=64))
    assert short_contexts([reads_64, Exact()], 40, 24) == []
    [line] = short_contexts([reads_64, Exact()], 40, 25)
    assert "the reward rm reads at most 64 tokens" in line
    assert "has 65" in line
    assert "Use  objective.max_new_tokens=24" in line
    [line] = short_contexts([reads_64], 64, 8)
    assert "shorter prompts" in line


TEXTS = ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n", "a", "no 7"]


@pytest.fixture(scope="module")
def exported(ledger, tmp_path_factory):
    """A folder of a reward model whose template shows tools, transformers' model and tokenizer."""
    out = tmp_path_factory.mktemp("reward") / "export"
    cli("export", f"source={ledger.run('reward').folder} out={out}")
    theirs = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = SHOWS_TOOLS
    tokenizer.save_pretrained(out)
    return out, theirs, tokenizer


def score_of(exported, text):
    """The score of a text by transformers' model."""
    _, theirs, tokenizer = exported
    with torch.no_grad():
        return theirs(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()


def test_an_export_scores_as_transformers_does(ledger, exported):
    out, theirs, _ = exported
    assert theirs.config.num_labels == 1
    expected = [score_of(exported, text) for text in TEXTS]
    for source in (out, ledger.run("reward").folder):
        scores = open_reward_model(source).scores(TEXTS)
        assert scores == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert "writes no text" in cli("generate", f"source={out} prompt=Hello", code=2).err


def test_a_reward_model_can_be_trained_on_but_for_no_other_objective(ledger, exported, train):
    start = [*map(ledger.with_places, PAIRS), f"model.init_from={exported[0]}"]
    again = train("again", *start, "objective=reward train.steps=1")
    assert again["loss"][0] < ledger.run("reward")["loss"][0]
    said = train("dpo", *start, "objective=dpo", code=2).err
    assert "objective=reward" in said


def test_answers_get_the_reward_of_transformers_score_on_any_ranks(exported, train, tmp_path):
    """Scores count for a conversation with the row's tools; ranks make answers of their own."""
    source, _, tokenizer = exported
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"{i}+1?", "answer": f"{i + 1}", "tools": [TOOL]} for i in range(9)]
    write_lines(file, rows)
    reward = f"{{name: model, source: {source}, weight: 2, label: rm}}"
    grpo = (
        f"objective=grpo objective.rewards=[{reward}] objective.max_new_tokens=6"
        f" objective.samples=2 batch.rows=2 batch.seq_len=128 data.path={file}"
    )
    run = train("rewarded", grpo, "train.steps=2", ranks=2)
    lines = read_lines(run.folder / "samples.jsonl")
    assert len(lines) >= 2
    for line in lines:
        answer = tokenizer.decode(tokenizer.encode(line["text"]), skip_special_tokens=True)
        question = line["prompt"].removeprefix("user\n").removesuffix("\nassistant\n")
        turns = [turn("user", question), turn("assistant", answer)]
        text = tokenizer.apply_chat_template(turns, tools=[TOOL], tokenize=False)
        assert text.startswith('[{"type": "function"')
        expected = 2 * score_of(exported, text)
        assert line["reward"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert run["reward"] == pytest.approx([2 * x for x in run["reward/rm"]])
    cli("rewards", f"data.path={file} objective.rewards=[{reward}]")

    short = shutil.copytree(source, tmp_path / "short")
    config = read_json(short / "config.json")
    write_json(short / "config.json", config | {"max_position_embeddings": 16})
    shorter = f"objective.rewards=[{reward.replace(str(source), str(short))}]"
    failed = train("fails", grpo, shorter, "train.steps=1", code=1)
    assert "reads at most 16 tokens" in failed.out
    assert "is longer than a reward model or classifier reads: 16" in failed.err


def test_a_language_model_becomes_a_reward_model(ledger):
    run = ledger.run("plain").folder
    assert "is a language model" in refusal(open_reward_model, run / "hf")
    words = [*PAIRS, "objective=reward train.steps=2"]
    first, other = (
        ledger.run(words=[*words, f"model.init_from={source}"]) for source in (run, run / "hf")
    )
    assert first["loss"] == other["loss"], "the same weights, the same new head"
    assert first["loss"][0] == pytest.approx(math.log(2), abs=0.3)
