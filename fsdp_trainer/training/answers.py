"""Rewarded answers of a step, packed into rows that training reads as stored ones."""

import base64
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.order import Rows
from fsdp_trainer.data.packing import best_fit
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.policy_gradient import (
    ADVANTAGE,
    SAMPLED,
    advantages,
    step_weight,
    token_weight,
)
from fsdp_trainer.training.sampler import SampledAnswer


@dataclass(frozen=True)
class Rollout:
    """A prompt's answer with its rewards.

    row, sample: see Request. reward: what is learnt by; scores: of each reward, before weights.
    """

    row: int
    sample: int
    prompt: list[int]
    answer: SampledAnswer
    reward: float
    scores: list[float]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer.tokens)


class PackedAnswers:
    """The answers of a step in packed rows; it has what `Batches` reads of stored rows.

    rollouts: of all prompts of the step, in the order of rows and samples.
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
        """attention_cost: of documents' lengths; where: of a prompt's row its FILE:LINE."""
        self.cfg, self.seq_len, self.rollouts = cfg, seq_len, list(rollouts)
        self._where = where
        lengths = np.array([rollout.tokens for rollout in rollouts], np.int64)
        packing = best_fit(lengths, seq_len)
        self.in_row = np.split(packing.documents, packing.offsets[1:-1])
        """[rows] of places in `rollouts`."""
        self.costs = attention_cost(lengths)
        rewards = np.array([rollout.reward for rollout in rollouts])
        self.rewards = rewards.reshape(-1, cfg.samples)
        """[prompts, samples] float64."""
        self.advantages = advantages(cfg, self.rewards).ravel()
        self.is_learnt = np.array(
            [rollout.answer.finished or not cfg.mask_truncated for rollout in rollouts]
        )

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.in_row)

    def plan(self, step: int, start: int, stop: int, figures: dict[str, Any]) -> StepPlan:
        """Return the plan of the step. start, stop: rows of its prompts."""
        answers = [rollout.answer for rollout in self.rollouts]
        counts = [len(answer.tokens) for answer in answers]
        learnt = sum(n for n, used in zip(counts, self.is_learnt, strict=True) if used)
        return StepPlan(
            step,
            start,
            stop,
            weight=step_weight(self.cfg, learnt, len(answers)),
            tokens=sum(rollout.tokens for rollout in self.rollouts),
            supervised=learnt,
            attention_cost=int(self.costs.sum()),
            documents=len(answers),
            figures=figures,
        )

    def attention_costs(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """[rows] of what attention costs in each of these rows."""
        return np.array([self.costs[self.in_row[row]].sum() for row in rows])

    def where(self, row: int) -> list[str]:
        """Return FILE:LINE of the prompts in a row."""
        return [self._where(self.rollouts[i].row)[0] for i in self.in_row[row].tolist()]

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these indices, in their order."""
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
        """Lay a prompt and its answer into a row; each token of the answer is learnt."""
        rollout, answer = self.rollouts[i], self.rollouts[i].answer
        whole = slice(start, start + rollout.tokens)
        first = whole.start + len(rollout.prompt) - 1
        learnt = slice(first, first + len(answer.tokens))
        rows.tokens[row, whole] = [*rollout.prompt, *answer.tokens]
        rows.positions[row, whole] = np.arange(rollout.tokens)
        rows.labels[row, learnt] = answer.tokens
        weight = token_weight(self.cfg, len(answer.tokens)) if self.is_learnt[i] else 0.0
        rows.weights[row, learnt] = weight
        assert rows.columns is not None
        rows.columns[ADVANTAGE][row, learnt] = self.advantages[i]
        rows.columns[SAMPLED][row, learnt] = answer.log_probabilities


# --- answers that a checkpoint keeps --------------------------------------------------------------


def packed_text(rollouts: Sequence[Rollout]) -> str:
    """Return rollouts as text for a checkpoint, which `unpacked` reads."""
    arrays = {
        "numbers": np.array(
            [[r.row, r.sample, r.answer.finished, r.answer.version] for r in rollouts]
        ),
        "rewards": np.array([[r.reward, *r.scores] for r in rollouts]),
        "sizes": np.array([[len(r.prompt), len(r.answer.tokens)] for r in rollouts]),
        "tokens": np.array([t for r in rollouts for t in (*r.prompt, *r.answer.tokens)], np.int32),
        "sampled": np.array([p for r in rollouts for p in r.answer.log_probabilities], np.float32),
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()


def unpacked(text: str) -> list[Rollout]:
    """Return the rollouts of `packed_text`."""
    stored = np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))))
    tokens, sampled = stored["tokens"].tolist(), stored["sampled"].tolist()
    rollouts = []
    columns = [stored[name].tolist() for name in ("numbers", "rewards", "sizes")]
    sizes = zip(*columns, strict=True)
    for (row, sample, finished, version), (reward, *scores), (before, length) in sizes:
        prompt, tokens = tokens[:before], tokens[before:]
        answer = SampledAnswer(tokens[:length], sampled[:length], bool(finished), version)
        tokens, sampled = tokens[length:], sampled[length:]
        rollouts.append(Rollout(row, sample, prompt, answer, reward, scores))
    return rollouts
