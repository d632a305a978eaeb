"""Answers of a vLLM server, to which the weights in training are sent."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.web import RequestFailed
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.rollouts.sampler import Request, SampledAnswer
from fsdp_trainer.rl.serving.policy_server import Completion, PolicyServer, ServedModel
from fsdp_trainer.rl.serving.policy_weights import PolicyWeights

LOADS = 3
"""How often a request makes a server that was started again load an adapter."""


class ServerSampler:
    """Samples from a server.

    Its weights are at most objective.max_staleness optimizer steps behind. The random draws depend
    on run.seed, the row of the prompt and the sample, as far as the server respects seeds.
    """

    def __init__(
        self,
        choice: ObjectiveChoice,
        seed: int,
        weights: PolicyWeights,
        stop_ids: Sequence[int],
        context: int,
    ):
        """Set up without sending weights or requests.

        seed: run.seed. context: maximum number of tokens that model and server can read.
        """
        self.choice, self.seed, self.weights, self.server = choice, seed, weights, weights.server
        self.stop_ids, self.context = sorted(stop_ids), context
        self.model, self.version = "", -1
        self._calls: ParallelCalls | None = None

    def update(self, step: int) -> None:
        """Send the weights if the server's are too old. Collective. step: steps done by now."""
        behind = step - self.version
        if not self.model or behind < 0 or behind > self.choice.max_staleness:
            self.model, self.version = self.weights.send(step), step

    def sample(
        self, requests: Sequence[Request], step: int, check: Callable[[], None]
    ) -> list[SampledAnswer]:
        """Return the server's answers; not collective. Raises RunFailed. See AnswerSampler."""
        calls = [self._call(request) for request in requests]
        self._calls = ParallelCalls(calls, self.choice.answer_rows)
        answers = self._calls.wait()
        if self._calls.failure:
            raise RunFailed(self._lost(self._calls.failure))
        return [
            SampledAnswer(each.tokens, each.log_probabilities, each.finished, self.version)
            for each in answers
        ]

    def _call(self, request: Request) -> Callable[[], Completion]:
        choice = self.choice
        longest = choice.max_new_tokens if request.longest is None else request.longest
        room = min(longest, self.context - len(request.prompt))
        if room <= 0:
            return lambda: Completion([], [], False)
        # an answer that goes on has the same row and sample, and draws other numbers
        seed = seed_of(self.seed, request.row, request.sample, len(request.prompt))
        model, temperature = self.model, choice.temperature

        def complete() -> Completion:
            prompt = request.prompt
            return self.server.complete(model, prompt, room, temperature, seed, self.stop_ids)

        return lambda: self._complete(complete)

    def _complete(self, complete: Callable[[], Completion]) -> Completion:
        for _ in range(LOADS):
            try:
                return complete()
            except RequestFailed as error:
                if not str(error.args[0]).startswith("HTTP 404"):
                    raise
            self.weights.load_again(self.model)
        return complete()

    def stop(self) -> None:
        """Make `sample`, which runs in another thread, end early with an error."""
        if self._calls:
            self._calls.stop()

    def _lost(self, reason: str) -> str:
        return (
            f"the server {self.server.url} answers no more prompts: {reason}\n"
            "Start it again, then the same command resumes from the newest checkpoint"
        )


class ParallelCalls:
    """Calls that run in daemon threads. threads: number of calls at the same time.

    After one call has failed, no further calls are started.
    """

    def __init__(self, calls: Sequence[Callable[[], Completion]], threads: int):
        self.calls = calls
        self.failure = ""
        self._results: dict[int, Completion] = {}
        self._next = iter(range(len(calls)))
        self._lock = threading.Condition()
        for _ in range(min(threads, len(calls))):
            threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> list[Completion]:
        """Wait until all calls are done or one has failed; return the results in their order.

        After a failure, which is then in `failure`, there are fewer.
        """
        with self._lock:
            self._lock.wait_for(lambda: self.failure or len(self._results) == len(self.calls))
        return [self._results[place] for place in sorted(self._results)]

    def stop(self) -> None:
        """Start no further calls, and end the wait."""
        self._fail("stopped")

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.failure = self.failure or reason
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                place = next(self._next, None)
            if place is None or self.failure:
                return
            try:
                result = self.calls[place]()
            except RequestFailed as error:
                return self._fail(str(error.args[0]))
            except Exception as error:  # if the thread just ended, the rank would wait forever
                return self._fail(f"{type(error).__name__}: {error}")
            with self._lock:
                self._results[place] = result
                self._lock.notify_all()


def seed_of(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


def find_served(server: PolicyServer, wanted: str, exactly: bool) -> ServedModel:
    """Return the model that the server serves. Collective: rank 0 sends the request.

    wanted, exactly: see is_same_model. Raises UserError on all ranks if the server cannot be
    reached or serves another model.
    """
    outcome: tuple[ServedModel | None, str] = (None, "")
    if dist.get_rank() == 0:
        outcome = _ask_for_model(server, wanted, exactly)
    served, reason = gather(outcome)[0]
    if served is None:
        raise UserError(
            "the server cannot answer prompts", f"objective.server={server.url}", reason
        )
    return served


def _ask_for_model(
    server: PolicyServer, wanted: str, exactly: bool
) -> tuple[ServedModel | None, str]:
    start = f"Start it with  vllm serve {wanted}"
    try:
        models = server.base_models()
    except RequestFailed as error:
        return None, f"cannot be reached: {error.args[0]}\n{start}"
    for model in models:
        if is_same_model(model.root, wanted, exactly):
            return model, ""
    names = ", ".join(model.root for model in models) or "no model"
    return None, f"serves {names}, and this run trains {wanted}.\n{start}"


def is_same_model(root: str, wanted: str, exactly: bool) -> bool:
    """Return True if the model that a server serves may be the wanted one.

    exactly: require the same folder, because new weights are written to it; otherwise a copy in a
    folder of the same name, or a folder inside the wanted one, is accepted too.
    """
    there, here = Path(root).resolve(), Path(wanted).resolve()
    if root == wanted or there == here:
        return True
    return not exactly and (there.name == here.name or here in there.parents)
