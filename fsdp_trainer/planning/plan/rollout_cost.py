"""The answers of a step with objective=grpo: cost of generating them, and the rows they fill."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig

PROMPT_TOKENS = 256
"""Assumed tokens of a prompt, if a row has room for them."""
REACHED = (0.25, 0.75)
"""Assumed range of the share of the memory's rate that eager generation reaches."""
LAUNCH_SECONDS = 1.2e-3
"""Seconds in which a host launches a block's kernels one by one; measured beside an H200: 1.1 ms.

The shortest time assumes that a CUDA graph launches them all at once.
"""
BYTES = 2
"""Bytes of a number in generation: bfloat16."""


class ScoredBy(NamedTuple):
    """A reward model: title, bytes of weights on each rank, shortest and longest seconds a step."""

    title: str
    weights: float
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Rollouts:
    """The answers generated in a step.

    answers: number on all ranks; at_once: number that a rank generates at the same time; cache:
    bytes of keys and values on a rank; weights: bytes of the model gathered for generation;
    seconds: shortest and longest time, if all answers have objective.max_new_tokens; scored: what
    each reward model needs; ranks: number of ranks that only generate, 0: the training ranks do;
    stored: bytes of the weights that each of these keeps.
    """

    answers: int
    at_once: int
    cache: float
    weights: float
    seconds: tuple[float, float]
    scored: tuple[ScoredBy, ...] = ()
    ranks: int = 0
    stored: float = 0.0


def rows_of_answers(cfg: TrainConfig) -> TrainConfig:
    if not cfg.objective.method.samples:
        return cfg
    each = answer_tokens(cfg.objective, cfg.batch.seq_len)
    in_a_row = max(1, cfg.batch.seq_len // each)
    rows = math.ceil(cfg.batch.rows * cfg.objective.samples / in_a_row)
    return replace(cfg, batch=replace(cfg.batch, rows=rows))


def answer_tokens(choice: ObjectiveChoice, seq_len: int) -> int:
    """Return the maximum number of tokens of a prompt with its answer.

    Replies of an environment are not counted: their length is not known.
    """
    return min(seq_len, PROMPT_TOKENS + choice.most_turns * choice.max_new_tokens)


def answers_of_rank(answers: int, tensor: int, ranks: int) -> int:
    """Return the number of answers that a rank makes, and scores, in a step.

    answers: of all ranks; tensor: number of ranks that make the same; ranks: number of all ranks
    that make answers.
    """
    return math.ceil(answers * tensor / ranks)


def rollouts(cfg: TrainConfig, config: ModelConfig, world: int, device: Device) -> Rollouts | None:
    """Return the cost of generating answers; None for an objective that generates none.

    world: number of training ranks, which make the answers if there are no rollout ranks.

    Each generated token reads all weights once, and on average half of the cache.
    """
    if not cfg.objective.method.samples:
        return None
    choice, tensor = cfg.objective, cfg.sharding.tensor
    answers = cfg.batch.rows * choice.samples
    own = answers_of_rank(answers, tensor, cfg.launch.rollout_ranks or world)
    at_once = min(own, choice.answer_rows)
    heads = max(1, config.num_key_value_heads // tensor)
    of_token = 2 * config.num_hidden_layers * heads * config.head_dim * BYTES
    cache = float(at_once * answer_tokens(cfg.objective, cfg.batch.seq_len) * of_token)
    weights = config.parameters() * BYTES / tensor
    tokens = choice.most_turns * choice.max_new_tokens
    forwards = math.ceil(own / choice.answer_rows) * tokens
    ideal = forwards * (weights + cache / 2) / (device.memory_rate or 1.0)
    slow, fast = (ideal / share for share in REACHED)
    slow = max(slow, forwards * config.num_hidden_layers * LAUNCH_SECONDS)
    ranks, stored = cfg.launch.rollout_ranks, 0.0
    if ranks:
        stored = config.parameters() * getattr(torch, cfg.precision.master_dtype).itemsize / ranks
    seconds = fast, slow
    return Rollouts(answers, at_once, cache, weights, seconds, ranks=ranks, stored=stored)
