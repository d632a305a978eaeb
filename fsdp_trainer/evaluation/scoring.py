"""Likelihoods and continuations of texts by a model, for evaluations.

Requests are divided among the ranks. Every rank passes the same requests and gets all results.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import gather, to_device
from fsdp_trainer.data.media.media import MediaReader, SampleMedium
from fsdp_trainer.generation.continuations import IDLE_PROMPT, IsOver, generate_tokens
from fsdp_trainer.generation.key_value_cache import Prompts
from fsdp_trainer.generation.prompt_media import PromptMedia, packed_media
from fsdp_trainer.generation.prompt_ranks import OneRank, OwnPrompts
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.parallel.dims import Dims

BATCH_TOKENS = 4096
"""Largest number of tokens in a forward; a longer request is computed alone."""
Metrics = dict[str, dict[str, float]]
"""Metrics by task and name."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Ending(NamedTuple):
    """A text's tokens; the likelihood of the last `length` of them is requested.

    media: those that some of the tokens stand for.
    """

    tokens: tuple[int, ...]
    length: int
    media: tuple[SampleMedium, ...] = ()


class Prompt(NamedTuple):
    """The tokens of a prompt, and the media that some of them stand for."""

    tokens: list[int]
    media: tuple[SampleMedium, ...] = ()


class Likelihood(NamedTuple):
    """The log-likelihood of an ending. is_greedy: each of its tokens is the likeliest."""

    total: float
    is_greedy: bool


IDLE = Ending((*IDLE_PROMPT, 0), 1)
"""The request of a rank that has none left but must join the others' collective forwards."""


@dataclass
class WorkSplit:
    """Division of requests among the ranks. part: index of this rank's part, of `parts`."""

    part: int = 0
    parts: int = 1
    ranks: OneRank = field(default_factory=OneRank)


def whole_copies() -> WorkSplit:
    if not dist.is_initialized():
        return WorkSplit()
    return WorkSplit(dist.get_rank(), dist.get_world_size())


def sharded_split(dims: Dims, device: torch.device) -> WorkSplit:
    """Return the split over ranks that shard one model: every forward is collective.

    The ranks of a tensor group and those of a pipeline compute the same requests.
    """
    own = [name for name in dims.sizes if name not in TOGETHER]
    sizes = [dims.sizes[name] for name in own]
    place = [dims.coordinates[name] for name in own]
    part = int(np.ravel_multi_index(place, sizes))
    groups = [group for name in TOGETHER if (group := dims.group(name)) is not None]
    return WorkSplit(part, int(np.prod(sizes)), GroupedPrompts(device, groups))


TOGETHER = ("tensor", "pipeline")
"""Dimensions whose ranks compute the same requests."""


class GroupedPrompts(OwnPrompts):
    """Ranks that continue prompts of their own, or of their groups.

    groups: process groups whose ranks all continue the same prompts, with the first rank's tokens.
    """

    def __init__(self, device: torch.device, groups: list[dist.ProcessGroup]):
        super().__init__(device)
        self.groups = groups

    def tokens(self, chosen: Tensor) -> Tensor:
        """See OneRank. Collective."""
        chosen = chosen.contiguous()
        for group in self.groups:
            dist.broadcast(chosen, group=group, group_src=0)
        return chosen


