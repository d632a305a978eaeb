"""Heads that give texts numbers: losses are transformers' on any ranks, and so are exports."""

import json

import pytest
import torch
from heads import STEP, WORDS, gradients
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer

KINDS = {"classes": "single_label", "several": "multi_label", "numbers": "regression"}
PLAIN = ["model.init_from=RUN(plain)", "objective=classify"]


def run_of(ledger, kind, *more, ranks=1):
    words = [*PLAIN, *STEP, "batch.micro_rows=2", f"data.path=DATA/{kind}.jsonl", *more]
    return ledger.run(words=words, ranks=ranks)


def rows_of(ledger, kind):
    return [*map(json.loads, (ledger.data / f"{kind}.jsonl").read_text().splitlines())]


def loss_of_transformers(model, tokenizer, rows):
    """The mean loss over rows, one text at a time."""
    total = 0
    for row in rows:
        inputs, label = tokenizer(row["text"], return_tensors="pt"), row["label"]
        if model.config.problem_type == "regression":
            labels = torch.tensor([[label]])
        elif isinstance(label, list):
            labels = torch.tensor([[float(name in label) for name in model.config.label2id]])
        else:
            labels = torch.tensor([model.config.label2id[label]])
        total = total + model(input_ids=inputs["input_ids"], labels=labels).loss
    return total / len(rows)


def assert_equal(gradients, expected):
    for name, gradient in gradients.items():
        scale = expected[name].abs().max().clamp_min(1e-3)
        assert ((gradient - expected[name]) / scale).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_transformers_loss_and_gradients(ledger, kind):
    start = run_of(ledger, kind, "optim.lr=1e-9")
    folder = start.folder / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.problem_type.startswith(KINDS[kind])
    loss = loss_of_transformers(model, AutoTokenizer.from_pretrained(folder), rows_of(ledger, kind))
    assert start.column("objective") == pytest.approx([loss.item()], rel=1e-6)
    loss.backward()
    run = run_of(ledger, kind, f"model.init_from={folder}")
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_equal(gradients(start, run), expected)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ""),
        (4, "batch.micro_rows=1"),
        (2, "sharding.context=2"),
        (1, "data.packing=none batch.rows=24"),
    ],
)
def test_the_step_is_the_same_on_any_ranks(ledger, ranks, words):
    """However rows are shared, packed and cut."""
    start = run_of(ledger, "classes", "optim.lr=1e-9")
    one, other = run_of(ledger, "classes"), run_of(ledger, "classes", *words.split(), ranks=ranks)
    assert one.column("loss") == pytest.approx(other.column("loss"), rel=1e-6)
    assert_equal(gradients(start, other), gradients(start, one))


def test_peft_computes_what_an_adapter_and_its_head_have_learnt(ledger, tmp_path):
    data = "DATA/classes.jsonl"
    run = run_of(
        ledger, "classes", "adapter=lora", "adapter.rank=4", "objective.class_weights={root: 3}",
        "train.steps=3", "optim.lr=0.1", f"data.validation={data}", "train.validate_every=3",
    )  # fmt: skip
    assert "labels fruit" in run.out
    last = run.metrics[-1]
    folder = str(run.folder / "adapter")
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = losses = 0
    for row in rows_of(ledger, "classes"):
        target = torch.tensor(sorted(WORDS).index(row["label"]))
        with torch.no_grad():
            logits = model(tokenizer(row["text"], return_tensors="pt")["input_ids"]).logits[0]
        right += (logits.argmax() == target).item()
        losses += torch.nn.functional.cross_entropy(logits, target) * (1 + 2 * (target == 2))
    assert last["validation_accuracy"] == right / 24
    assert last["validation_loss"] == pytest.approx(losses.item() / 24, rel=1e-5)


def test_labels_that_the_head_does_not_have_are_refused(ledger, train, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "elm", "label": "tree"}\n')
    words = [*map(ledger.with_places, [*PLAIN, *STEP, "data.path=DATA/classes.jsonl"])]
    said = train("held out", *words, f"data.validation={other}", code=2).err
    assert f"data.validation: {other}:1" in said
    assert "is tree, and the head has the labels fruit, grain, root" in said
    said = train("split", *words, "data.too_long=split", code=2).err
    assert "holds labelled texts" in said
    head = f"model.init_from={run_of(ledger, 'classes').folder}"
    words.remove("objective=classify")
    assert (
        "has 3 labels, and a reward model one"
        in train(
            "reward",
            *words,
            head,
            "objective=reward",
            f"data.path={ledger.data}/pairs.jsonl",
            code=2,
        ).err
    )
