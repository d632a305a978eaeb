"""The environment `user`: a user who answers with the texts of the data row."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.environments.environment import Environment, Message, Reply, Start

OWN_TURNS = "turns"
"""Name of the column with the user's texts, by default."""


@dataclass
class User(Environment):
    """A user whose further texts are in a column of the row; over after the last of them."""

    name: ClassVar[str] = "user"
    column: str = key(OWN_TURNS, "the column with the list of the user's further texts")
    texts: list[str] = field(default_factory=list)

    def reset(self, row: dict[str, Any]) -> Start:
        texts = row.get(self.column)
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"the row has no list of texts in {self.column!r}")
        self.texts = [str(text) for text in texts]
        return list(row["messages"]), row["tools"]

    def step(self, messages: list[Message]) -> Reply:
        if not self.texts:
            return [], True
        return [{"role": "user", "content": self.texts.pop(0)}], False
