"""The reward `model`: a reward model scores answers. methods/reward_scores.py loads the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.paths import find_checkpoint, is_hub_id
from fsdp_trainer.rewards.reward import Attempt, Reward


class AnswerScorer(Protocol):
    """A reward model in memory."""

    def scores_of_answers(
        self, prompts: Sequence[list[dict[str, Any]]], answers: Sequence[str]
    ) -> list[float]:
        """Return the score of each answer. prompts: for each answer, the turns before it."""


@dataclass(frozen=True)
class ModelReward(Reward):
    """The score of a reward model, which reads prompt and answer in its own chat template.

    scorer: the model, None until it is loaded.
    """

    name: ClassVar[str] = "model"
    source: str | None = key(
        None, "the reward model: a run with objective=reward, a Hugging Face folder or a hub id"
    )
    dtype: str = key("float32", "number format of its weights", choices=("float32", "bfloat16"))
    scorer: AnswerScorer | None = field(default=None, repr=False, compare=False)

    def wrong_parts(self) -> str | None:
        """Return an error message if the settings do not fit together, else None."""
        if self.source is None:
            return "lacks a source, as in  {name: model, source: runs/reward}"
        folder = Path(self.source).expanduser()
        is_there = (folder / "config.json").is_file() or find_checkpoint(folder)
        if is_there or (is_hub_id(self.source) and not folder.exists()):
            return None
        return (
            f"source: {self.source}  is neither a run with a checkpoint nor a Hugging Face folder"
        )

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        """Return one score per attempt."""
        assert self.scorer is not None
        prompts = [list(attempt.turns) for attempt in attempts]
        return self.scorer.scores_of_answers(prompts, [attempt.answer for attempt in attempts])
