"""Rollouts with an environment as tasks of an evaluation."""

import pytest
from named_runs import GRPO
from tables import rows
from world import write_lines

from fsdp_trainer.evaluation.environment_tasks import EnvironmentTask

COUNTS = """
class Counts:
    def reset(self, row):
        if row["answer"] == "3":
            raise ValueError("no such task")
        return row["messages"], None
    def step(self, messages):
        own = [turn for turn in messages if turn["role"] == "assistant"]
        return [{"role": "user", "content": "more"}], len(own) >= 2
    def reward(self, messages):
        own = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        return float(sum(each.isalpha() for text in own for each in text))
"""


@pytest.fixture
def task(tmp_path):
    """A task whose environment counts letters in two turns."""
    lines = [{"question": f"{i}+1?", "answer": f"{i + 1}"} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    write_lines(data, lines)
    (tmp_path / "counts.py").write_text(COUNTS)
    file = tmp_path / "letters.yaml"
    file.write_text(
        f"environment: {tmp_path / 'counts.py'}:Counts\ndata: rows.jsonl\nmax_new_tokens: 12\n"
    )
    return file


def test_a_task_has_the_same_number_in_training_and_after_it_on_any_ranks(
    evaluate, train, tmp_path, task
):
    keys = [*GRPO, "model.initializer_range=0.5 model.max_position_embeddings=256"]
    code = f"code=[{tmp_path / 'counts.py'}]"
    during = [f"evaluation.tasks=[{task}]", f"evaluation.{code}", "train.evaluate_every=2"]
    run = train("run", *keys, *during, ranks=2)
    during = run.metrics[-1]["tasks"]
    assert run.metrics[1]["tasks"]["letters/reward"] != during["letters/reward"]
    for source in (run.folder, run.folder / "hf"):
        metrics = evaluate(source, [task], code)["letters"]
        assert metrics["failed"] == pytest.approx(1 / 6)
        assert 1 <= metrics["turns"] <= 2
        assert metrics["reward"] > 0
        assert metrics["reward_stderr"] > 0
        for name, value in during.items():
            assert metrics[name.removeprefix("letters/")] == pytest.approx(value), name

    plain = tmp_path / "plain.yaml"
    plain.write_text(
        f"environment: null\ndata: {tmp_path / 'rows.jsonl'}\nmax_new_tokens: 8\nsamples: 3\n"
        "temperature: 1.0\nrewards: [{name: regex, pattern: '[a-z]'}]\n"
    )
    words = run.folder, [task, plain], "limit=5", code
    alone = evaluate(*words)
    assert 0 < alone["plain"]["reward"] < 1
    assert set(alone) == {"letters", "plain"}
    for more in ([], ["sharded=true"]):
        for name, metrics in evaluate(*words, *more, ranks=2).items():
            assert metrics == pytest.approx(alone[name]), (name, more)


@pytest.mark.parametrize(
    "text, named",
    rows("""
environment: calculator⏎rewards: [exact] → has no data
environment: calculater⏎data: rows.jsonl → Did you mean  calculator
environment: calculator⏎data: rows.jsonl⏎turn: 3 → Did you mean  turns
environment: calculator⏎data: rows.jsonl⏎rewards: [exakt] → exact
environment: calculator⏎data: {data} → Add  rewards: [exact]
environment: calculator⏎data: nowhere.jsonl⏎rewards: [exact] → nowhere.jsonl
environment: {code}:Counts⏎data: {data} → a file cannot name code
"""),
)
def test_a_task_that_cannot_be_run_is_refused_by_name(evaluate, ledger, tmp_path, text, named):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    file = tmp_path / "task.yaml"
    (tmp_path / "own.py").write_text(COUNTS)
    text = text.replace("⏎", "\n").replace("{data}", str(tmp_path / "rows.jsonl"))
    file.write_text(text.replace("{code}", str(tmp_path / "own.py")))
    assert named in evaluate(ledger.run("plain").folder, [file], code=2)


def test_data_of_a_task_lie_beside_its_file(tmp_path):
    (tmp_path / "alpaca").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "sums.yaml").write_text(
        "environment: calculator\ndata: [rows.jsonl, {path: rows.jsonl, format: alpaca}, far.jsonl]"
    )
    file = f"{tmp_path}/rows.jsonl"
    task = EnvironmentTask.read(f"{tmp_path}/sums.yaml")
    assert task.data == [file, {"path": file, "format": "alpaca"}, "far.jsonl"]
