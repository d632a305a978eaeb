"""Computation of answers to many requests at once, by one model in one thread.

Each request is a generation with a cache of its own; requests that wait together and have the same
settings share one. All generations advance by a token in turn, so that no request
waits for the end of another.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import torch

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.data.tokens.text_stream import TextStream
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.generation.continuations import (
    Continuation,
    generation_of,
    length_to_match,
    prompt_scores,
    room_after,
)
from fsdp_trainer.generation.prompt_media import PromptMedia
from fsdp_trainer.generation.prompt_ranks import OneRank
from fsdp_trainer.generation.sampling import Sampling, TokenScore

POLL_SECONDS = 0.2
"""Seconds between two checks of an idle engine whether it has been closed."""


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer's text.

    index: of the answer. finish: `stop` or `length` in the last. scores: of its tokens.
    """

    index: int
    text: str
    finish: str | None = None
    scores: tuple[TokenScore, ...] = ()


def joined(pieces: list[AnswerPiece]) -> AnswerPiece:
    text = "".join(piece.text for piece in pieces)
    scores = tuple(score for piece in pieces for score in piece.scores)
    return AnswerPiece(pieces[-1].index, text, pieces[-1].finish, scores)


@dataclass(frozen=True)
class PromptScores:
    """The scores of a prompt's tokens; the first has none. first: index of its first answer."""

    first: int
    scores: list[TokenScore | None]


@dataclass(frozen=True)
class EngineError:
    """The reason why a request gets no further answer."""

    message: str


Event = AnswerPiece | PromptScores | EngineError


@dataclass
class ChatJob:
    """A prompt of a request. send: called by the engine's thread with each event, in order."""

    prompt: list[int]
    sampling: Sampling
    stops: list[str]
    send: Callable[[Event], None]
    media: PromptMedia | None = None
    """The media of the prompt."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    first: int = 0
    """Index of the first answer among those of the request."""
    goes_on: bool = False
    """True if an answer continues the prompt's text."""
    scores_prompt: bool = False
    """True if the scores of the prompt's tokens are wanted."""
    tokens: int = 0
    """Number of tokens generated so far, in all samples."""
    is_cancelled: bool = False
    """True if the answer is no longer wanted. Any thread may set it."""


class AnswerText:
    """The growing text of a continuation, up to a stop string."""

    def __init__(
        self, job: ChatJob, index: int, continuation: Continuation, tokenizer: TextTokenizer
    ):
        self.job = job
        self.index = index
        self.continuation = continuation
        self._stream = TextStream(tokenizer)
        if job.goes_on:
            self._stream.follow(job.prompt)
        self._unsent = ""
        self._scores: list[TokenScore] = []  # of tokens whose text is not sent yet
        self._count = 0
        self.is_finished = False

    def advance(self) -> None:
        continuation = self.continuation
        if self.is_finished:
            return
        if self.job.is_cancelled:
            continuation.end()
            self.is_finished = True
            return
        new = continuation.tokens[self._count :]
        self.job.tokens += len(new)
        self._scores += continuation.scores[self._count : len(continuation.tokens)]
        self._count += len(new)
        text = self._unsent + self._stream.add(new)
        if continuation.is_done:
            text += self._stream.finish()
        stops = self.job.stops if self._count > self.job.sampling.min_tokens else []
        at_stop = first_stop(stops, text)
        finish = None
        if at_stop is not None:
            piece = text[:at_stop]
            continuation.end()
            finish = "stop"
        elif continuation.is_done:
            piece = text
            finish = "length" if len(continuation.tokens) >= continuation.room else "stop"
        else:
            piece = settled_text(text, stops)
            self._unsent = text[len(piece) :]
        self.is_finished = finish is not None
        if piece or finish:
            scores, self._scores = tuple(self._scores), []
            index = self.job.first + self.index
            self.job.send(AnswerPiece(index, piece, finish, scores))


def first_stop(stops: list[str], text: str) -> int | None:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=None)


def settled_text(text: str, stops: list[str]) -> str:
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size]
    return text


