"""A configuration file of another trainer: which one's it is, and its settings by dotted name."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.apps.convert.trainers import EXPLICIT, OWN_TOOL, TRAINER, method_of
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
                          "learning_rate", "num_generations", "loss_type"),
}  # fmt: skip
"""Settings that tell a trainer's files from others; the first trainer with one of them has it."""
WHOLE = ("rope_scaling", "chat_template_kwargs", "special_tokens", "plugins", "commands", "tpu_env")
"""Settings whose value is one thing, although it has parts."""


@dataclass(frozen=True)
class ForeignFile:
    """The settings of a file in its order, by dotted names."""

    path: Path
    tool: str
    settings: dict[str, Any]
    method: str | None = None
    """The training method that the settings are for; None if they do not say."""

    def value(self, *names: str) -> Any:
        """Return the value of the first of these settings that is set; None if none is."""
        values = (self.settings.get(name) for name in names)
        return next((value for value in values if value not in (None, "", "auto")), None)

    def own(self, *names: str) -> Any:
        """Return the value of the first of TRL's settings, also in axolotl's section for them."""
        return self.value(*names, *(f"trl.{name}" for name in names))


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
    settings = dict(flat(tree))
    tool = next((tool for tool, signs in SIGNS.items() if settings.keys() & set(signs)), None)
    if tool is None:
        known = "\n".join(f"{tool}: {' or '.join(signs)}" for tool, signs in SIGNS.items())
        reason = f"has none of the settings by which a trainer's file is known:\n{known}"
        raise UserError("there is nothing to convert", [Problem(str(path), reason)])
    return with_trainer(path, tool, settings)


def with_trainer(path: Path, tool: str, settings: dict[str, Any]) -> ForeignFile:
    """Return a file with the trainer that its settings are for, as a setting if none names it."""
    method = method_of(settings, tool)
    if method and tool == OWN_TOOL and not settings.keys() & set(EXPLICIT):
        settings = {TRAINER: method} | settings
    return ForeignFile(path, tool, settings, method)


def flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value); of a list of mappings each is LIST[0], LIST[1] …"""
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(each, dict) and each for each in value):
            for place, each in enumerate(value):
                if isinstance(each, dict) and each:
                    yield from flat(each, f"{name}[{place}].")
                else:
                    yield f"{name}[{place}]", each
        else:
            yield name, value
