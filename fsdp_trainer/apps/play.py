"""Rollouts of a loaded model with an environment, in this process and outside of a run."""

from collections.abc import Sequence
from typing import Any

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.rl.environments.known_environments import find_environment
from fsdp_trainer.rl.rollouts.episode import Episode
from fsdp_trainer.rl.rollouts.episode_player import EpisodePlayer
from fsdp_trainer.rl.rollouts.sampler import ModelSampler, Request


def play(
    speaker: Speaker, rows: Sequence[dict[str, Any]], choice: ObjectiveChoice
) -> list[Episode]:
    """Return one rollout for each data row, with the likeliest tokens.

    rows: questions as stores keep them; see DataQuestion.as_json. choice: has the environment.
    """
    assert choice.environment is not None
    sampling = Sampling(choice.max_new_tokens, log_probabilities=True)
    model, tokenizer = speaker.model, speaker.tokenizer
    sampler = ModelSampler(
        model,
        sampling,
        model.lm_head.weight.device,
        tokenizer.stop_ids,
        choice.answer_rows,
        decoding=speaker.decoding,
    )
    player = EpisodePlayer(
        find_environment(choice.environment),
        choice,
        sampler,
        TurnTokens(speaker.template, speaker.tokenizer),
        speaker.model.config.max_position_embeddings,
        share=lambda value: [value],
    )
    requests = [Request([], i, 0) for i in range(len(rows))]
    return player.play(requests, dict(enumerate(rows)))
