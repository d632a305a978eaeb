"""A plain training, one document at a time, of the rows that a run reads."""

import torch
import torch.nn.functional as F
from world import lines_of, write_lines


def shown(world, count, *words):
    """Return the first rows of a training, in order, as `preview` shows them."""
    text = world.command("preview", f"preview.format=json preview.rows={count}", *words)[0].out
    return lines_of(text)


def documents(rows):
    """Yield tokens, labels and weights of each document."""
    for row in rows:
        row = {"weights": [float(label != -100) for label in row["labels"]]} | row
        begin = 0
        for length in row["documents"]:
            part = slice(begin, begin + length)
            yield [torch.tensor(row[name][part]) for name in ("tokens", "labels", "weights")]
            begin += length


def plain_training(logits, trained, rows, rates, clip, decay):
    """Return losses, gradient norms and the first gradients of training by AdamW.

    logits: a function of a document as a row of its own. trained: parameters by name. rows: of all
    steps, equally many for each of `rates`. clip, decay: norm of gradients, weight decay.
    """
    decays = {n: p.ndim >= 2 and not n.endswith("bias") for n, p in trained.items()}
    groups = [
        {"params": [p for n, p in trained.items() if decays[n] == flag], "weight_decay": value}
        for flag, value in ((True, decay), (False, 0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1, betas=(0.9, 0.95), eps=1e-8)
    losses, norms, first, count = [], [], {}, len(rows) // len(rates)
    for step, rate in enumerate(rates):
        batch = [*documents(rows[step * count : (step + 1) * count])]
        whole, loss = sum(weights.sum() for *_, weights in batch), 0.0
        for tokens, labels, weights in batch:
            nll = F.cross_entropy(logits(tokens[None])[0], labels, reduction="none")
            share = (nll * weights).sum() / whole
            share.backward()
            loss += share.item()
        losses.append(loss)
        first = first or {name: p.grad.clone() for name, p in trained.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), clip).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, first


LENGTHS = (30, 34, 20, 44, 40, 24, 11, 53)
"""Tokens of documents, of which pairs fill rows of 64."""


def write_documents(file):
    """Write documents of tokens; return each with which of its tokens are supervised."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]
    held = [(text, torch.arange(len(text)) % 3 > 0) for text in texts]
    rows = (
        {"input_ids": text.tolist(), "labels": torch.where(mask, text, -100).tolist()}
        for text, mask in held
    )
    write_lines(file, rows)
    return held
