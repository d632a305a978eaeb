"""The verb `preview`: the first rows of training, as the model sees them."""

import json
import sys
from itertools import pairwise

import numpy as np

from fsdp_trainer.config.verbs import PreviewConfig
from fsdp_trainer.data.build import build_data
from fsdp_trainer.data.mixture import Mixture, build_order
from fsdp_trainer.data.order import RowData
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.tokenizer import TextTokenizer

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


def preview(cfg: PreviewConfig) -> int:
    """Print `preview.rows` rows in the order of training; returns the exit code."""
    tokenizer, template, prepared = build_data(cfg)
    order = build_order(cfg, prepared)
    if cfg.preview.format == "json":
        for index in range(cfg.preview.rows):
            print(json.dumps(as_json(index, order.read(index))))
        return 0
    print("\n".join(summary(prepared, order, template.name)))
    for index in range(min(cfg.preview.rows, order.rows_per_epoch)):
        print(f"\nrow {index}")
        print(as_text(order.read(index), tokenizer, colour=sys.stdout.isatty()))
    return 0


def summary(prepared: Prepared, order: Mixture, template: str) -> list[str]:
    """What was found, and how it was packed."""
    packed = f"rows of {order.seq_len:,}: {order.rows_per_epoch:,} an epoch, {100 * order.fill:.1f}% filled"
    return [*prepared.report, f"template: {template}", packed]


def as_json(index: int, row: RowData) -> dict:
    """The row without its padding; `weights` only where a learnt position has another weight than 1."""
    n = sum(row.documents)
    labels, weights = row.labels[:n], row.weights[:n]
    shown = {"row": index, "tokens": row.tokens[:n].tolist(), "labels": labels.tolist(), "documents": row.documents}
    return shown if np.all(weights[labels != -100] == 1) else shown | {"weights": weights.tolist()}


def as_text(row: RowData, tokenizer: TextTokenizer, colour: bool) -> str:
    """The row's text, a line between documents; learnt tokens green, the rest dim; without colour, learnt ones in [[ ]]."""
    texts, start = [], 0
    for length in row.documents:
        # A token is learnt where the position before it has a label.
        learnt = np.concatenate([[False], row.labels[start : start + length - 1] != -100])
        texts.append(_marked(row.tokens[start : start + length], learnt, tokenizer, (GREEN, DIM, RESET) if colour else None))
        start += length
    return ("\n" + "-" * 40 + "\n").join(texts)


def _marked(tokens: np.ndarray, learnt: np.ndarray, tokenizer: TextTokenizer, colours: tuple[str, str, str] | None) -> str:
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(tokens)]
    text = ""
    for start, end in pairwise(edges):
        piece = tokenizer.decode(tokens[start:end].tolist(), skip_special=False)
        if colours:
            text += (colours[0] if learnt[start] else colours[1]) + piece + colours[2]
        else:
            text += f"[[{piece}]]" if learnt[start] else piece
    return text
