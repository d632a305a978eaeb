"""Configurations of architectures that only transformers knows, with two blocks."""

from pathlib import Path
from typing import Any


def write_config(name: str, folder: Path) -> None:
    """Write the default configuration of an architecture, with two blocks, as config.json."""
    # half a second, and few cases need it
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(name)
    for part in (config, *(getattr(config, f"{side}_config", None) for side in ("text", "vision"))):
        shorten(part)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def shorten(config: Any) -> None:
    """Set the number of blocks to two."""
    for key in ("num_hidden_layers", "depth"):
        if hasattr(config, key):
            setattr(config, key, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
