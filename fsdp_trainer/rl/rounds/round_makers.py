"""Builders of what generates rollouts, from a run's settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.scoring import sharded_split
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.rl.environments.known_environments import KEY, EnvironmentSpec, find_environment
from fsdp_trainer.rl.rewards.reward import Reward
from fsdp_trainer.rl.rewards.table import make_rewards
from fsdp_trainer.rl.rollouts.answer_maker import AnswerMaker, AnswerPlayer, Player
from fsdp_trainer.rl.rollouts.episode_player import EpisodePlayer
from fsdp_trainer.rl.rollouts.sampler import AnswerSampler
from fsdp_trainer.rl.rounds.own_sampler import OwnSampler
from fsdp_trainer.rl.rounds.reward_scores import open_models
from fsdp_trainer.rl.rounds.rounds import RoundMaker
from fsdp_trainer.rl.rounds.server_rounds import ServerRounds
from fsdp_trainer.rl.serving.policy_server import ServedModel
from fsdp_trainer.rl.serving.policy_weights import PolicyWeights
from fsdp_trainer.rl.serving.server_sampler import ServerSampler
from fsdp_trainer.training.setup.run_setup import RunSetup

NO_PART = (1, 1)
"""Index and number of parts for a rank without rollouts, whose part is empty."""


@dataclass(frozen=True)
class RoundMakers:
    """Makes what generates rollouts. environment: None: an answer is one turn."""

    setup: RunSetup
    rewards: Sequence[Reward]
    environment: EnvironmentSpec | None

    @classmethod
    def of(cls, setup: RunSetup, scores: bool = True) -> "RoundMakers":
        """Return that of a run. Raises UserError.

        scores: False on a rank that scores no rollouts and needs no models for it.
        """
        choice = setup.cfg.objective
        entry = choice.environment
        environment = None if entry is None else find_environment(entry)
        rewards = make_rewards(choice.rewards)
        if environment and not (environment.rewards or rewards):
            reason = f"the environment {environment.title} gives no rewards.\n"
            use = (
                "Use  objective.rewards=[exact]  or another, or give it a method  reward(messages)"
            )
            raise UserError("nothing rewards the answers", KEY, reason + use)
        return cls(setup, open_models(rewards, setup.device) if scores else rewards, environment)

    @property
    def titles(self) -> list[str]:
        own = [self.environment.title] if self.environment and self.environment.rewards else []
        return [*own, *(reward.title for reward in self.rewards)]

    @property
    def _choice(self) -> ObjectiveChoice:
        return self.setup.cfg.objective

    @property
    def _is_first(self) -> bool:
        return self.setup.dims.coordinates["tensor"] == 0

    def on_ranks(self, model: Decoder) -> RoundMaker:
        setup, tokenizer = self.setup, self.setup.inputs.tokenizer
        split = sharded_split(setup.dims, setup.device)
        sampler = OwnSampler(setup.cfg, model, tokenizer, split, setup.device)
        player = self._player(sampler, model, gather, phases.enter)
        parts = split.part, split.parts
        maker = AnswerMaker(player, self.rewards, tokenizer, *parts, self._is_first)
        return RoundMaker(maker, self._choice)

    def by_server(
        self, model: Decoder, served: ServedModel, weights: PolicyWeights
    ) -> ServerRounds:
        """Return what generates with a server; of ranks with the same rows only the first does."""
        setup, tokenizer = self.setup, self.setup.inputs.tokenizer
        length = model.config.max_position_embeddings
        context = min(length, served.context or length)
        stop_ids = list(tokenizer.stop_ids)
        sampler = ServerSampler(self._choice, setup.cfg.run.seed, weights, stop_ids, context)
        player = self._player(sampler, model, lambda value: [value], lambda phase: None)
        split = sharded_split(setup.dims, setup.device)
        parts = (split.part, split.parts) if self._is_first else NO_PART
        maker = AnswerMaker(player, self.rewards, tokenizer, *parts, self._is_first)
        return ServerRounds(RoundMaker(maker, self._choice), sampler)

    def _player(
        self,
        sampler: AnswerSampler,
        model: Decoder,
        share: Callable[[Any], list[Any]],
        enter: Callable[[str], None],
    ) -> Player:
        """Return what plays rollouts. share, enter: see EpisodePlayer."""
        setup, longest = self.setup, self._choice.max_new_tokens
        if not self.environment:
            return AnswerPlayer(sampler, longest)
        turns = TurnTokens(setup.inputs.template, setup.inputs.tokenizer)
        room = min(setup.cfg.batch.seq_len, model.config.max_position_embeddings)
        options = self._choice, sampler, turns, room, self._is_first, share, enter
        return EpisodePlayer(self.environment, *options)
