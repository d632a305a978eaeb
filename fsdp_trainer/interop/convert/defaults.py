"""Settings that another trainer has where its file says nothing, by its own names.

Read from transformers 5.24 and TRL 1.16 (the fields of TrainingArguments, ModelConfig and TRL's
configurations), axolotl 0.19 (utils/schemas, core/builders/base.py) and LLaMA-Factory 0.9.5
(hparams).
"""

from dataclasses import replace

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.trainers import OWN_TOOL, TABLES
from fsdp_trainer.interop.convert.translation import is_off

AROUND = "(around a prompt that is a text)"
"""Stands in the settings for what a trainer does and no setting says."""
TRAINERS = (OWN_TOOL, "axolotl", "LLaMA-Factory")
"""Tools whose files stand for a whole training, which transformers' Trainer runs."""
DEFAULTS: dict[str, Json] = TABLES["defaults"]
NOT_HERE = ("rloo", "distil", "ppo", "bco")
NO_LIMIT = ("max_grad_norm", "max_length", "max_completion_length")
"""Settings of transformers and TRL for which null means that there is no limit."""


def with_defaults(file: ForeignFile) -> ForeignFile:
    if file.tool not in TRAINERS:
        return file
    implied = {name: value for name, value in defaults_of(file).items() if is_missing(name, file)}
    settings = {name: value for name, value in file.settings.items() if name not in implied}
    return replace(file, settings=settings | implied, implied=frozenset(implied))


def is_missing(name: str, file: ForeignFile) -> bool:
    is_trl = file.tool == "axolotl" and f"trl.{name}" in file.settings
    others = TABLES["spelt otherwise"].get(name, ())
    if name in file.settings and name in NO_LIMIT and file.tool != "axolotl":
        return False
    return not is_trl and all(file.value(each) is None for each in (name, *others))


def defaults_of(file: ForeignFile) -> Json:
    """Return the settings that a tool has for a method."""
    chosen = dict(DEFAULTS["transformers"])
    if file.tool == "axolotl":
        instead = TABLES["not of axolotl"]
        return {name: v for name, v in chosen.items() if name not in instead} | DEFAULTS["axolotl"]
    if file.tool == "LLaMA-Factory":
        return chosen | of_llama_factory(file)
    if file.method:
        chosen |= DEFAULTS["trl"] | DEFAULTS.get(file.method, {})
    if file.method == "grpo":
        chosen.pop("max_length")
    if file.method in NOT_HERE:
        chosen.pop("per_device_train_batch_size")
    if file.value("use_peft") is not None and not is_off(file.value("use_peft")):
        chosen |= DEFAULTS["peft"]
    return chosen


def of_llama_factory(file: ForeignFile) -> Json:
    """Return what LLaMA-Factory has in other values than transformers."""
    chosen = DEFAULTS["LLaMA-Factory"] | {"packing": file.value("stage") == "pt"}
    if str(file.value("finetuning_type") or "lora") == "lora":
        rank = int(file.value("lora_rank") or 8)
        chosen |= {"lora_rank": 8, "lora_target": "all", "lora_alpha": 2 * rank}
    if file.value("stage") == "dpo":
        chosen["pref_beta"] = 0.1
    if file.value("pref_loss") == "simpo":
        chosen["simpo_gamma"] = 0.5
    return chosen
