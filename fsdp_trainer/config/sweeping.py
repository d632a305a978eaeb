"""How a sweep is run: the keys of `hydra.launcher` and `hydra.sweeper`, by the names that these are chosen with."""

from dataclasses import asdict, dataclass
from typing import Any

from fsdp_trainer.config.schema import key

# fmt: off  (a key is a line)


@dataclass
class Local:
    """Jobs run on this node."""

    jobs: int | None = key(None, "jobs at once, each with GPUs of its own; null: as many as there are GPUs for, without GPUs 1", minimum=1)


LAUNCHERS: dict[str, Any] = {"local": Local}
SWEEPERS: dict[str, Any] = {}


def node(cls: Any, plugin: str) -> dict[str, Any]:
    """What Hydra composes for the option of `cls`."""
    return {"_target_": plugin, **asdict(cls())}