class Scorer:
    """A model that answers requests, of which each rank computes a part.

    model: has `next_logits` and `config`, like a Decoder. rows: number of requests that a rank
    computes at a time. check: called before each batch on all ranks; may raise, on all of them.
    media: reads media; None for a model that reads only text.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        device: torch.device,
        split: WorkSplit | None = None,
        check: Callable[[], None] = lambda: None,
        media: MediaReader | None = None,
    ):
        self.media = media
        self.model, self.rows, self.device = model, rows, device
        self.split = split or whole_copies()
        self.check = check

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def likelihoods(self, endings: Sequence[Ending]) -> list[Likelihood]:
        """Return the likelihood of each ending. Collective.

        Endings with media are computed together: all ranks then go through the model's tower.
        """
        results: dict[int, Likelihood] = {}
        for are_shown in (False, True):
            numbers = [i for i, one in enumerate(endings) if bool(one.media) == are_shown]
            if numbers:
                some = [endings[i] for i in numbers]
                work = partial(self.own_likelihoods, idle=some[0] if are_shown else IDLE)
                scores = self.compute_in_parts(some, work, lambda ending: len(ending.tokens))
                results.update(zip(numbers, scores, strict=True))
        return [results[i] for i in range(len(endings))]

    def continuations(
        self,
        prompts: Sequence[Prompt],
        stop_ids: Collection[int],
        sampling: Sampling,
        is_over: IsOver,
    ) -> list[list[int]]:
        """Return the tokens generated after each prompt. Collective.

        All prompts have media, or none has: see `likelihoods`.
        """
        idle = prompts[0] if prompts and prompts[0].media else Prompt(IDLE_PROMPT)

        def generate(own: Sequence[Prompt]) -> list[list[int]]:
            answers = generate_tokens(
                self.model,
                [prompt.tokens for prompt in own],
                stop_ids,
                sampling,
                rows=self.rows,
                device=self.device,
                ranks=self.split.ranks,
                check=self.check,
                is_over=is_over,
                media=[self.media_of(prompt.media) for prompt in own],
                idle=(idle.tokens, self.media_of(idle.media)),
            )
            return [tokens for [tokens] in answers]

        return self.compute_in_parts(prompts, generate, lambda prompt: len(prompt.tokens))

    def media_of(self, media: Sequence[SampleMedium]) -> PromptMedia | None:
        return PromptMedia.of_files(self.media.processor, media) if self.media else None

    def compute_in_parts(
        self,
        items: Sequence[Item],
        work: Callable[[Sequence[Item]], Sequence[Result]],
        weight: Callable[[Item], int],
    ) -> list[Result]:
        """Return the result of `work` for each item; every rank computes a part. Collective.

        weight: returns the cost of an item; all parts have items of about the same costs.
        """
        split = self.split
        order = sorted(range(len(items)), key=lambda i: -weight(items[i]))
        computed = list(work([items[i] for i in order[split.part :: split.parts]]))
        if not dist.is_initialized():
            return unsorted(order, {0: computed}, 1)
        return unsorted(order, dict(gather((split.part, computed))), split.parts)

    def own_likelihoods(self, endings: Sequence[Ending], idle: Ending = IDLE) -> list[Likelihood]:
        """Return the likelihood of each ending.

        Endings that differ only in their last token share their computation. idle: computed by a
        rank that has none left.
        """
        order = sorted(
            range(len(endings)), key=lambda i: (-len(endings[i].tokens), endings[i].tokens)
        )
        results = [Likelihood(0.0, True)] * len(endings)
        batches = self.batches([len(endings[i].tokens) for i in order])
        for number in range(self.split.ranks.most(len(batches))):
            self.check()
            if number >= len(batches):
                self.score([idle])
                continue
            numbers = [order[i] for i in batches[number]]
            scores = self.score([endings[i] for i in numbers])
            for i, score in zip(numbers, scores, strict=True):
                results[i] = score
        return results

    def batches(self, lengths: list[int]) -> list[list[int]]:
        """Return the indices of the texts in each batch, in order. lengths: tokens of each text."""
        batches: list[list[int]] = []
        size = 0
        for number, length in enumerate(lengths):
            full = not batches or len(batches[-1]) == self.rows or size + length > BATCH_TOKENS
            if full:
                batches.append([])
                size = 0
            batches[-1].append(number)
            size += length
        return batches

    @torch.no_grad()
    def score(self, endings: list[Ending]) -> list[Likelihood]:
        """Return the likelihood of each ending, in one forward over texts packed into one row."""
        device = self.device
        different = list(dict.fromkeys((tokens[:-1], media) for tokens, _, media in endings))
        texts = [tokens for tokens, _ in different]
        lengths = [len(tokens) for tokens in texts]
        starts = dict(zip(different, np.cumsum([0, *lengths]), strict=False))
        index = []
        for tokens, length, media in endings:
            end = starts[tokens[:-1], media] + len(tokens) - 1
            index.append(np.arange(end - length, end))
        packed = np.concatenate([np.array(tokens, np.int64) for tokens in texts])
        positions = np.concatenate([np.arange(length) for length in lengths])
        logits = self.model.next_logits(
            to_device(packed[None], device),
            to_device(positions[None], device),
            Prompts(lengths, device),
            to_device(np.concatenate(index), device),
            **self._image_inputs(different),
        )
        targets = np.concatenate([np.array(tokens[len(tokens) - n :]) for tokens, n, _ in endings])
        target = to_device(targets.astype(np.int64), device)[:, None]
        likelihood = logits.float().log_softmax(-1).gather(1, target)[:, 0]
        greedy = logits.argmax(-1) == target[:, 0]
        ending_lengths = [length for _, length, _ in endings]
        sums = [part.sum().item() for part in likelihood.cpu().split(ending_lengths)]
        all_greedy = [bool(part.all()) for part in greedy.cpu().split(ending_lengths)]
        return [Likelihood(*score) for score in zip(sums, all_greedy, strict=True)]

    def _image_inputs(
        self, texts: Sequence[tuple[tuple[int, ...], tuple[SampleMedium, ...]]]
    ) -> dict[str, Any]:
        shown = [self.media_of(media) for _, media in texts]
        inputs = packed_media(self.model, [tokens for tokens, _ in texts], shown, self.device)
        return {} if inputs is None else {"media": inputs}


def unsorted(order: list[int], computed: dict[int, list[Result]], parts: int) -> list[Result]:
    """Return results in the order of the items.

    computed: results of each part. order: indices of all items, which were dealt to the parts in
    turn.
    """
    results: list[Any] = [None] * len(order)
    for part, some in computed.items():
        for i, result in zip(order[part::parts], some, strict=True):
            results[i] = result
    return results
