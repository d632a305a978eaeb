"""Generation of continuations of many prompts at once, with a cache of keys and values."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.generation.decoding import Decoding
from fsdp_trainer.generation.key_value_cache import KeyValueCache, Prompts
from fsdp_trainer.generation.logit_rules import with_rules
from fsdp_trainer.generation.prompt_media import PromptMedia, media_inputs
from fsdp_trainer.generation.prompt_ranks import OneRank
from fsdp_trainer.generation.recorded_decoding import (
    LEAST_TOKENS,
    RecordedDecoding,
    can_record,
    try_to_record,
)
from fsdp_trainer.generation.sampling import (
    Sampling,
    TokenScore,
    choose,
    log_probabilities,
    random_numbers,
    token_scores,
)
from fsdp_trainer.models.decoder import Decoder, MediaInputs
from fsdp_trainer.models.hf.own_cache import OwnCache

ROWS = 32
"""Number of answers that are generated at the same time by default."""
IDLE_PROMPT = [0]
"""The prompt of a rank that has none left but must join the others' collective forwards."""
Idle = tuple[list[int], PromptMedia | None]
"""Such a prompt, and its media: it has some if all others have, since a tower is sharded, too."""
IDLE: Idle = IDLE_PROMPT, None
AT_ONCE = 256
"""Tokens of a prompt whose logits exist at the same time."""

IsOver = Callable[[list[int]], bool]
"""A function of an answer's tokens, called after each new one, that returns True to end it."""


def never(tokens: list[int]) -> bool:
    return False


