"""Parameters that are not trained, chosen by the name patterns of `train.freeze`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from fsdp_trainer.config.names import nearest
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec
from fsdp_trainer.models.adapters.adapters import add_adapters
from fsdp_trainer.models.decoder import Decoder

MAX_NAMED = 3  # parameter names that a message lists


def choose_trained(
    model: Decoder,
    adapters: AdapterSpec | None,
    patterns: Sequence[str],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add the adapters to the model and set requires_grad of every parameter.

    adapters: None trains all weights except those that match the patterns. dtype: number format
    of the adapters. Raises UserError as `freeze` does.
    """
    if adapters is not None:
        add_adapters(model, adapters, dtype)
    freeze(model, patterns)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off the gradient of every parameter whose name matches one of the patterns (fnmatch).

    A part of a model that reads images is a pattern, too: vision, projector or language.
    A tied head is the embedding: a pattern that matches either name freezes both.
    Raises UserError for a pattern without a match, and if no parameter remains to be trained.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    part_of = model.part_of if isinstance(model, Decoder) else lambda name: None
    unmatched = []
    for pattern in patterns:
        matched = [n for n in parameters if pattern == part_of(n) or fnmatchcase(n, pattern)]
        for name in matched:
            parameters[name].requires_grad_(False)
        if not matched:
            unmatched.append(Problem(f"train.freeze has {pattern}", _suggest(pattern, parameters)))
    if unmatched:
        raise UserError("train.freeze names parameters that the model does not have", unmatched)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        text = "fits every parameter: nothing would be trained. Leave some out"
        raise UserError("nothing would be trained", f"train.freeze={list(patterns)}", text)


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def count_trained(model: Decoder) -> int:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = dict.fromkeys(model.config.names.vocabulary, model.config.vocab_size)
    return sum(rows.get(name, len(p)) * p.shape[1:].numel() for name, p in parameters.items())


def _suggest(pattern: str, names: Sequence[str] | dict[str, nn.Parameter]) -> str:
    plain = pattern.replace("*", "")
    inside = [name for name in names if plain.strip(".") and plain.strip(".") in name]
    closest = nearest(pattern, names, 0.0)
    meant = inside[:MAX_NAMED] or [name for name in (closest,) if name]
    return f"fits no parameter; a pattern must fit the whole name, as in  {', '.join(meant)}"
