"""Floating-point operations of training, by the two usual conventions. Neither counts padding."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder


def matmul_parameters(config: ModelConfig) -> int:
    """Return the number of weights with which each token is multiplied.

    These are all weights except the input embedding and the experts that a token is not routed to.
    A tied embedding counts as the head's weight, which an MTP head uses once more.
    """
    embedding = config.vocab_size * config.hidden_size
    used = config.mtp_heads - (not config.tie_word_embeddings)
    return config.parameters(active=True) + embedding * used


@dataclass(frozen=True)
class TrainedWork:
    """The arithmetic of a step that does not train all weights.

    weights: operations for products with weights, per token. attention: operations for attention,
    as a share of those needed when all weights are trained.
    """

    weights: float
    attention: float = 1.0


def trained_work(model: Decoder) -> TrainedWork:
    """Return the work of a step that trains the parameters with requires_grad.

    Each element of a matrix costs 2 operations per token in forward, 2 for the gradient of the
    input, beginning with the first block that has a trained parameter, and 2 for its own gradient
    if it is trained.
    """
    config = model.config
    weights = 0
    reached: list[bool] = []
    any_trained = model.embedding.weight.requires_grad
    for block in model.blocks().values():
        total, trained = count_numbers(block)
        any_trained = any_trained or trained > 0
        reached.append(any_trained)
        weights += 2 * total + 2 * total * any_trained + 2 * trained
    counts = [count_numbers(head) for head in model.mtp_heads()]
    computed = [each for each in counts if each[1]]  # others are in the model to be kept
    weights += sum(4 * total + 2 * trained for total, trained in computed)
    weight = getattr(model.lm_head, "weight", None)
    head = config.vocab_size * config.hidden_size if weight is not None else 0
    head *= 1 + len(computed)
    norm, trained_norm = count_numbers(model.final_norm)
    any_trained = any_trained or trained_norm > 0
    weights += 2 * norm + 2 * norm * any_trained + 2 * trained_norm
    is_trained = weight is not None and weight.requires_grad
    weights += 2 * head + 2 * head * any_trained + 2 * head * is_trained
    return TrainedWork(weights, (1 + 2 * sum(reached) / len(reached)) / 3)


def count_numbers(module: nn.Module) -> tuple[int, int]:
    """Return the number of a module's weights that a token uses, and of those that are trained.

    A matrix counts as inputs × outputs however it is stored; experts count by the share of them
    that is active for a token.
    """
    total = trained = 0
    child: Any
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            matrix = name == "weight" and hasattr(child, "in_features")
            count: int = child.in_features * child.out_features if matrix else parameter.numel()
            if name in getattr(child, "shapes", {}):
                count = math.prod(child.shapes[name])
            count = round(count * getattr(child, "active_share", 1))
            total += count
            trained += count * parameter.requires_grad
    return total, trained


def palm_flops(
    config: ModelConfig, tokens: int, seq_len: int, work: TrainedWork | None = None
) -> float:
    """Return 6·N + 12·L·H·D·T for each token (PaLM, appendix B); less if weights are frozen.

    Attention counts as if every token attended to a complete row, or to its window. work: None if
    all weights are trained.
    """
    work = work or TrainedWork(6 * matmul_parameters(config))
    spans = sum(min(seq_len, window or seq_len) for window in config.windows)
    attention = 12 * spans * config.attention_width
    return tokens * (work.weights + work.attention * attention)


def causal_flops(
    config: ModelConfig, tokens: int, attention_cost: int, work: TrainedWork | None = None
) -> float:
    """Return 6·N for each token plus half of 12·L·H·D·Σ length² over the documents.

    It is less if weights are frozen. attention_cost: Σ length². work: None if all weights are
    trained.
    """
    work = work or TrainedWork(6 * matmul_parameters(config))
    attention = 6 * config.num_hidden_layers * config.attention_width * attention_cost
    return tokens * work.weights + work.attention * attention
