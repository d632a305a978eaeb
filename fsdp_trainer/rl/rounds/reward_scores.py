"""Scoring of texts by a reward model, which is an export or a run with objective=reward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.rl.rewards.model import ModelReward
from fsdp_trainer.rl.rewards.reward import Reward
from fsdp_trainer.training.documents.read_texts import numbers_of_texts


@dataclass(frozen=True)
class RewardModel:
    """A model that computes one number per text. Not collective: each process has all weights."""

    model: Decoder
    tokenizer: TextTokenizer
    device: torch.device

    @cached_property
    def template(self) -> Template:
        return load_template(None, self.tokenizer)

    @property
    def longest(self) -> int:
        return self.model.config.max_position_embeddings

    def scores_of_answers(
        self,
        prompts: Sequence[list[dict[str, Any]]],
        answers: Sequence[str],
        tools: Sequence[list[dict[str, Any]] | None] | None = None,
    ) -> list[float]:
        """Return the score of each answer, rendered with its prompt by the model's chat template.

        prompts, tools: for each answer, the turns before it and the tools of its row.
        """
        given = tools or [None] * len(answers)
        rows = zip(prompts, answers, given, strict=True)
        return self.scores([self._written(*row) for row in rows])

    def _written(
        self, prompt: list[dict[str, Any]], answer: str, tools: list[dict[str, Any]] | None
    ) -> str:
        turns = [*prompt, {"role": "assistant", "content": answer}]
        return self.template.for_record(tools).finished(self.template.adapt(turns, tools), tools)

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Return the score of each text; special tokens in it are recognised as such.

        texts: prompt and answer as rendered by the chat template, including the end of the turn.
        """
        return self.scores_of_tokens([self.tokenizer.encode(text) for text in texts])

    def scores_of_tokens(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text, given as one token or more.

        Raises RunFailed for a text longer than the model's context.
        """
        return numbers_of_texts(self.model, texts, self.device)[:, 0].tolist()


def open_reward_model(
    source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> RewardModel:
    """Return the reward model of a run, a checkpoint or a Hugging Face folder.

    Raises UserError for a language model, and the errors of `load_model`.
    """
    path = Path(source).expanduser()
    model = load_model(path, device, dtype, scores=True)
    tokenizer = load_tokenizer(str(tokenizer_folder(path)))
    return RewardModel(model, tokenizer, torch.device(device))


def open_models(rewards: Sequence[Reward], device: torch.device) -> list[Reward]:
    return [_opened(one, device) if isinstance(one, ModelReward) else one for one in rewards]


def _opened(reward: ModelReward, device: torch.device) -> ModelReward:
    source = fetch(str(reward.source), key="objective.rewards: model: source")
    return replace(reward, scorer=open_reward_model(source, device, getattr(torch, reward.dtype)))
