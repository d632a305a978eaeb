"""What a head gives texts: here, and as transformers and sentence-transformers compute it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.text_reader import with_types
from fsdp_trainer.models.config import POOLING, POOLINGS, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.documents.read_texts import numbers_of_texts

TEXTS = ("Is it raining?", "It has rained since noon, and it will not stop before the evening.")
MODULES = "modules.json"
COMPUTED = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers whose results are compared."""
POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
    "max_tokens": lambda states: states.amax(0),
    "mean_tokens": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean_tokens": lambda states: F.normalize(
        torch.arange(1.0, len(states) + 1), p=1, dim=0
    ) @ states,
}  # fmt: skip
"""By the ends of their keys the ways in which sentence-transformers makes a vector of states."""


def texts_of(config: ModelConfig) -> list[Any]:
    """Return texts; for a head that gives each a few numbers, one is a pair."""
    return [*TEXTS] if config.tags or config.pooling else [*TEXTS, TEXTS]


@torch.no_grad()
def numbers_here(model: Decoder, folder: Path) -> Tensor:
    """Return what this program computes, [texts or tokens, numbers]. folder: of the tokenizer."""
    tokenizer = load_tokenizer(str(folder))
    model.describe_as(with_types(model.config, tokenizer))
    texts = tokenizer.encode_published(texts_of(model.config))
    if model.config.tags:
        return torch.cat([model.logits(torch.tensor(one).long()[None])[0] for one in texts])
    numbers = numbers_of_texts(model, texts, torch.device("cpu"))
    return F.normalize(numbers, dim=1) if model.config.pooling else numbers


@torch.no_grad()
def numbers_elsewhere(model: Any, folder: Path, config: ModelConfig) -> Tensor:
    """Return what transformers' model computes of the same texts. folder: of the tokenizer.

    Raises UserError for an embedding by modules that are not known here.
    """
    # imports transformers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts_of(config):
        given = tokenizer(*([text] if isinstance(text, str) else text), return_tensors="pt")
        output = model(**given)
        if config.pooling:
            rows.append(embedding(output.last_hidden_state[0], folder, config)[None])
        else:
            rows.append(output.logits[0] if config.tags else output.logits)
    return torch.cat(rows).double()


def embedding(states: Tensor, folder: Path, config: ModelConfig) -> Tensor:
    """Return the embedding of a text with these states, of length 1. Raises UserError."""
    title = "cannot read how texts are embedded"
    if (folder / MODULES).is_file():
        modules = json.loads((folder / MODULES).read_text())
        kinds = [str(one["type"]).rpartition(".")[2] for one in modules]
        if others := {*kinds} - {*COMPUTED}:
            raise UserError(f"{MODULES} names {', '.join(others)}, which is not computed here")
    names = [key for key, own in POOLINGS.items() if own == config.pooling]
    if (folder / POOLING).is_file():
        raw = read_object(folder / POOLING, title)
        chosen = raw.get("pooling_mode") or [k for k in POOLED if raw.get(f"pooling_mode_{k}")]
        chosen = chosen if isinstance(chosen, list) else [chosen]
        newer = {key: key.removesuffix("_tokens").removesuffix("_token") for key in POOLED}
        names = [key for key in POOLED if {key, newer[key]} & {*chosen}]
    return F.normalize(torch.cat([POOLED[name](states) for name in names]), dim=0)
