"""The verb `chain`: from text to a model that answers, in stages that are not done twice."""

import json

import pytest

from fsdp_trainer.chain import verb
from fsdp_trainer.chain.demo import all_facts, write_demo
from fsdp_trainer.cli import main

TWO_STEPS = [
    f"{stage}.{key}"
    for stage in ("pretrain", "mid", "sft")
    for key in ("train.steps=2", "train.validate_every=null", "batch.rows=2", "batch.micro_rows=2")
]


class Ranks:
    """Ranks of the tests' pool in place of processes, and the stages that they were started for."""

    def __init__(self, world):
        self.world = world
        self.stages = []
        self.codes = {}
        """By stage, what a start returns without training."""

    def start(self, cfg, words, verb="train"):
        self.stages.append(cfg.run.name)
        if cfg.run.name in self.codes:
            return self.codes.pop(cfg.run.name)
        self.world.command(verb, *words)
        return 0


@pytest.fixture
def ranks(world, monkeypatch):
    pool = Ranks(world)
    monkeypatch.setattr(verb, "start_ranks", pool.start)
    return pool


@pytest.fixture
def chain(tmp_path, ranks):
    """`chain(*words)`: the exit code, and the stages that trained."""

    def run(*words):
        ranks.stages.clear()
        given = {word.partition("=")[0] for word in words}
        usual = [word for word in TWO_STEPS if word.partition("=")[0] not in given]
        code = main(["chain", "demo=true", f"root={tmp_path}", "name=c", *usual, *words])
        return code, list(ranks.stages)

    return run


def test_no_question_at_the_end_is_asked_in_a_conversation(tmp_path):
    files = write_demo(tmp_path)
    rows = {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name, file in files.items()
    }
    answers = {row["messages"][-1]["content"] for row in rows["questions"]}
    learnt = {
        turn["content"]
        for row in rows["chats"]
        for turn in row["messages"]
        if turn["role"] == "assistant"
    }
    assert answers.isdisjoint(learnt)
    assert len(answers) + len(learnt) == len(all_facts())
    text = " ".join(row["text"] for row in rows["text"])
    assert all(answer in text for answer in answers)


def test_without_data_it_says_what_to_type(tmp_path, capsys):
    assert main(["chain", f"root={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "text=text/" in said
    assert "chats=chats.jsonl" in said
    assert "demo=true" in said


def test_a_demo_takes_no_other_texts(tmp_path, capsys):
    assert main(["chain", "demo=true", f"root={tmp_path}", f"text={tmp_path}"]) == 2
    assert "brings texts of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mistake_in_a_later_stage_is_told_before_the_first_begins(tmp_path, capsys):
    assert main(["chain", "demo=true", f"root={tmp_path}", "sft.optm.lr=3"]) == 2
    assert "sft.optm.lr=3" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_finished_stages_are_not_done_again(chain, ranks, tmp_path, capsys):
    ranks.codes["mid"] = 75  # stopped in order
    assert chain() == (75, ["pretrain", "mid"])
    assert "the same command goes on" in capsys.readouterr().out
    assert chain() == (0, ["mid", "sft"])

    card = (tmp_path / "c" / "card.md").read_text()
    for stage in ("tokenizer", "pretrain", "mid", "sft", "evaluation"):
        assert f"\n| {stage} |" in card
    assert "of 12 questions answered word for word" in card
    assert "After mid:\n\n- What colour is the ant?" in card
    page = (tmp_path / "c" / "card.html").read_text()
    assert "<td>pretrain</td>" in page
    assert chain() == (0, [])

    capsys.readouterr()
    assert chain("sft.optim.lr=0.5") == (2, [])
    assert "optim.lr was 0.001, is 0.5" in capsys.readouterr().err
    # where and how often it looks is no part of what is learnt
    assert chain("sft.train.validate_every=1", "all.launch.nproc_per_node=1") == (0, [])
    assert chain("sft.optim.lr=0.5", "again=sft") == (0, ["sft"])

    questions = tmp_path / "few.jsonl"
    lines = (tmp_path / "c" / "data" / "questions.jsonl").read_text().splitlines()
    questions.write_text("\n".join(lines[:3]))
    assert chain("sft.optim.lr=0.5", f"questions={questions}") == (0, [])
    assert "of 3 questions" in (tmp_path / "c" / "card.md").read_text()
