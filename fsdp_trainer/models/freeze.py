"""Parameters that are not trained: `train.freeze` names them, by patterns."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters import AdapterSpec, add_adapters, resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import VOCABULARY, Decoder, meta_decoder

MAX_NAMED = 3  # parameter names that a message lists


def choose_trained(
    model: Decoder,
    adapters: AdapterSpec | None,
    patterns: Sequence[str],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the model its adapters, and leave switched on the gradients of what is trained.

    adapters: None: all weights are trained but those that the patterns fit. dtype: of what is
    added. Raises UserError as `freeze` does.
    """
    if adapters is not None:
        add_adapters(model, adapters, dtype)
    freeze(model, patterns)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off the gradient of every parameter whose name fits one of the patterns (fnmatch).

    A tied head is the embedding: a pattern that fits one name of a parameter freezes it.
    Raises UserError for a pattern that fits none, and where nothing would be left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unmatched = []
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        for name in matched:
            parameters[name].requires_grad_(False)
        if not matched:
            unmatched.append(Problem(f"train.freeze has {pattern}", _suggest(pattern, parameters)))
    if unmatched:
        raise UserError("train.freeze names parameters that the model does not have", unmatched)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        text = "fits every parameter: nothing would be trained. Leave some out"
        problem = Problem(f"train.freeze={list(patterns)}", text)
        raise UserError("nothing would be trained", [problem])


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without a gradient by name, each once."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


@dataclass(frozen=True)
class TrainedShares:
    """The share of the numbers that is trained: of embedding, head, and each block.

    whole: how many numbers are trained in all, padding of the vocabulary left out.
    """

    embedding: float
    head: float
    blocks: tuple[float, ...]
    whole: int


def trained_shares(config: ModelConfig, cfg: TrainConfig) -> TrainedShares:
    """Return what `adapter` and `train.freeze` leave to train.

    Raises UserError as `resolve_adapters` and `freeze` do.
    """
    if not cfg.train.freeze and cfg.adapter.name == "none":
        blocks = (1.0,) * config.num_hidden_layers
        return TrainedShares(1.0, 1.0, blocks, config.parameters())
    key = f"{config} {cfg.adapter} {cfg.train.freeze}"
    if key not in _shares:
        model = meta_decoder(config)
        choose_trained(model, resolve_adapters(cfg.adapter, config), cfg.train.freeze)
        blocks = tuple(_share(block) for block in model.model.layers.values())
        ends = _share(model.model.embed_tokens), _share(model.lm_head)
        _shares[key] = TrainedShares(*ends, blocks, _trained(model))
    return _shares[key]


_shares: dict[str, TrainedShares] = {}  # a plan tries hundreds of configurations of one model


def _share(module: nn.Module) -> float:
    """Return the share of a module's numbers that is trained."""
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return trained / sum(p.numel() for p in parameters)


def _trained(model: Decoder) -> int:
    """Return how many numbers are trained, without the padding of the vocabulary."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = dict.fromkeys(VOCABULARY, model.config.vocab_size)
    return sum(rows.get(name, len(p)) * p[0].numel() for name, p in parameters.items())


def _suggest(pattern: str, names: Sequence[str] | dict[str, nn.Parameter]) -> str:
    """Return the parameter names that the pattern may have meant, for a message."""
    plain = pattern.replace("*", "")
    inside = [name for name in names if plain.strip(".") and plain.strip(".") in name]
    closest = nearest(pattern, names, 0.0)
    meant = inside[:MAX_NAMED] or [name for name in (closest,) if name]
    return f"fits no parameter; a pattern must fit the whole name, as in  {', '.join(meant)}"
