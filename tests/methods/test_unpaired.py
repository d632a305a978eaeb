"""Good and bad answers: KTO's formula, a baseline from mismatched answers, labels and pairs as its
data."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from named_runs import LORA, PAIRS, RUNS
from pairs import write_labelled
from refused import refusal
from tables import rows
from texts import BYTES, arguments_of
from world import cli, write_lines

from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.data_statistics import all_findings
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.records.preference_records import UNPAIRED
from fsdp_trainer.data.store import tokenize_tasks
from fsdp_trainer.data.tokens.samples import BAD, GOOD, MISMATCHED
from fsdp_trainer.methods.kto import KtoForwardBackward, KtoMetrics, KtoObjective
from fsdp_trainer.models.decoder import DocumentTargets, MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.training.metrics import MicroBatchResult

KINDS = [GOOD, MISMATCHED, BAD, MISMATCHED, GOOD, MISMATCHED]


def batch_of(reference):
    zeros, index = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    documents = DocumentTargets(index, index // 2, (2, 2, 2), reference, torch.tensor(KINDS))
    layout = None
    return MicroBatch(zeros, zeros, layout, zeros, zeros, zeros, document_targets=documents)


def test_the_loss_is_the_papers_and_its_figures_tell_good_from_bad():
    reference = torch.tensor([-3.0, -5.0, -2.0, -7.0, -4.0, -6.0], dtype=torch.float64)
    policy = torch.tensor([-2.0, -4.5, -2.5, -6.5, -3.8, -5.8], requires_grad=True)
    choice = ObjectiveChoice("kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    batch, scores = batch_of(reference), Scores(policy, policy)
    baseline = torch.tensor(0.4, dtype=torch.float64)
    loss = KtoObjective(batch, 3, None, choice, baseline)(scores, slice(0, 6))
    loss.backward()
    good, bad = torch.tensor([1.0, 0.2]) - 0.4, torch.tensor([-0.5]) - 0.4
    expected = (2 * (1 - (0.5 * good).sigmoid()).sum() + 3 * (1 - (-0.5 * bad).sigmoid())) / 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (policy.grad[1::2] == 0).all(), "mismatched answers are not learnt"
    assert policy.grad[2] > 0 > policy.grad[0]

    metric = KtoMetrics(choice)
    sums = metric.part(MicroBatchResult(batch, scores, loss, loss)).tolist()
    written = metric.written(sums)
    assert written["baseline"] == pytest.approx(0.4)
    assert written["reward_good"] == pytest.approx(0.3)
    assert written["reward_bad"] == pytest.approx(-0.25)
    assert written["reward_margin"] == pytest.approx(0.55)
    assert written["log_probability_good"] == pytest.approx(-2.9)
    assert set(written) == set(metric.keys)


def test_each_answer_lies_beside_its_prompt_with_the_answer_before_it(tmp_path):
    path = write_labelled(tmp_path / "labelled.jsonl", count=6)
    store = prepared(tmp_path, path, seq_len=64).train[0]
    assert store.kinds.tolist() == [BAD, MISMATCHED, *[GOOD, MISMATCHED] * 2] * 2
    assert store.group_starts.tolist() == [True, False] * 6

    def parts(sample):
        tokens, weights = store.read(sample)
        learnt = weights > 0
        return BYTES.decode(tokens[~learnt]), BYTES.decode(tokens[learnt])

    answers = [parts(sample) for sample in range(0, 12, 2)]
    for place, sample in enumerate(range(1, 12, 2)):
        assert parts(sample) == (answers[place][0], answers[place - 1][1])

    tight = 2 * int(store.lengths.max()) - 4
    cut = prepared(tmp_path, path, seq_len=tight).train[0]
    assert len(cut) == len(store)
    longest = np.add.reduceat(np.asarray(cut.lengths), np.arange(0, 12, 2)).max()
    assert longest <= tight


@pytest.mark.parametrize("prompts", ["AABB", "ABAB", "ABBBBB", "ABCD", "AABBBBCC", "ABBA"])
@pytest.mark.parametrize("form", ["labelled", "pairs", "the same answers"])
def test_mismatched_answers_are_those_to_other_prompts_each_once_if_that_can_be(
    tmp_path, prompts, form
):
    rows = []
    for i, prompt in enumerate(prompts):
        answer = str(i) if form != "the same answers" else "yes"
        pair = {
            "prompt": f"<{prompt}>",
            "chosen": f"{answer}|{prompt}",
            "rejected": f"b{i}|{prompt}",
        }
        single = {"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 2 == 0}
        rows.append(pair if form == "pairs" else single)
    store = stored(tmp_path, rows)
    used = []
    for sample in np.flatnonzero(np.asarray(store.kinds) == MISMATCHED).tolist():
        text = BYTES.decode(store.read(sample)[0].tolist())
        own, answer = re.search(r"<(\w)>\s*assistant\s*(.*)", text, re.DOTALL).groups()
        assert own != answer.strip()[-1]
        used.append(answer)
    count = len(prompts) * (2 if form == "pairs" else 1)
    assert len(used) == count
    largest = max(map(prompts.count, prompts))
    if form != "the same answers" and 2 * largest <= len(prompts):
        assert len(set(used)) == count


def test_many_answers_to_the_first_prompt_are_all_compared_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_tasks, "CHUNK", 2)
    rows = [{"prompt": p, "completion": f"{p}{i}", "label": True} for i, p in enumerate("AAAABB")]
    assert stored(tmp_path, rows).groups == len(rows)


def test_answers_to_a_single_prompt_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "q", "completion": f"a{i}", "label": True} for i in range(3)]
    assert "3 answers dropped: only one prompt was read with them" in refusal(
        stored, tmp_path, rows
    )


@pytest.mark.parametrize(
    "labels, warning",
    rows("""
