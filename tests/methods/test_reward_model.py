"""A reward model: pairs teach it, on any ranks, transformers gives its export's scores, and answers
are rewarded by them."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from pairs import write_pairs
from texts import make_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fsdp_trainer.cli import main
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.policy_gradient import short_contexts
from fsdp_trainer.methods.reward_scores import RewardModel, open_reward_model
from fsdp_trainer.rewards.exact import Exact
from fsdp_trainer.rewards.model import ModelReward
from fsdp_trainer.rewards.reward import Attempt


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return [
        f"data.path={write_pairs(folder / 'pairs.jsonl')}",
        f"data.cache={folder / 'cache'}",
        "batch.seq_len=128",
        "schedule=constant",
        "optim.lr=1e-2",
    ]


TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
SHOWS_TOOLS = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}"""
REWARD = ["objective=reward", "tokenizer.path=demo:bytes"]


@pytest.mark.slow
def test_pairs_teach_scores_alike_on_any_ranks(world, keys, tmp_path):
    how = [*keys, *REWARD, "train.steps=4", "objective.center_weight=0.01"]
    how += ["data.validation=0.2", "train.validate_every=4"]
    first, *others = [
        world.train(tmp_path / f"run{number}", *how, *more, ranks=ranks)
        for number, (ranks, more) in enumerate(
            (
                (1, ["batch.micro_rows=6"]),
                (4, ["batch.micro_rows=1", "sharding.context=2"]),
            )
        )
    ]
    assert first.column("loss")[-1] < first.column("loss")[0]
    assert first.column("reward_accuracy")[-1] > 0.9
    assert "log_probability_chosen" not in first.metrics[0]
    for run in others:
        for name in ("loss", "reward_margin", "reward_chosen", "reward_accuracy", "grad_norm"):
            assert run.column(name) == pytest.approx(first.column(name), rel=1e-4, abs=1e-6), name
        last, expected = run.metrics[-1], first.metrics[-1]
        for name in ("validation_loss", "validation_reward_accuracy"):
            assert last[name] == pytest.approx(expected[name], rel=1e-4), name
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


@pytest.mark.slow
@pytest.mark.further
def test_an_export_scores_as_transformers_does_and_can_be_trained_on(world, keys, tmp_path, capsys):
    how = [*keys, *REWARD, "checkpoint.every=2", "checkpoint.keep=9"]
    whole = world.train(tmp_path / "whole", *how, "train.steps=4")
    world.train(tmp_path / "run", *how, "train.steps=2")
    run = world.train(tmp_path / "run", *how, "train.steps=4")
    assert run.column("loss") == whole.column("loss"), "a resume goes on as if it had not stopped"

    out = tmp_path / "export"
    assert main(["export", f"source={run.folder}", f"out={out}"]) == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    assert theirs.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        expected = [
            theirs(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in TEXTS
        ]
    for source in (out, run.folder):
        scores = open_reward_model(source).scores(TEXTS)
        assert scores == pytest.approx(expected, rel=1e-5, abs=1e-6)
    tokenizer.chat_template = SHOWS_TOOLS
    tokenizer.save_pretrained(out)
    check_rewards_of_answers(world, theirs, tokenizer, out, tmp_path)

    assert main(["generate", f"source={out}", "prompt=Hello"]) == 2
    assert "writes no text" in capsys.readouterr().err
    start = [*keys, f"model.init_from={out}", "objective=reward", "train.steps=1"]
    again = world.train(tmp_path / "again", *start)
    assert again.column("loss")[0] < whole.column("loss")[0]
    refused = [*keys, f"model.init_from={out}", "objective=dpo", "train.steps=1"]
    said = world.train(tmp_path / "dpo", *refused, code=2).err
    assert "objective=reward" in said


def check_rewards_of_answers(world, theirs, tokenizer, source, tmp_path):
    """Check that 2 ranks, which make answers of their own, give each the reward of transformers'
    score, for a conversation with the row's tools."""
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"{i}+1?", "answer": f"{i + 1}", "tools": [TOOL]} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = f"{{name: model, source: {source}, weight: 2, label: rm}}"
    grpo = [
        *["objective=grpo", f"objective.rewards=[{reward}]", "objective.max_new_tokens=6"],
        *["tokenizer.path=demo:bytes", "objective.samples=2", "batch.rows=2", "batch.seq_len=128"],
        *[f"data.path={file}", f"data.cache={tmp_path / 'cache'}"],
    ]
    run = world.train(tmp_path / "rewarded", *grpo, "train.steps=2", ranks=2)
    lines = [json.loads(one) for one in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert len(lines) >= 2
    for line in lines:
        answer = tokenizer.decode(tokenizer.encode(line["text"]), skip_special_tokens=True)
        question = line["prompt"].removeprefix("user\n").removesuffix("\nassistant\n")
        turns = [("user", question), ("assistant", answer)]
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            tools=[TOOL],
            tokenize=False,
        )
        assert text.startswith('[{"type": "function"')
        with torch.no_grad():
            score = theirs(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()
        assert line["reward"] == pytest.approx(2 * score, rel=1e-5, abs=1e-6)
    assert run.column("reward") == pytest.approx([2 * x for x in run.column("reward/rm")])
    assert main(["rewards", f"data.path={file}", f"objective.rewards=[{reward}]"]) == 0

    short = shutil.copytree(source, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    grpo[1] = f"objective.rewards=[{reward.replace(str(source), str(short))}]"
    failed = world.train(tmp_path / "fails", *grpo, "train.steps=1", code=1)
    assert "reads at most 16 tokens" in failed.out
    assert "is longer than a reward model reads: 16" in failed.err


@pytest.mark.slow
def test_a_language_model_becomes_a_reward_model(world, keys, tmp_path):
    lm = world.train(
        tmp_path / "lm", *keys, "tokenizer.path=demo:bytes", "objective=simpo", "train.steps=1"
    )
    out = tmp_path / "export"
    assert main(["export", f"source={lm.folder}", f"out={out}"]) == 0
    with pytest.raises(UserError, match="is a language model"):
        open_reward_model(out)
    runs = [
        world.train(
            tmp_path / f"from{number}",
            *keys,
            "objective=reward",
            f"model.init_from={source}",
            "train.steps=2",
        )
        for number, source in enumerate((lm.folder, out))
    ]
    assert runs[0].column("loss") == runs[1].column("loss"), "the same weights, the same new head"
    assert runs[0].column("loss")[0] == pytest.approx(math.log(2), abs=0.3)


REFUSED = {
    "sharding.tensor=2": "sharding.tensor=1",
    "adapter=lora": "adapter=none",
    "train.sample_prompts=[Hello]": "writes no text",
    "objective.beta=1": "objective=dpo",
}


def test_what_a_reward_model_cannot_do_is_refused_before_anything_starts(capsys):
    assert main(["data.path=demo:backwards", *REWARD, *REFUSED]) == 2
    said = capsys.readouterr().err
    for named in REFUSED.values():
        assert named in said
