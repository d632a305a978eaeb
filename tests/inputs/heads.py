"""Data for heads that give texts numbers, and the gradients of a run's first step."""

import json

from safetensors.torch import load_file

WORDS = {"fruit": "apple pear plum", "grain": "rye oats rice", "root": "beet leek yam"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(i, label):
    """A few words of a label, of different lengths."""
    known = WORDS[label].split()
    return " ".join(known[(i + j * j) % 3] for j in range(1 + i % 4)) + "." * (i % 3)


def write_classes(folder):
    """Write texts with one label, with several, and with a number."""
    names = [*WORDS]
    labels = [names[i * i % 7 % 3] for i in range(24)]
    texts = [words(i, label) for i, label in enumerate(labels)]
    one = [{"text": t, "label": label} for t, label in zip(texts, labels, strict=True)]
    write_rows(folder / "classes.jsonl", one)
    some = [{**row, "label": [row["label"], names[i % 3]][: i % 3]} for i, row in enumerate(one)]
    write_rows(folder / "several.jsonl", some)
    write_rows(folder / "numbers.jsonl", [{**row, "label": len(row["text"]) / 8} for row in one])


def write_tags(folder):
    """Write words with labels of entities, some of them none, and answers with labels of steps."""
    names, types = [*WORDS], ["O", "B-FRUIT", "I-FRUIT", "B-ROOT", "I-ROOT"]
    rows, steps = [], []
    for i in range(20):
        tokens = f"{words(i, names[i % 3])} {words(i + 1, names[i * i % 3])}".split()
        tags = [types[(i + j * j) % 5] if (i + j) % 7 else None for j in range(len(tokens))]
        rows.append({"tokens": tokens, "ner_tags": tags})
        parts = [f"Step {j}: {word}" for j, word in enumerate(tokens[:4])]
        labels = [bool((i + j) % 3) for j in range(len(parts))]
        steps.append({"prompt": f"What is {i}?", "completions": parts, "labels": labels})
    write_rows(folder / "tags.jsonl", rows)
    write_rows(folder / "steps.jsonl", steps)


def write_queries(folder):
    """Write queries with one or two documents that answer them, and up to two others; scores."""
    names = [f"{chr(97 + i)}{i * i}" for i in range(16)]
    rows = [
        {
            "query": name * 2,
            "positive": [name[::-1], f"{name}!"][: 1 + i % 2],
            "negatives": [f"no {name}", f"{name}?"][: i % 3],
        }
        for i, name in enumerate(names)
    ]
    write_rows(folder / "queries.jsonl", rows)
    lists = [
        {"query": n, "documents": [n[::-1], f"no {n}", "x"][: 2 + i % 2]}
        for i, n in enumerate(names)
    ]
    for i, row in enumerate(lists):
        row["scores"] = [1, 0, 1][: len(row["documents"])] if i % 4 else [0.5, 0.25, 1][: 2 + i % 2]
    write_rows(folder / "lists.jsonl", lists)
    pairs = [{"sentence1": n, "sentence2": n[1:] + n, "score": i % 5} for i, n in enumerate(names)]
    write_rows(folder / "alike.jsonl", pairs)


STEP = [
    "optim=sgd", "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", "optim.lr=1",
    "optim.grad_clip=null", "schedule=constant", "schedule.warmup_steps=0", "train.steps=1",
    "batch.rows=64", "batch.across_epochs=false", "batch.micro_rows=1", "batch.seq_len=96",
    "checkpoint.export_hf=true",
]  # fmt: skip
"""One step over all of the data, by a plain update: its gradient is what the weights lose."""


def weights(run):
    return load_file(run.folder / "hf" / "model.safetensors")


def gradients(before, run):
    """Return the gradient of each weight in the only step of a run that began with `before`."""
    start, end = weights(before), weights(run)
    assert start.keys() == end.keys()
    return {name: start[name] - end[name] for name in start}
