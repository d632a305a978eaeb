"""The answers of a step with objective=grpo: what they take to make, and the rows they fill."""

import math
from dataclasses import dataclass, replace

from fsdp_trainer.config.schema import PROMPTED, TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.models.config import ModelConfig

PROMPT_TOKENS = 256
"""Tokens that a prompt is taken to have, where a row has room for them."""
REACHED = (0.25, 0.75)
"""Shares of the memory's rate that eager generation is taken to reach."""
BYTES = 2
"""Of a number while generating: bfloat16."""


@dataclass(frozen=True)
class Rollouts:
    """The answers of a step on one rank.

    answers: of all ranks; at_once: on this one; cache, weights: bytes, of keys and values and of
    the model gathered for generation. seconds: shortest and longest, all answers as long as
    objective.max_new_tokens.
    """

    answers: int
    at_once: int
    cache: float
    weights: float
    seconds: tuple[float, float]


def rows_of_answers(cfg: TrainConfig) -> TrainConfig:
    """Return the configuration whose batch.rows are the packed rows that a step learns from."""
    if cfg.objective.name not in PROMPTED:
        return cfg
    each = answer_tokens(cfg)
    in_a_row = max(1, cfg.batch.seq_len // each)
    rows = math.ceil(cfg.batch.rows * cfg.objective.samples / in_a_row)
    return replace(cfg, batch=replace(cfg.batch, rows=rows))


def answer_tokens(cfg: TrainConfig) -> int:
    """Return the tokens of a prompt and its answer, at most."""
    return min(cfg.batch.seq_len, PROMPT_TOKENS + cfg.objective.max_new_tokens)


def rollouts(cfg: TrainConfig, config: ModelConfig, world: int, device: Device) -> Rollouts | None:
    """Return what answers take; None for an objective that makes none.

    Each token reads all weights once, and on average half of the cache.
    """
    if cfg.objective.name not in PROMPTED:
        return None
    choice, tensor = cfg.objective, cfg.sharding.tensor
    answers = cfg.batch.rows * choice.samples
    own = math.ceil(answers * tensor / world)
    at_once = min(own, choice.answer_rows)
    heads = max(1, config.num_key_value_heads // tensor)
    of_token = 2 * config.num_hidden_layers * heads * config.head_dim * BYTES
    cache = float(at_once * answer_tokens(cfg) * of_token)
    weights = config.parameters() * BYTES / tensor
    forwards = math.ceil(own / choice.answer_rows) * choice.max_new_tokens
    ideal = forwards * (weights + cache / 2) / (device.memory_rate or 1.0)
    slow, fast = (ideal / share for share in REACHED)
    return Rollouts(answers, at_once, cache, weights, (fast, slow))
