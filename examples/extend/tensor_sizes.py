"""A verb of one's own:  fsdp-trainer examples/extend/tensor_sizes.py:largest folder=MODEL count=3"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.verbs import Verb


@dataclass
class LargestConfig:
    """Lists the largest tensors of a Hugging Face folder."""

    folder: str = key(".", "folder with .safetensors files")
    count: int = key(5, "number of tensors to list", minimum=1)


def show(cfg: LargestConfig) -> int:
    sizes = {}
    for file in Path(cfg.folder).glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            names = tensors.keys()
            for name in names:
                sizes[name] = prod(tensors.get_slice(name).get_shape())
    for name in sorted(sizes, key=sizes.get, reverse=True)[: cfg.count]:
        print(f"{sizes[name]:>15,}  {name}")
    return 0


largest = Verb(LargestConfig, show)
