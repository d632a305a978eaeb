"""A configuration file of another trainer: which one's it is, and its settings by dotted name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.base.json_files import DEEPEST, is_deeper
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import Problem, UserError

SIGNS = {
    "accelerate": ("distributed_type", "compute_environment"),
    "DeepSpeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_optimization.stage"),
    "axolotl": ("base_model", "sequence_len"),
    "LLaMA-Factory": ("finetuning_type", "stage", "cutoff_len", "infer_backend",
                      "export_dir", "adapter_name_or_path"),
    "torchtune": ("checkpointer", "tokenizer._component_", "model._component_"),
    "TrainingArguments": ("per_device_train_batch_size", "output_dir", "num_train_epochs",
                          "learning_rate"),
}  # fmt: skip
"""Settings that tell a trainer's files from others; the first trainer with one of them has it."""
WHOLE = ("datasets", "pretraining_dataset", "test_datasets", "rope_scaling", "special_tokens",
         "plugins", "commands", "tpu_env")  # fmt: skip
"""Settings whose value is one thing, although it has parts."""


@dataclass(frozen=True)
class ForeignFile:
    """The settings of a file in its order, by dotted names."""

    path: Path
    tool: str
    settings: dict[str, Any]

    def value(self, *names: str) -> Any:
        """Return the value of the first of these settings that is set; None if none is."""
        values = (self.settings.get(name) for name in names)
        return next((value for value in values if value not in (None, "", "auto")), None)


def read_foreign_file(path: Path) -> ForeignFile:
    """Return a file's settings. Raises UserError for one that no known trainer reads."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else load_yaml(text)
        if is_deeper(tree, DEEPEST):
            raise RecursionError
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else f"is nested over {DEEPEST} deep"
        problem = Problem(str(path), f"cannot be read: {reason}")
        raise UserError("there is nothing to convert", [problem]) from None
    if not isinstance(tree, dict) or not tree:
        problem = Problem(str(path), "holds no settings: a file of `key: value` is needed")
        raise UserError("there is nothing to convert", [problem])
    settings = dict(_flat(tree))
    tool = next((tool for tool, signs in SIGNS.items() if settings.keys() & set(signs)), None)
    if tool is None:
        known = "\n".join(f"{tool}: {' or '.join(signs)}" for tool, signs in SIGNS.items())
        reason = f"has none of the settings by which a trainer's file is known:\n{known}"
        raise UserError("there is nothing to convert", [Problem(str(path), reason)])
    return ForeignFile(path, tool, settings)


def _flat(tree: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value and key not in WHOLE:
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found
