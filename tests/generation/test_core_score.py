"""CORE on a bundle of a few items: its scores are those of the formula, by hand."""

import csv
import json
import random

import pytest
import torch
import yaml
from zoo import make_folder

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.evaluation.core import CoreTask

CHOICES = [
    {"query": f"Q{i} {'x' * (i % 4)}", "choices": [f"a{i}", f"b{i}{i}", f"c{i % 3}"], "gold": i % 3}
    for i in range(9)
]
SCHEMAS = [
    {"context_options": [f"he {i}", f"she is {i}"], "continuation": f"ran {i % 5}", "gold": i % 2}
    for i in range(8)
]
TASKS = {
    "letters": ("multiple_choice", 2, ": ", 25.0, CHOICES),
    "who": ("schema", 1, " ", 50.0, SCHEMAS),
    "echo": ("language_modeling", 0, "", 0.0, []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("core") / "hf")


@pytest.fixture(scope="module")
def bundle(folder):
    """The format of nanochat's. The model knows the endings of some items of `echo`."""
    data = folder.parent / "bundle"
    (data / "eval_data/sub").mkdir(parents=True)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    echo = [{"context": f"say {i}", "continuation": "no"} for i in range(3)]
    number = 3
    while len(echo) < 6:
        tokens = [first_token(tokenizer), *tokenizer.encode(f"say {number}")]
        likeliest = int(model.logits(torch.tensor([tokens]))[0, -1].argmax())
        text = tokenizer.decode([likeliest])
        if tokenizer.encode(text) == [likeliest]:  # else it is special, or part of a letter
            echo.append({"context": f" say {number}  ", "continuation": text})
        number += 1
    tasks = []
    for label, (kind, shots, delimiter, _, items) in TASKS.items():
        file = f"sub/{label}.jsonl"
        lines = [json.dumps(item) + "\n" for item in items or echo]
        (data / "eval_data" / file).write_text("".join(lines))
        task = {"label": label, "dataset_uri": file, "num_fewshot": [shots], "icl_task_type": kind}
        tasks.append(task | ({} if delimiter == " " else {"continuation_delimiter": delimiter}))
    (data / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    with (data / "eval_meta_data.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Task Category", "Random baseline"])
        rows.writerows([label, "any", each[3]] for label, each in TASKS.items())
    return data


def first_token(tokenizer):
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def losses(model, tokenizer, text):
    """Return the loss of each token behind the first, bos in front."""
    tokens = torch.tensor([first_token(tokenizer), *tokenizer.encode(text)])
    logits = model.logits(tokens[None])[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none"), tokens


def expected_accuracy(model, tokenizer, label, bundle):
    """Return the accuracy as DCLM's in-context tasks are scored: by the mean loss of what differs
    (choices), of what is common (schemas)."""
    _, shots, delimiter, _, _ = TASKS[label]
    items = [json.loads(line) for line in (bundle / f"eval_data/sub/{label}.jsonl").open()]
    random.Random(1337).shuffle(items)
    right = 0
    for number, item in enumerate(items):
        others = [each for i, each in enumerate(items) if i != number]
        examples = random.Random(1234 + number).sample(others, shots)
        if label == "letters":
            before = "".join(f"{e['query']}: {e['choices'][e['gold']]}\n\n" for e in examples)
            texts = [f"{before}{item['query']}{delimiter}{each}" for each in item["choices"]]
            means = []
            for text in texts:  # bytes are tokens: choices differ from their first letter on
                start = len(f"{before}{item['query']}{delimiter}".encode())
                means.append(losses(model, tokenizer, text)[0][start:].mean())
        else:
            before = "".join(
                f"{e['context_options'][e['gold']]} {e['continuation']}\n\n" for e in examples
            )
            texts = [f"{before}{each} {item['continuation']}" for each in item["context_options"]]
            same = len(f" {item['continuation']}") + common(item)
            means = [losses(model, tokenizer, text)[0][-same:].mean() for text in texts]
        right += int(torch.stack(means).argmin()) == item["gold"]
    return right / len(items)


def common(item):
    """Bytes at the end of both contexts."""
    first, second = (each[::-1] for each in item["context_options"])
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


def test_core_is_the_mean_of_centred_accuracies_on_any_number_of_ranks(evaluate, folder, bundle):
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    words = folder, ["core"], f"core_data={bundle}"
    metrics = evaluate(*words)
    for label in ("letters", "who"):
        accuracy = expected_accuracy(model, tokenizer, label, bundle)
        assert metrics[f"core/{label}"]["acc"] == accuracy
    assert metrics["core/echo"]["acc"] == 0.5, "what the model itself would say, of half the items"
    letters, who = metrics["core/letters"], metrics["core/who"]
    assert letters["centered"] == pytest.approx((letters["acc"] - 0.25) / 0.75)
    assert who["centered"] == pytest.approx((who["acc"] - 0.5) / 0.5)
    mean = (letters["centered"] + who["centered"] + 0.5) / 3
    assert metrics["core"] == {"centered": pytest.approx(mean)}
    assert evaluate(*words, "sharded=true", ranks=2) == metrics
    assert evaluate(*words, "limit=4")["core/letters"]["acc"] in (0, 0.25, 0.5, 0.75, 1)


def test_with_few_items_there_are_as_many_examples_as_other_items():
    items = [{"query": f"q{i}", "choices": ["a", "b"], "gold": 0} for i in range(3)]
    task = CoreTask("few", "multiple_choice", 10, " ", 0.5, items)
    assert [text.count("q") for text in task.texts(1)] == [3, 3]


def test_core_without_its_data_is_refused(evaluate, tmp_path):
    assert "core_data=eval_bundle" in evaluate(tmp_path, ["core"], code=2)
    said = evaluate(tmp_path, ["core"], f"core_data={tmp_path}", code=2)
    assert "has no core.yaml and no eval_data" in said