class Continuation:
    """The continuation of a prompt: `tokens`, without the stop token that ended it.

    room: largest number of tokens that it may have. place: indices of its prompt and of its sample.
    media: of the prompt.
    stop: the stop token that ended it, or None. log_probabilities: of all tokens and of the stop
    token, and scores: of all tokens, if `sampling` asks for them.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        room: int,
        place: tuple[int, int] = (0, 0),
        media: PromptMedia | None = None,
    ):
        self.prompt = prompt
        self.place = place
        self.media = media
        self.room = min(sampling.max_tokens, room)
        self.tokens: list[int] = []
        self.stop: int | None = None
        self.log_probabilities: list[float] = []
        self.scores: list[TokenScore] = []
        self.is_done = self.room <= 0
        self.numbers = None
        if sampling.temperature > 0:
            numbers = random_numbers(sampling.seed, prompt, place[1], max(1, self.room))
            self.numbers = numbers

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def number(self) -> float:
        """Return the random number for the next token; any number once the answer is done."""
        assert self.numbers is not None
        return float(self.numbers[min(len(self.tokens), len(self.numbers) - 1)])

    def end(self) -> None:
        """End the answer before it is full or has a stop token."""
        self.is_done = True

    def add(self, token: int, stop_ids: Collection[int], is_over: IsOver) -> None:
        if self.is_done:
            return
        if token in stop_ids:
            self.is_done = True
            self.stop = token
            return
        self.tokens.append(token)
        self.is_done = len(self.tokens) == self.room or is_over(self.tokens)


class Generation:
    """Generation of several answers together, one token each with every forward.

    Every step is exactly one forward, whatever the answers, so ranks that take the same number of
    steps make the same number of forwards.
    """

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling,
        device: torch.device,
        decoding: Decoding | None = None,
    ):
        """decoding: of this model, for a caller that generates again with the same weights."""
        self.model = model
        self.decoding = decoding or Decoding(model)
        self.sampling = sampling
        self.device = device
        scaling = model.config.rope_scaling or {}
        is_long = scaling.get("rope_type") == "longrope"
        # past this length all keys are rotated differently, also those in the cache
        self.long_from = scaling["original_max_position_embeddings"] if is_long else None
        self.recorded: RecordedDecoding | None = None
        self.records = True  # until a recording fails: the next generation tries again

    def run(
        self,
        answers: list[Continuation],
        stop_ids: Collection[int],
        ranks: OneRank,
        is_over: IsOver = never,
    ) -> Iterator[list[Continuation]]:
        """Continue the answers until those of all ranks are done; yield them after every step."""
        rows = answers
        logits = self.start(rows)
        while True:
            texts = [(answer.prompt, answer.tokens) for answer in rows]
            changed = with_rules(logits, texts, self.sampling, stop_ids)
            chosen = ranks.tokens(choose(changed, self.random_column(rows), self.sampling))
            self.record_log_probabilities(rows, logits, chosen)
            for answer, token in zip(rows, chosen.tolist(), strict=True):
                answer.add(token, stop_ids, is_over)
            yield answers
            unfinished = [i for i, answer in enumerate(rows) if not answer.is_done]
            if not ranks.most(len(unfinished)):
                return
            if len(unfinished) <= len(rows) // 2:
                remaining = unfinished or [0]
                self.cache.keep(remaining)
                self.recorded = None
                rows = [rows[i] for i in remaining]
                chosen = chosen[remaining]
            logits = self.step(rows, chosen, is_idle=not unfinished)

    def record_log_probabilities(
        self, rows: list[Continuation], logits: Tensor, chosen: Tensor
    ) -> None:
        if self.sampling.alternatives is not None:
            scores = token_scores(logits, chosen, self.sampling.alternatives)
            for answer, score in zip(rows, scores, strict=True):
                if not answer.is_done:
                    answer.scores.append(score)
        if not self.sampling.log_probabilities:
            return
        values = log_probabilities(logits, chosen, self.sampling).tolist()
        for answer, value in zip(rows, values, strict=True):
            if not answer.is_done:
                answer.log_probabilities.append(value)

    def start(self, rows: list[Continuation]) -> Tensor:
        """Fill the cache with the rows' tokens; return the next logits, [rows, vocabulary].

        Rows with the same tokens are computed once.
        """
        texts = [(*answer.prompt, *answer.tokens) for answer in rows]
        different = list(dict.fromkeys(texts))
        number = {text: i for i, text in enumerate(different)}
        lengths = [len(text) for text in different]
        ends = list(accumulate(lengths))
        width = max(lengths)
        capacity = width + max(answer.room - len(answer.tokens) for answer in rows)
        names = list(self.model.blocks())
        row_lengths = [len(text) for text in texts]
        self.cache = KeyValueCache(names, row_lengths, capacity, self.device)
        self.recorded = None
        firsts = [ends[number[text]] - len(text) for text in texts]
        self.cache.expect_prompts(firsts)
        tokens = np.concatenate([np.array(text, np.int64) for text in different])
        positions = np.concatenate([np.arange(length) for length in lengths])
        last = [ends[number[text]] - 1 for text in texts]
        return self.model.next_logits(
            to_device(tokens[None], self.device),
            to_device(positions[None], self.device),
            Prompts(lengths, self.device),
            to_device(np.array(last, np.int64), self.device),
            self.cache.blocks,
        )

    def step(self, rows: list[Continuation], chosen: Tensor, is_idle: bool) -> Tensor:
        """Return the logits after one more token in each row: [rows, vocabulary].

        is_idle: all rows are done, but not those of other ranks.
        """
        if is_idle:
            return self.start([Continuation(IDLE_PROMPT, self.sampling, 1)])
        if any(row.length - 1 == self.long_from for row in rows if not row.is_done):
            return self.start(rows)
        layout = self.cache.next_layout()
        if self.recorded is not None:
            return self.recorded.next_logits(chosen, self.cache.end)
        copy = self.decoding.model_for(len(rows), self.cache.capacity - self.cache.end)
        if copy is not None:
            return copy.next_logits(chosen[:, None], layout, self.cache.blocks)
        index = torch.arange(len(rows), device=self.device)
        caches = self.cache.blocks
        logits = self.model.next_logits(chosen[:, None], layout.positions, layout, index, caches)
        remaining = self.cache.capacity - self.cache.end
        if self.records and remaining >= LEAST_TOKENS and can_record(self.model, self.device):
            self.recorded = try_to_record(self.model, self.cache, chosen, logits)
            self.records = self.recorded is not None
        return logits

    def random_column(self, rows: list[Continuation]) -> Tensor | None:
        """Return the rows' random numbers, [rows, 1] float64; None at temperature 0."""
        if self.sampling.temperature == 0:
            return None
        return to_device(np.array([[answer.number()] for answer in rows]), self.device)


class TransformersGeneration(Generation):
    """Generation with transformers' own cache: rows are padded on the left to one length."""

    cache: Any

    def start(self, rows: list[Continuation]) -> Tensor:
        texts = [[*answer.prompt, *answer.tokens] for answer in rows]
        width = max(map(len, texts))
        lengths = np.array([len(text) for text in texts])
        mask = np.arange(width) >= width - lengths[:, None]
        tokens = np.stack([np.pad(text, (width - len(text), 0), mode="edge") for text in texts])
        media, shift = media_inputs(self.model, rows, texts, width, self.device)
        self.cache = OwnCache(to_device(mask.astype(np.int64), self.device), shift)
        return self.next(to_device(tokens.astype(np.int64), self.device), media)

    def step(self, rows: list[Continuation], chosen: Tensor, is_idle: bool) -> Tensor:
        if is_idle:
            return self.start([Continuation(IDLE_PROMPT, self.sampling, 1)])
        if self.cache.is_lost:
            return self.start(rows)
        self.cache.grow()
        return self.next(chosen[:, None])

    def next(self, tokens: Tensor, media: MediaInputs | None = None) -> Tensor:
        """Return the logits after new tokens, [rows, new tokens]: [rows, vocabulary]."""
        count = tokens.shape[1]
        positions = self.cache.positions(count)
        last = torch.arange(len(tokens), device=self.device) * count + count - 1
        model: Any = self.model
        return model.next_logits(tokens, positions, None, last, self.cache, media)


