"""Texts about keys: a key's purpose with its bounds, its default as YAML, the keys of all verbs."""

import json
import shutil
import textwrap
from dataclasses import Field, fields
from typing import Any

from fsdp_trainer.config.check import as_text, flatten, limits
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.config.verbs import (
    PRIMARY,
    Certified,
    Evaluate,
    LaunchFiles,
    NewTokenizer,
    RewardsTrial,
)

OWN_NODES = [
    verb
    for verb, cls in PRIMARY.items()
    if verb not in ("train", *GROUPS) and verb in (f.name for f in fields(cls))
]
"""Verbs whose configuration has training's groups and a node with the verb's name."""


SMALL: dict[str, Any] = {
    verb: cls for verb, cls in PRIMARY.items() if not issubclass(cls, TrainConfig)
} | {
    "launch-files": LaunchFiles,
    "evaluate": Evaluate,
    "tokenizer": NewTokenizer,
    "rewards": RewardsTrial,
    "prove": Certified,
}
"""The keys of the other verbs. The last five verbs have training's groups in addition."""


def written(value: Any) -> str:
    """Return a default as it is written in YAML."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return f"[{', '.join(map(as_text, value))}]" if isinstance(value, list) else as_text(value)


def comment(f: Field) -> str:
    return f.metadata["text"] + (f" [{limits(f)}]" if limits(f) else "")


def every_key() -> dict[str, Field]:
    keys = {key: f for verb in ("train", *OWN_NODES) for key, f in flatten(PRIMARY[verb]).items()}
    return keys | keys_of_small_verbs()


def keys_of_small_verbs() -> dict[str, Field]:
    return {f"{verb}.{key}": f for verb, cls in SMALL.items() for key, f in flatten(cls).items()}


def on_lines(head: str, text: str) -> str:
    width = shutil.get_terminal_size((10_000, 0)).columns
    indent = " " * (len(head) if len(head) <= 12 else 4)
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
