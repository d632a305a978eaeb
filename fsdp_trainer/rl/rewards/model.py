"""The reward `model`: a reward model scores answers. rl/rounds/reward_scores.py loads the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.paths import find_checkpoint, is_hub_id
from fsdp_trainer.rl.rewards.reward import Attempt, Reward

ROW_TOKENS = 4096
"""Tokens of a packed row of answers that a reward model scores at once, unless one is longer."""


@dataclass(frozen=True)
class ModelReward(Reward):
    """The score of a reward model, which reads tools, prompt and answer in its chat template.

    scorer: the model, None until it is loaded.
    """

    name: ClassVar[str] = "model"
    source: str | None = key(
        None, "the reward model: a run with objective=reward, a Hugging Face folder or a hub id"
    )
    dtype: str = key("float32", "number format of its weights", choices=("float32", "bfloat16"))
    scorer: Any = field(default=None, repr=False, compare=False)

    def wrong_parts(self) -> str | None:
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
        assert self.scorer is not None
        prompts = [list(attempt.turns) for attempt in attempts]
        answers = [attempt.answer for attempt in attempts]
        tools = [attempt.tools for attempt in attempts]
        return self.scorer.scores_of_answers(prompts, answers, tools)
