"""Tensors that no module here reads: above all blocks that draft further tokens."""

import re
from collections.abc import Iterator

from fsdp_trainer.models.config import Json, ModelConfig

COUNTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
    *("mtp_num_hidden_layers", "mtp_num_layers"),
)
"""Names in a config.json of the number of these blocks."""
BLOCK = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
CONSTANT = "rotary_emb.inv_freq"
"""The end of the names of constants in old exports."""
DRAFTS = re.compile(r"(?:.*\.)?mtp[._]")


def counts(part: Json) -> Iterator[tuple[Json, str]]:
    """Yield each dictionary of a config.json with such a number, and the number's key."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from counts(value)
        elif key in COUNTS and isinstance(value, int):
            yield part, key


def is_further(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor of such a block, as published folders name it."""
    block = BLOCK.match(name)
    if block and int(block[1]) >= config.num_hidden_layers:
        is_counted = any(part[key] > 0 for part, key in counts(config.source))
        return is_counted or bool(config.family_spec.further_blocks)
    return bool(DRAFTS.match(name))


def is_unread(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that folders of our own decoder's models hold beside its weights."""
    return is_further(name, config) or name.endswith(CONSTANT)


def copy_counts(into: Json, source: Json) -> None:
    """Replace these numbers in a config.json by those of another one, where that has them."""
    for key, value in into.items():
        theirs = source.get(key, value)
        if isinstance(value, dict) and isinstance(theirs, dict):
            copy_counts(value, theirs)
        elif key in COUNTS:
            into[key] = theirs
