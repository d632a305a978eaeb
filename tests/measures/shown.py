"""The rows that a training reads, as `preview` shows them."""

import json

import torch


def shown(world, count, *words):
    """Return the first rows of a training, in order."""
    text = world.command("preview", f"preview.format=json preview.rows={count}", *words)[0].out
    return [json.loads(line) for line in text.splitlines()]


def documents(rows):
    """Yield tokens, labels and weights of each document."""
    for row in rows:
        weights = row.get("weights") or [float(label != -100) for label in row["labels"]]
        begin = 0
        for length in row["documents"]:
            part = slice(begin, begin + length)
            yield (
                *(torch.tensor(row[name][part]) for name in ("tokens", "labels")),
                torch.tensor(weights[part]),
            )
            begin += length
