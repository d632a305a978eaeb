"""The protocol for making answers to prompts, and answers of a model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from fsdp_trainer.generation.continuations import (
    Continuation,
    Generation,
    continue_all,
    generation_of,
    room_after,
)
from fsdp_trainer.generation.decoding import Decoding
from fsdp_trainer.generation.prompt_ranks import OneRank
from fsdp_trainer.generation.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    prompt: tokens. row: number of the prompt in the running order, unique in the run. sample: index
    of the answer among those to the prompt. longest: number of tokens at most; None:
    objective.max_new_tokens.
    """

    prompt: Sequence[int]
    row: int
    sample: int
    longest: int | None = None


@dataclass(frozen=True)
class SampledAnswer:
    """An answer of the model, or its answers over several turns.

    tokens: including the stop token that ended it. log_probabilities: log-probability of each token
    when it was sampled, at objective.temperature. finished: False if the answer was cut at the
    maximum length. version: number of optimizer steps done by the weights that made it. turns: for
    several turns, the numbers of tokens: the model's, then the environment's, and so on.
    """

    tokens: list[int]
    log_probabilities: list[float]
    finished: bool
    version: int
    turns: tuple[int, ...] = ()

    @property
    def own_turns(self) -> list[slice]:
        turns = self.turns or (len(self.tokens),)
        ends = list(accumulate(turns))
        return [slice(end - n, end) for end, n in zip(ends[::2], turns[::2], strict=True)]

    @property
    def own_tokens(self) -> int:
        return sum(self.turns[::2]) if self.turns else len(self.tokens)


class AnswerSampler(Protocol):
    """Makes answers to prompts."""

    def sample(
        self, requests: Sequence[Request], step: int, check: Callable[[], None]
    ) -> list[SampledAnswer]:
        """Return an answer to each request of this rank, which may have none. Collective.

        step: optimizer steps done so far. check: called from time to time, on all ranks together;
        may raise.
        """


@dataclass(frozen=True)
class ModelSampler:
    """Samples from a model that does not change; see AnswerSampler.

    samples: answers to each prompt. rows: number of answers that are generated at the same time.
    decoding: see Generation.
    """

    model: Any
    sampling: Sampling
    device: torch.device
    stop_ids: Collection[int]
    rows: int
    samples: int = 1
    ranks: OneRank = field(default_factory=OneRank)
    decoding: Decoding | None = None

    @torch.no_grad()
    def sample(
        self, requests: Sequence[Request], step: int, check: Callable[[], None]
    ) -> list[SampledAnswer]:
        generation = generation_of(self.model, self.sampling, self.device, self.decoding)
        how = self.samples, self.stop_ids, self.ranks
        return answer_all(generation, requests, step, *how, rows=self.rows, check=check)


def answer_all(
    generation: Generation,
    requests: Sequence[Request],
    version: int,
    samples: int,
    stop_ids: Collection[int],
    ranks: OneRank,
    **options: Any,
) -> list[SampledAnswer]:
    """Return an answer to each request. Collective if `ranks` is.

    samples: answers to each prompt, by which draws are numbered. options: of `continue_all`.
    """
    continuations = []
    for place, request in enumerate(requests):
        prompt = list(request.prompt)
        number = request.row * samples + request.sample
        room = room_after(generation.model, prompt)
        room = room if request.longest is None else min(room, request.longest)
        continuations.append(Continuation(prompt, generation.sampling, room, (place, number)))
    continue_all(generation, continuations, stop_ids, ranks, **options)
    return [as_answer(continuation, version) for continuation in continuations]


def as_answer(continuation: Continuation, version: int) -> SampledAnswer:
    stop = [] if continuation.stop is None else [continuation.stop]
    return SampledAnswer(
        [*continuation.tokens, *stop],
        continuation.log_probabilities,
        continuation.stop is not None,
        version,
    )
