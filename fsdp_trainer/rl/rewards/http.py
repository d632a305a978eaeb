"""The reward `http`: a server scores answers."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.web import RequestFailed, first_line, retried, send
from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.rl.rewards.reward import Attempt, Reward


@dataclass(frozen=True)
class Http(Reward):
    """The numbers that a server returns for attempts sent by POST as JSON."""

    name: ClassVar[str] = "http"
    url: str | None = key(None, "where attempts are sent to, as http://localhost:8000/score")
    timeout: float = key(60.0, "seconds that a request may take", above=0)
    retries: int = key(3, "how often a request that failed is repeated", minimum=0)
    rows: int = key(64, "attempts of a request", minimum=1)
    token_env: str | None = key(
        None, "the environment variable that holds the API key, sent as Authorization: Bearer"
    )

    def wrong_parts(self) -> str | None:
        parts = urlsplit(self.url or "")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return "needs an address, as in  {name: http, url: 'http://localhost:8000/score'}"
        if parts.username or parts.password:
            return (
                "url  has a password in it, which the records of a run would show.\nUse  token_env"
            )
        if self.token_env and not os.environ.get(self.token_env):
            return f"token_env: {self.token_env}  is not set in this environment"
        return None

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        """Raises RunFailed if the server returns no scores."""
        scores: list[float] = []
        for start in range(0, len(attempts), self.rows):
            scores += self._scores(attempts[start : start + self.rows])
        return scores

    def _scores(self, attempts: Sequence[Attempt]) -> list[float]:
        sent = [asdict(attempt) for attempt in attempts]
        for fields in sent:
            del fields["said"]  # a server has the whole answer
        body = {"attempts": sent}
        token = os.environ.get(self.token_env, "") if self.token_env else ""

        def ask() -> list[float]:
            return read_scores(send(str(self.url), body, token, self.timeout), len(attempts))

        try:
            return retried(ask, self.retries)
        except RequestFailed as error:
            reason = error.args[0]
            text = f"the reward {self.title} gets no scores from {self.url}: {reason}"
            raise RunFailed(text) from None


def read_scores(content: bytes, count: int) -> list[float]:
    """Return the scores in a server's response.

    Raises RequestFailed unless they are `count` numbers.
    """
    try:
        value: Any = json.loads(content)
    except ValueError:
        raise RequestFailed(f"it answered no JSON: {first_line(content)}", False) from None
    if isinstance(value, dict):
        value = value.get("scores")
    numbers = isinstance(value, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in value
    )
    if not numbers:
        wanted = "a list of numbers, or an object with one as `scores`, is needed"
        raise RequestFailed(f"{wanted}; it answered: {first_line(content)}", False)
    if len(value) != count:
        raise RequestFailed(
            f"{counted(len(value), 'number')} for {counted(count, 'answer')}", False
        )
    return [float(one) for one in value]
