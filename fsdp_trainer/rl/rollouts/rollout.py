"""A rollout with its rewards, and its form in a checkpoint."""

import base64
import io
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from fsdp_trainer.rl.rollouts.episode import OpenEpisode
from fsdp_trainer.rl.rollouts.sampler import SampledAnswer

HIDDEN_TOOLS = (
    "the environment has tools, which the template does not show: the model does not see their "
    "descriptions"
)


class EpisodeFacts(NamedTuple):
    """Facts of a rollout with an environment. seconds: time in the environment's methods.

    hides_tools: True if the template does not show the environment's tools.
    """

    wrong_calls: int
    seconds: float
    failure: str | None
    hides_tools: bool = False


@dataclass(frozen=True)
class Rollout:
    """An answer to a prompt, with its rewards.

    row, sample: see Request. reward: weighted sum of the scores, used for training; NaN if it
    failed and is not used. scores: unweighted score of each reward. turn_rewards: one for each of
    the model's turns, whose sum is `reward`, or none. episode: facts of one with an environment.
    """

    row: int
    sample: int
    prompt: list[int]
    answer: SampledAnswer
    reward: float
    scores: list[float]
    turn_rewards: tuple[float, ...] = ()
    episode: EpisodeFacts | None = None

    @property
    def is_used(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer.tokens)


def encode_rollouts(rollouts: Sequence[Rollout], open_ones: Sequence[OpenEpisode] = ()) -> str:
    """Encode rollouts as text for a checkpoint; `decode_rollouts` decodes it.

    open_ones: rollouts of the same step that have not ended.
    """
    arrays = {
        "numbers": np.array(
            [[r.row, r.sample, r.answer.finished, r.answer.version] for r in rollouts]
        ),
        "rewards": np.array([[r.reward, *r.scores] for r in rollouts]),
        "sizes": np.array([[len(r.prompt), len(r.answer.tokens)] for r in rollouts]),
        "tokens": np.array([t for r in rollouts for t in (*r.prompt, *r.answer.tokens)], np.int32),
        "sampled": np.array([p for r in rollouts for p in r.answer.log_probabilities], np.float32),
    }
    if any(r.episode for r in rollouts):
        episodes = [[r.answer.turns, r.turn_rewards, r.episode] for r in rollouts]
        arrays["episodes"] = np.array(json.dumps(episodes))
    if open_ones:
        arrays["open"] = np.array(json.dumps(list(open_ones), default=str))
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()


def decode_rollouts(text: str) -> tuple[list[Rollout], list[OpenEpisode]]:
    stored = np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))))
    tokens, sampled = iter(stored["tokens"].tolist()), iter(stored["sampled"].tolist())
    rollouts = []
    episodes = iter(json.loads(str(stored["episodes"])) if "episodes" in stored.files else ())
    columns = [stored[name].tolist() for name in ("numbers", "rewards", "sizes")]
    sizes = zip(*columns, strict=True)
    for (row, sample, finished, version), (reward, *scores), (before, length) in sizes:
        prompt = list(islice(tokens, before))
        answered, scored = list(islice(tokens, length)), list(islice(sampled, length))
        turns, rewards_of_turns, facts = next(episodes, ((), (), None))
        answer = SampledAnswer(answered, scored, bool(finished), version, tuple(turns))
        episode = EpisodeFacts(*facts) if facts else None
        rollouts.append(
            Rollout(row, sample, prompt, answer, reward, scores, tuple(rewards_of_turns), episode)
        )
    return rollouts, json.loads(str(stored["open"])) if "open" in stored.files else []
