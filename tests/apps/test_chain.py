"""The verb `chain`: from text to a model that answers, in stages that are not done twice."""

import json
import re
from functools import partial
from itertools import pairwise

import inject
import pytest
import yaml
from texts import turn
from world import read_json, read_lines

import fsdp_trainer.apps.tokenizers.verb
from fsdp_trainer.apps.chain import evaluation, verb
from fsdp_trainer.apps.chain.card import Card, StageResult
from fsdp_trainer.apps.chain.demo_texts import all_facts, write_demo
from fsdp_trainer.cli import main

TRAININGS = ("pretrain", "mid", "sft")
TWO_STEPS = [
    f"{stage}.{key}"
    for stage in TRAININGS
    for key in ("train.steps=2", "train.validate_every=null", "batch.rows=2", "batch.micro_rows=2")
]
TASK = """task: animals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
output_type: multiple_choice
doc_to_text: 'The bear eats'
doc_to_choice: ['cheese', 'grass']
doc_to_target: 0
metric_list:
  - metric: acc
"""
TIMES = re.compile(r"\| [^|]* \| [^|]* \|$", re.MULTILINE)
"""The last two columns of the card's first table."""


@pytest.fixture(scope="module")
def chain(world):
    """`chain(root, *words)`: the exit code, and the stages for which ranks were started.

    They are the tests' pool, in place of processes. chain.faults: what stops a stage's next start.
    """
    stages = []

    def start(cfg, words, verb="train"):
        stage = cfg.run.name if verb == "train" else verb
        stages.append(stage)
        seam = run.faults.pop(stage, None)
        code = 75 if seam else 0
        world.command(verb, *words, seam=seam, code=code)
        return code

    def run(root, *words):
        stages.clear()
        given = {word.partition("=")[0] for word in words}
        usual = [word for word in TWO_STEPS if word.partition("=")[0] not in given]
        code = main(["chain", "demo=true", f"root={root}", "name=c", *usual, *words])
        return code, list(stages)

    run.faults = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "write_demo", partial(write_demo, fraction=0.1))
        for module in (verb, evaluation):
            patch.setattr(module, "start_ranks", start)
        yield run


@pytest.fixture(scope="module")
def done(chain, tmp_path_factory):
    """The root of a chain that was done without a stop, and its card."""
    root = tmp_path_factory.mktemp("done")
    assert chain(root) == (0, list(TRAININGS))
    return root, card_of(root)


def card_of(root):
    return (root / "c/card.md").read_text()


def test_no_question_at_the_end_is_asked_in_a_conversation(tmp_path):
    rows = {name: read_lines(file) for name, file in write_demo(tmp_path).items()}
    answers = {row["messages"][-1]["content"] for row in rows["questions"]}
    turns = [turn for row in rows["chats"] for turn in row["messages"]]
    learnt = {turn["content"] for turn in turns if turn["role"] == "assistant"}
    assert answers.isdisjoint(learnt)
    assert len(answers) + len(learnt) == len(all_facts())
    text = " ".join(row["text"] for row in rows["text"])
    assert all(answer in text for answer in answers)


def test_the_cost_of_a_stage_is_its_hours_on_all_gpus_of_the_chain():
    results = [StageResult("tokenizer", 900), StageResult("pretrain", 7200, gpus=8)]
    costs = [row[-1] for row in Card("c", results, [], price=3).rows]
    assert costs == ["$6.00", "$48.00", "$54.00"]
    assert {row[-1] for row in Card("c", results[:1], [], price=3).rows} == {""}


def test_the_card_has_all_stages_questions_and_samples_on_one_page(done):
    root, card = done
    for stage in ("tokenizer", *TRAININGS, "evaluation"):
        assert f"\n| {stage} |" in card
    assert "of 12 questions answered word for word" in card
    assert "After mid:\n\n- What colour is the ant?" in card
    assert "<td>pretrain</td>" in (root / "c/card.html").read_text()
    for before, stage in pairwise(TRAININGS):
        config = yaml.safe_load((root / "c" / stage / "config.yaml").read_text())
        assert config["model"]["init_from"] == str(root / "c" / before)


def test_stopped_in_any_stage_the_same_command_ends_with_the_same_card(
    chain, done, tmp_path, monkeypatch, capsys
):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fsdp_trainer.apps.tokenizers.verb, "tokenizer", interrupted)
        assert chain(tmp_path) == (130, [])
    for number, stage in enumerate(TRAININGS):
        chain.faults[stage] = inject.signalled("clip", rank=0, nth=1)
        assert chain(tmp_path) == (75, list(TRAININGS[max(0, number - 1) : number + 1]))
        assert f"{stage}: ended with code 75; the same command resumes" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "answer_questions", interrupted)
        assert chain(tmp_path) == (130, ["sft"])
    assert chain(tmp_path) == (0, [])
    assert TIMES.sub("", card_of(tmp_path)) == TIMES.sub("", done[1])


def test_finished_stages_are_not_done_again_and_other_settings_of_one_are_refused(
    chain, done, tmp_path, capsys
):
    root = done[0]
    assert chain(root) == (0, [])
    # where and how often it looks is no part of what is learnt
    assert chain(root, "sft.train.validate_every=1", "all.launch.nproc_per_node=1") == (0, [])

    recipe = tmp_path / "recipe/mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text("# @package _global_\ndefaults: [chain_sft]\noptim: {eps: 0.25}\n")
    capsys.readouterr()
    for words, said in {
        "sft.optim.lr=0.5": "optim.lr was 0.001, is 0.5",
        f"--config-dir {tmp_path} sft.+recipe=mine": "optim.eps was 1e-8, is 0.25",
    }.items():
        assert chain(root, *words.split()) == (2, [])
        assert said in capsys.readouterr().err
    assert chain(root, "again=sft") == (0, ["sft"])


def test_other_questions_are_asked_and_right_answers_counted(chain, done, tmp_path):
    root = done[0]
    questions = read_json(root / "c/evaluation/questions.json")
    lines = []
    for row, wanted in zip(questions[:3], ("answer", "answer", "wanted"), strict=True):
        messages = [turn("user", row["question"]), turn("assistant", row[wanted] or "nothing")]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    assert chain(root, f"questions={tmp_path}/few.jsonl") == (0, [])
    right = [bool(row["answer"]) for row in questions[:2]].count(True)
    assert f"{right} of 3 questions" in card_of(root)


def test_tasks_in_files_are_evaluated_for_the_model_of_each_stage(chain, done, tmp_path):
    pytest.importorskip("lm_eval")
    items, task = tmp_path / "items.jsonl", tmp_path / "animals.yaml"
    items.write_text('{"number": 1}\n' * 4)
    (tmp_path / "own.py").write_text("def f(rows):\n    return rows\n")
    task.write_text(f"{TASK.format(items=items)}process_docs: !function own.f\n")
    words = [f"tasks=[{task}]", f"code=[{tmp_path}/own.py]", "limit=2"]
    assert chain(done[0], *words)[1][-3:] == ["evaluate"] * 3
    assert "| task | pretrain | mid | sft |" in card_of(done[0])
    assert re.search(r"\| animals acc \| [01]\.\d+ \| [01]\.\d+ \| [01]\.\d+ \|", card_of(done[0]))


def test_a_question_may_hold_any_character(tmp_path):
    """JSON need not escape U+2028, which ends a line for Python."""
    file = tmp_path / "questions.jsonl"
    messages = [turn("user", "Which\u2028animal\x85?"), turn("assistant", "a bear")]
    file.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    assert evaluation.read_questions(file) == [messages]
