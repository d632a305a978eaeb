"""Names of tensors in other tools' files, and Hugging Face's names of the same ones."""

import re
from dataclasses import dataclass, replace

from fsdp_trainer.config.yaml_text import table_beside

HF_BLOCK = "model.layers"


@dataclass(frozen=True)
class TensorNames:
    """A tool's names of the tensors of a decoder.

    block: what is before the number of a block. outside, inside: its names of the modules outside
    and inside of blocks, and Hugging Face's. pairs: model types whose queries and keys it rotates
    in pairs of neighbours; in all others, the two halves of a head are rotated together.
    """

    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    pairs: tuple[str, ...] = ("llama", "mistral", "mixtral")

    def to_huggingface(self, name: str) -> str | None:
        return _translated(name, self.block, HF_BLOCK, self.outside, self.inside)

    def from_huggingface(self, name: str) -> str | None:
        """Return the tool's name of a tensor of Hugging Face's; None if it has none."""
        outside, inside = (
            {theirs: own for own, theirs in table.items()} for table in (self.outside, self.inside)
        )
        return _translated(name, HF_BLOCK, self.block, outside, inside)


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _translated(
    name: str, block: str, new_block: str, outside: dict[str, str], inside: dict[str, str]
) -> str | None:
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in outside:
        return f"{outside[module]}.{kind}"
    match = re.fullmatch(rf"{re.escape(block)}\.(\d+)\.(.+)", module)
    if not match or match[2] not in inside:
        return None
    return f"{new_block}.{match[1]}.{inside[match[2]]}.{kind}"


TABLE = table_beside(__file__)
META, TORCHTITAN, GGUF, MEGATRON = (
    TensorNames(**TABLE[name]) for name in ("meta", "torchtitan", "gguf", "megatron")
)
GGUF_BY_FAMILY = {
    family: replace(GGUF, inside=GGUF.inside | names)
    for family, names in TABLE["gguf by family"].items()
}
"""Model types of which some of llama.cpp's names are of other modules; GGUF for all others."""