@dataclass
class ActiveGeneration:
    """Answers that are computed together, and their remaining steps."""

    answers: list[AnswerText]
    steps: Iterator[list[Continuation]] = field(default_factory=lambda: iter(()))

    def step(self) -> bool:
        is_over = next(self.steps, None) is None
        for answer in self.answers:
            answer.advance()
        return not is_over

    def fail(self, message: str) -> None:
        for job in {id(answer.job): answer.job for answer in self.answers}.values():
            job.send(EngineError(message))


class Engine:
    """A thread that computes jobs, at most `rows` answers at the same time."""

    def __init__(self, speaker: Speaker, rows: int):
        self.speaker = speaker
        self.rows = rows
        self._arrived: queue.Queue[ChatJob] = queue.Queue()
        self._waiting: list[ChatJob] = []
        self._active: list[ActiveGeneration] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: ChatJob) -> None:
        """Queue a job. Any thread may call it."""
        self._arrived.put(job)

    def close(self) -> None:
        """End all answers. Any thread may call it, also from a signal handler."""
        self._closing.set()

    def join(self) -> None:
        self._thread.join()

    @property
    def is_idle(self) -> bool:
        return not (self._active or self._waiting or self._arrived.qsize())

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing.is_set():
                self._receive()
                self._begin()
                self._active = [one for one in self._active if self._step(one)]
        for active in self._active:
            active.fail("the server is closing")
        self._receive()
        for job in self._waiting:
            job.send(EngineError("the server is closing"))

    def _receive(self) -> None:
        """Move arrived jobs to the waiting ones; when idle, wait up to POLL_SECONDS for one."""
        is_idle = not (self._active or self._waiting or self._closing.is_set())
        with suppress(queue.Empty):
            if is_idle:
                self._waiting.append(self._arrived.get(timeout=POLL_SECONDS))
            while True:
                self._waiting.append(self._arrived.get_nowait())

    def _begin(self) -> None:
        """Start the jobs that fit in `rows`; those with equal settings share a generation."""
        self._waiting = [job for job in self._waiting if not job.is_cancelled]
        used = sum(len(active.answers) for active in self._active)
        groups: dict[tuple[Sampling, frozenset[int], int], list[ChatJob]] = {}
        while self._waiting:
            job = self._waiting[0]
            if used and used + job.sampling.samples > self.rows:
                break
            used += job.sampling.samples
            self._waiting.pop(0)
            length = length_to_match(self.speaker.model, len(job.prompt))
            key = job.sampling.shared, job.stop_ids, length
            groups.setdefault(key, []).append(job)
        self._active += [self._generation(jobs) for jobs in groups.values()]

    def _generation(self, jobs: list[ChatJob]) -> ActiveGeneration:
        model, tokenizer = self.speaker.model, self.speaker.tokenizer
        answers = []
        for job in jobs:
            room = room_after(model, job.prompt)
            for index in range(job.sampling.samples):
                place = (0, index)
                continuation = Continuation(job.prompt, job.sampling, room, place, job.media)
                answers.append(AnswerText(job, index, continuation, tokenizer))
        device = model.lm_head.weight.device
        generation = generation_of(model, jobs[0].sampling, device, self.speaker.decoding)
        continuations = [answer.continuation for answer in answers]
        steps = generation.run(continuations, jobs[0].stop_ids, OneRank())
        return ActiveGeneration(answers, chain(self._prompt_scores(jobs), steps))

    def _prompt_scores(self, jobs: list[ChatJob]) -> Iterator[list[Continuation]]:
        for job in (job for job in jobs if job.scores_prompt):
            alternatives = job.sampling.alternatives or 0
            scores = prompt_scores(self.speaker.model, job.prompt, alternatives)
            job.send(PromptScores(job.first, [None, *scores]))
        yield from ()

    def _step(self, active: ActiveGeneration) -> bool:
        try:
            return active.step()
        except Exception as error:  # such as out of memory; other requests continue
            active.fail(f"{type(error).__name__}: {error}")
            return False
