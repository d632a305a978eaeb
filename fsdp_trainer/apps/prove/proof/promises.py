"""Promises of a Hugging Face folder's config.json, and whether they are kept.

Servers read the file and then look for the tensors that it names.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.formats.headers import read_headers

Shapes = dict[str, tuple[int, ...]]
"""The shapes of tensors by name."""
FURTHER = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys that count blocks for further tokens, which speculation needs."""
FURTHER_NAMES = ("mtp.", "nextn", "eh_proj")
BLOCK = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def broken_promises(folder: Path) -> list[str]:
    config = read_object(folder / "config.json", "cannot read the model's configuration")
    tensors, _ = read_headers(folder, all_parts=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return [
        *broken_counts(config, shapes),
        *broken_vocabulary(config, shapes),
        *missing_files(config, folder),
    ]


def broken_counts(config: dict[str, Any], shapes: Shapes) -> Iterator[str]:
    """Yield what a configuration counts and the tensors lack: blocks, further ones, a tower."""
    text = text_part(config)
    layers = number_in(text, "num_hidden_layers")
    numbers = block_numbers(shapes)
    lacking = next((at for at in range(layers) if at not in numbers), None) if numbers else None
    if lacking is not None:
        yield f"num_hidden_layers={layers}, and block {lacking} has no tensor"
    has_further = any(part in name for name in shapes for part in FURTHER_NAMES)
    if not has_further and max(numbers, default=-1) < layers:
        counted = [(key, number_in(text, key)) for key in FURTHER if number_in(text, key)]
        yield from (f"{key}={n}, and there are no tensors of such blocks" for key, n in counted)
    if config.get("vision_config") and not any("vis" in name for name in shapes):
        yield "vision_config, and there are no tensors of its tower"


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def number_in(part: dict[str, Any], key: str) -> int:
    """Return a whole number of a configuration; 0 if it has none."""
    value = part.get(key)
    return value if type(value) is int else 0


def block_numbers(shapes: Shapes) -> set[int]:
    """Return the numbers of the blocks for text that tensors are named for."""
    places = (BLOCK.search(name) for name in shapes if is_of_text(name))
    return {int(place[1]) for place in places if place}


def is_of_text(name: str) -> bool:
    """Return True for a tensor that belongs to no tower for images or sounds."""
    return not any(part in name for part in ("vis", "audio", "imag"))


def broken_vocabulary(config: dict[str, Any], shapes: Shapes) -> Iterator[str]:
    """Yield what does not fit the vocabulary's size, or the head that is or is not tied."""
    text = text_part(config)
    size = number_in(text, "vocab_size")
    of_vocabulary = {n: shape[0] for n, shape in shapes.items() if n.endswith((EMBEDDING, HEAD))}
    for name, rows in of_vocabulary.items():
        if size and rows != size:
            yield f"vocab_size={size}, and {name} has {rows} rows"
    is_generator = "CausalLM" in str(config.get("architectures"))
    has_head = any(name.endswith(HEAD) for name in of_vocabulary)
    if is_generator and of_vocabulary and not has_head and is_untied(config, text):
        yield f"tie_word_embeddings=false, and there is no {HEAD}"


def is_untied(config: dict[str, Any], text: dict[str, Any]) -> bool:
    """Return True if a configuration says that the head has a matrix of its own."""
    return False in (config.get("tie_word_embeddings"), text.get("tie_word_embeddings"))


def missing_files(config: dict[str, Any], folder: Path) -> Iterator[str]:
    named = config.get("auto_map")
    for name in named.values() if isinstance(named, dict) else ():
        file = f"{str(name).partition('.')[0]}.py"
        if "--" not in str(name) and not (folder / file).is_file():
            yield f"auto_map names {file}, which is not there"
    if not config.get("architectures"):
        yield "no architectures: a server does not know which class computes it"
    texts = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in texts):
        yield "there is no tokenizer"
