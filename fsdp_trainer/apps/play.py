"""Rollouts of a loaded model with an environment, in this process and outside of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.templates.turn_tokens import TurnTokens
from fsdp_trainer.environments.known_environments import find_environment
from fsdp_trainer.generation.continuations import generation_of
from fsdp_trainer.generation.prompt_ranks import OneRank
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.rollouts.episode import Episode
from fsdp_trainer.rollouts.episode_player import EpisodePlayer
from fsdp_trainer.rollouts.sampler import Request, SampledAnswer, answer_all


@dataclass(frozen=True)
class SpeakerSampler:
    """Samples from a loaded model; see AnswerSampler."""

    speaker: Speaker
    sampling: Sampling
    rows: int

    def sample(
        self, requests: Sequence[Request], step: int, check: Callable[[], None]
    ) -> list[SampledAnswer]:
        """Return an answer to each request."""
        model, tokenizer = self.speaker.model, self.speaker.tokenizer
        device = model.lm_head.weight.device
        generation = generation_of(model, self.sampling, device, self.speaker.decoding)
        how = 1, tokenizer.stop_ids, OneRank()
        return answer_all(generation, requests, step, *how, rows=self.rows)


def play(
    speaker: Speaker, rows: Sequence[dict[str, Any]], choice: ObjectiveChoice
) -> list[Episode]:
    """Return one rollout for each data row, with the likeliest tokens.

    rows: questions as stores keep them; see DataQuestion.as_json. choice: has the environment.
    """
    assert choice.environment is not None
    sampling = Sampling(choice.max_new_tokens, log_probabilities=True)
    player = EpisodePlayer(
        find_environment(choice.environment),
        choice,
        SpeakerSampler(speaker, sampling, choice.answer_rows),
        TurnTokens(speaker.template, speaker.tokenizer),
        speaker.model.config.max_position_embeddings,
        share=lambda value: [value],
    )
    requests = [Request([], i, 0) for i in range(len(rows))]
    return player.play(requests, dict(enumerate(rows)))
