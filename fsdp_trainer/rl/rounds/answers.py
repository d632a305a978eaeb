"""Rewarded answers of a step, packed into rows that training reads like stored rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.rl.rollouts.rollout import Rollout
from fsdp_trainer.training.batches import StepPlan

ADVANTAGE, SAMPLED = "advantage", "sampled"
"""Columns of packed answers: a token's advantage, and its log-probability at sampling."""
TINY = 1e-4
"""Added to the standard deviation of rewards before dividing by it, as in trl."""


class PackedAnswers:
    """The answers of a step in packed rows, with the interface of stored rows for `Batches`.

    rollouts: answers to all prompts of the step, ordered by row, then by sample.
    """

    source_names = ("",)
    folder = "answers"

    def __init__(
        self,
        cfg: ObjectiveChoice,
        seq_len: int,
        rollouts: Sequence[Rollout],
        attention_cost: Callable[[np.ndarray], np.ndarray],
        where: Callable[[int], list[str]],
    ):
        """Pack the answers.

        attention_cost: function from lengths of documents to their attention costs. where: function
        from the row of a prompt to its FILE:LINE.
        """
        self.cfg, self.seq_len, self.rollouts = cfg, seq_len, list(rollouts)
        self._where = where
        lengths = np.array([rollout.tokens for rollout in rollouts], np.int64)
        packing = best_fit(lengths, seq_len)
        self.in_row = np.split(packing.documents, packing.offsets[1:-1])
        """Indices into `rollouts` of the documents in each packed row."""
        self.costs = attention_cost(lengths)
        rewards = np.array([rollout.reward for rollout in rollouts])
        self.rewards = rewards.reshape(-1, cfg.samples)
        """[prompts, samples] float64."""
        self.advantages = [
            gains
            for i in range(0, len(self.rollouts), cfg.samples)
            for gains in turn_advantages(cfg, self.rollouts[i : i + cfg.samples])
        ]
        """Of each of the model's turns, by rollout."""
        self.is_supervised = np.array(
            [
                rollout.is_used and (rollout.answer.finished or not cfg.mask_truncated)
                for rollout in rollouts
            ]
        )

    def __len__(self) -> int:
        return len(self.in_row)

    def plan(self, step: int, start: int, stop: int, metrics: dict[str, Any]) -> StepPlan:
        """Return the plan of the step. start, stop: range of the rows of its prompts."""
        answers = [rollout.answer for rollout in self.rollouts if rollout.is_used]
        counts = [rollout.answer.own_tokens for rollout in self.rollouts]
        supervised = sum(n for n, used in zip(counts, self.is_supervised, strict=True) if used)
        return StepPlan(
            step,
            start,
            stop,
            weight=step_weight(self.cfg, supervised, len(answers)),
            tokens=sum(rollout.tokens for rollout in self.rollouts),
            supervised=supervised,
            attention_cost=int(self.costs.sum()),
            documents=len(self.rollouts),
            packed=len(self),
            metrics=metrics,
        )

    def attention_costs(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.array([self.costs[self.in_row[row]].sum() for row in rows])

    def where(self, row: int) -> list[str]:
        return [self._where(self.rollouts[i].row)[0] for i in self.in_row[row].tolist()]

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
        rows = Rows.empty(len(indices), self.seq_len)
        shape = rows.weights.shape
        rows.columns = {name: np.zeros(shape, np.float32) for name in (ADVANTAGE, SAMPLED)}
        for place, row in enumerate(indices):
            start = 0
            for i in self.in_row[row].tolist():
                self._put(rows, place, start, i)
                start += self.rollouts[i].tokens
            rows.documents[place] = [self.rollouts[i].tokens for i in self.in_row[row].tolist()]
            rows.group_starts[place] = [True] * len(self.in_row[row])
        return rows

    def _put(self, rows: Rows, row: int, start: int, i: int) -> None:
        """Write a prompt and its answer into a row; only the model's own tokens are supervised."""
        rollout, answer = self.rollouts[i], self.rollouts[i].answer
        whole = slice(start, start + rollout.tokens)
        first = whole.start + len(rollout.prompt) - 1
        rows.tokens[row, whole] = [*rollout.prompt, *answer.tokens]
        rows.positions[row, whole] = np.arange(rollout.tokens)
        if not self.is_supervised[i] and not rollout.is_used:
            return
        weight = token_weight(self.cfg, answer.own_tokens) if self.is_supervised[i] else 0.0
        for own, gain in zip(answer.own_turns, self.advantages[i], strict=True):
            supervised = slice(first + own.start, first + own.stop)
            rows.labels[row, supervised] = answer.tokens[own]
            rows.weights[row, supervised] = weight
            rows.columns[ADVANTAGE][row, supervised] = gain
            rows.columns[SAMPLED][row, supervised] = answer.log_probabilities[own]


# --- weights and advantages -----------------------------------------------------------------------


def token_weight(cfg: ObjectiveChoice, tokens: int) -> float:
    """Return the weight of each token of an answer, before division by `step_weight`.

    tokens: length of the answer.
    """
    by_answer = {"dapo": 1.0, "grpo": 1.0 / tokens, "dr_grpo": 1.0 / cfg.max_new_tokens}
    return by_answer[cfg.weighting]


def step_weight(cfg: ObjectiveChoice, tokens: int, answers: int) -> float:
    """Return the divisor of the weights of a step's tokens. tokens: number of supervised tokens."""
    return float(tokens if cfg.weighting == "dapo" else answers)


def advantages(cfg: ObjectiveChoice, rewards: np.ndarray) -> np.ndarray:
    """Return the advantage of each answer over those to the same prompt, [prompts, samples].

    rewards: [prompts, samples] float64. The difference from the mean is divided by the standard
    deviation, except for Dr. GRPO (Liu et al. 2025).
    """
    centred = rewards - rewards.mean(1, keepdims=True)
    if cfg.weighting == "dr_grpo":
        return centred
    return centred / (rewards.std(1, ddof=1, keepdims=True) + TINY)


def turn_advantages(cfg: ObjectiveChoice, group: Sequence[Rollout]) -> list[np.ndarray]:
    """Return the advantage of each of the model's turns, by rollout. group: of one prompt.

    Without rewards for turns all turns of an answer have its advantage. With them the advantage is
    the discounted sum of this turn's and all later rewards, from which the mean of all turns of the
    group is subtracted and which are divided by their deviation (Shao et al. 2024, §4.1.3).
    Rollouts that failed are left out; so is one that remains alone.
    """
    turns = [len(rollout.answer.own_turns) for rollout in group]
    gains = [np.zeros(count) for count in turns]
    used = [i for i, rollout in enumerate(group) if rollout.is_used]
    if len(used) < 2:
        return gains
    if not any(group[i].turn_rewards for i in used):
        rewards = np.array([[group[i].reward for i in used]])
        for i, gain in zip(used, advantages(cfg, rewards)[0], strict=True):
            gains[i][:] = gain
        return gains
    every = np.concatenate([by_turn(group[i]) for i in used])[None]
    normalised = np.split(advantages(cfg, every)[0], np.cumsum([turns[i] for i in used])[:-1])
    for i, of_turns in zip(used, normalised, strict=True):
        total = 0.0
        for turn in reversed(range(turns[i])):
            total = of_turns[turn] + cfg.discount * total
            gains[i][turn] = total
    return gains


def by_turn(rollout: Rollout) -> Sequence[float]:
    """Return the rewards of the model's turns; one for all of them is the last turn's."""
    before = [0.0] * (len(rollout.answer.own_turns) - 1)
    return rollout.turn_rewards or [*before, rollout.reward]