def generation_of(
    model: Decoder,
    sampling: Sampling,
    device: torch.device,
    decoding: Decoding | None = None,
) -> Generation:
    if model.config.by_transformers:
        return TransformersGeneration(model, sampling, device, decoding)
    return Generation(model, sampling, device, decoding)


def stream_tokens(
    model: Decoder,
    prompt: list[int],
    stop_ids: Collection[int] = (),
    sampling: Sampling | None = None,
    decoding: Decoding | None = None,
    media: PromptMedia | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue one prompt as they are generated.

    decoding: see Generation. media: of the prompt.
    """
    sampling = sampling or Sampling()
    device = model.lm_head.weight.device
    answer = Continuation(prompt, sampling, room_after(model, prompt), media=media)
    if answer.is_done:
        return
    generation = generation_of(model, sampling, device, decoding)
    count = 0
    for _ in generation.run([answer], stop_ids, OneRank()):
        yield from answer.tokens[count:]
        count = len(answer.tokens)


def generate_tokens(
    model: Decoder,
    prompts: list[list[int]],
    stop_ids: Collection[int] = (),
    sampling: Sampling | None = None,
    *,
    rows: int = ROWS,
    device: torch.device | None = None,
    ranks: OneRank | None = None,
    check: Callable[[], None] = lambda: None,
    is_over: IsOver = never,
    media: Sequence[PromptMedia | None] | None = None,
    idle: Idle = IDLE,
) -> list[list[list[int]]]:
    """Return for each prompt its answers, each a list of tokens.

    media: of each prompt; None: no prompt has any. rows: number of answers that are generated at
    the same time; it changes them only by rounding. device: the one that the model computes on, by
    default that of its weights. check: called before each batch; may raise, on all ranks. is_over:
    ends an answer after a token, which is kept. idle: see Idle. Collective if `ranks` is.
    """
    sampling = sampling or Sampling()
    ranks = ranks or OneRank()
    device = device or model.lm_head.weight.device
    of_prompts = media or [None] * len(prompts)
    answers = [
        Continuation(prompt, sampling, room_after(model, prompt), (number, sample), shown)
        for number, (prompt, shown) in enumerate(zip(prompts, of_prompts, strict=True))
        for sample in range(sampling.samples)
    ]
    generation = generation_of(model, sampling, device)
    options: Any = {"rows": rows, "check": check, "is_over": is_over, "idle": idle}
    continue_all(generation, answers, stop_ids, ranks, **options)
    results: list[list[list[int]]] = [[] for _ in prompts]
    for answer in answers:
        results[answer.place[0]].append(answer.tokens)
    return results


def continue_all(
    generation: Generation,
    answers: list[Continuation],
    stop_ids: Collection[int],
    ranks: OneRank,
    *,
    rows: int = ROWS,
    check: Callable[[], None] = lambda: None,
    is_over: IsOver = never,
    idle: Idle = IDLE,
) -> None:
    # sorted, so that the answers of a batch have about the same length
    waiting = sorted((a for a in answers if not a.is_done), key=lambda answer: -answer.length)
    alike = groupby(waiting, lambda answer: length_to_match(generation.model, answer.length))
    batches = [batch for _, group in alike for batch in cut(list(group), rows)]
    for number in range(ranks.most(len(batches))):
        check()
        is_idle = number >= len(batches)
        nothing = Continuation(idle[0], generation.sampling, 1, media=idle[1])
        batch = [nothing] if is_idle else batches[number]
        for _ in generation.run(batch, stop_ids, ranks, is_over):
            pass


@torch.no_grad()
def prompt_scores(model: Decoder, prompt: list[int], alternatives: int) -> list[TokenScore]:
    """Return the scores of a prompt's tokens but the first. The logits never exist whole."""
    device = model.lm_head.weight.device
    tokens = to_device(np.array(prompt, np.int64), device)
    positions = torch.arange(len(prompt), device=device)
    layout = Prompts([len(prompt)], device)
    states = model.inference_hidden(tokens[None], positions[None], layout)[0, :-1]
    scored = zip(states.split(AT_ONCE), tokens[1:].split(AT_ONCE), strict=True)
    parts = [token_scores(model.logits_of(part), own, alternatives) for part, own in scored]
    return [score for part in parts for score in part]


def length_to_match(model: Decoder, length: int) -> int:
    """Return the length that all texts generated with one of this length must have; 0: any.

    Padding would change states of a model that do not come from attention alone.
    """
    config = model.config
    return 0 if config.packs and not config.document_layers else length


def cut(answers: list[Continuation], rows: int) -> Iterator[list[Continuation]]:
    for i in range(0, len(answers), rows):
        yield answers[i : i + rows]


def room_after(model: Decoder, prompt: list[int]) -> int:
    assert prompt, "a prompt needs a token to begin with"
    return model.config.max_position_embeddings - len(prompt)