11 → all 2 answers are labelled good
00 → all 2 answers are labelled bad
10 →
"""),
)
def test_answers_with_one_label_only_are_a_warning(tmp_path, labels, warning):
    answers = [
        {"prompt": f"q{i}", "completion": f"a{i}", "label": label == "1"}
        for i, label in enumerate(labels)
    ]
    findings = all_findings(of_rows(tmp_path, answers), 256)
    warnings = [each.text for each in findings if each.is_warning]
    assert [text.partition(":")[0] for text in warnings] == [warning] * bool(warning)


def stored(folder, rows):
    return of_rows(folder, rows).train[0]


def of_rows(folder, rows):
    return prepared(folder, write_lines(folder / "rows.jsonl", rows), template="chatml")


def prepared(folder, file, seq_len=256, template=None):
    how = arguments_of(folder / "cache", file, seq_len=seq_len, template=template)
    return prepare(*how, UNPAIRED)


def test_preview_shows_good_bad_and_mismatched_answers(tmp_path):
    path = write_labelled(tmp_path / "labelled.jsonl", count=6)
    keys = f"tokenizer.path=demo:bytes preview.rows=2 data.cache={tmp_path / 'cache'}"
    said = cli("preview", f"data.path={path}", keys, f"preview.html={tmp_path / 'p.html'}").out
    for part in ("good answers", "bad answers", "(mismatched)", "labelled.jsonl:1 (bad)"):
        assert part in said, part


def test_answers_are_learnt_and_the_base_of_adapters_is_the_reference(ledger):
    run = ledger.run(words=[*RUNS["kto"].words, *LORA])
    assert run["loss"][0] == pytest.approx(0.5, abs=1e-7), "both models are equal"
    assert run["loss"][-1] < 0.5
    assert run["baseline"][0] == 0


def test_pairs_are_one_good_and_one_bad_answer_each(ledger):
    run = ledger.run(words=[*PAIRS, "objective=kto objective.beta=0.5"])
    assert run["loss"][0] == pytest.approx(0.5, abs=1e-6)
    assert "the reference reads 160 answers" in run.out
    assert run["reward_margin"][-1] > 0


@pytest.mark.parametrize(("more", "baseline"), [(0.0, 0.4), (-1.0, 0.0)])
def test_the_baseline_is_the_mean_gain_of_mismatched_answers_and_at_least_0(more, baseline):
    reference = torch.tensor([-3.0, -5.0, -2.0, -7.0, -4.0, -6.0], dtype=torch.float64)
    policy = torch.tensor([-2.0, -4.5, -2.5, -6.5, -3.8, -5.8]) + more
    sizes = {"context": 1}
    dims = SimpleNamespace(sizes=sizes, is_first_of_context=True, sum_over_tokens=lambda sums: None)
    step = KtoForwardBackward.__new__(KtoForwardBackward)
    step.dims = dims
    step._set_baseline([batch_of(reference)], [Scores(policy, policy)])
    assert step.baseline.item() == pytest.approx(baseline)
