"""Heads that predict further tokens (MTP, NextN), and other tensors that no module may read.

DeepSeek-V3 (2024, §2.2) defines them; here are their names in folders and config.json.
"""

import re
from collections.abc import Iterator

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.models.config import ModelConfig

COUNTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
    *("mtp_num_hidden_layers", "mtp_num_layers"),
)
"""Names in a config.json of the number of these blocks."""
BLOCK = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
CONSTANT = "rotary_emb.inv_freq"
"""The end of the names of constants in old exports."""
DRAFTS = re.compile(r"(?:.*\.)?mtp[._]")
NEXT_BLOCK, MTP = "model.layers.{blocks}.", "mtp."
"""How the names of a head's tensors begin: a block after the last one, or beside the model."""
HEADS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), NEXT_BLOCK),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), MTP),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), MTP),
}
"""The families whose heads are trained, by model_type."""
UNCOUNTED = ("qwen3_next",)
"""Families whose published config.json does not count the one head that their folders have."""


def counts(part: Json) -> Iterator[tuple[Json, str]]:
    for key, value in part.items():
        if isinstance(value, dict):
            yield from counts(value)
        elif key in COUNTS and isinstance(value, int):
            yield part, key


def stored_heads(config: ModelConfig) -> int:
    numbers = [part[key] for part, key in counts(config.source)]
    is_uncounted = not config.source or config.family in UNCOUNTED
    return max(numbers, default=int(is_uncounted))


def start_of_names(config: ModelConfig) -> str:
    return HEADS[config.family].format(blocks=config.num_hidden_layers)


def copies_in_head(config: ModelConfig) -> dict[str, str]:
    """Return the weights that a head's tensors in a folder repeat, by the tensors' names.

    Embedding and output head of DeepSeek-V3 and GLM-4.5 are those of the model, and are stored in
    the head again: vLLM reads them there.
    """
    if not config.mtp_heads or HEADS[config.family] != NEXT_BLOCK:
        return {}
    names, start = config.names, start_of_names(config)
    head = names.embedding if config.tie_word_embeddings else names.head
    own = {"embed_tokens.weight": names.embedding, "shared_head.head.weight": head}
    return {start + name: weight for name, weight in own.items()}


def is_further(name: str, config: ModelConfig) -> bool:
    if config.mtp_heads and name.startswith(start_of_names(config)):
        return False
    block = BLOCK.match(name)
    if block and int(block[1]) >= config.num_hidden_layers:
        is_counted = any(part[key] > 0 for part, key in counts(config.source))
        return is_counted or bool(config.family_spec.further_blocks)
    return bool(DRAFTS.match(name))


def is_unread(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that folders of our own decoder's models hold beside its weights."""
    return is_further(name, config) or name.endswith(CONSTANT)


def copy_counts(into: Json, source: Json) -> None:
    for key, value in into.items():
        theirs = source.get(key, value)
        if isinstance(value, dict) and isinstance(theirs, dict):
            copy_counts(value, theirs)
        elif key in COUNTS:
            into[key] = theirs
