"""Settings that another trainer has where its file says nothing, by its own names.

Read from transformers 5.24 and TRL 1.16 (the fields of TrainingArguments, ModelConfig and TRL's
configurations), axolotl 0.19 (utils/schemas, core/builders/base.py) and LLaMA-Factory 0.9.5
(hparams).
"""

from dataclasses import replace
from typing import Any

from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.trainers import OWN_TOOL
from fsdp_trainer.interop.convert.translation import is_off

EPOCH, WARM_UP, END = "(the end of an epoch)", "(the first step)", "(the end of the run)"
AROUND = "(around a prompt that is a text)"
"""Stand in the settings for what a trainer does and no setting says."""
TRAINERS = (OWN_TOOL, "axolotl", "LLaMA-Factory")
"""Tools whose files stand for a whole training, which transformers' Trainer runs."""
SPELT_OTHERWISE = {
    "warmup_steps": ("warmup_ratio",), "optim": ("optimizer",), "max_steps": ("num_train_epochs",),
    "adam_beta2": ("adam_beta1",), "lr_scheduler_type": ("lr_scheduler",),
    "num_train_epochs": ("max_steps",), "num_epochs": ("max_steps",),
    "save_steps": ("save_strategy", "saves_per_epoch"), "warmup_ratio": ("warmup_steps",),
    "save_strategy": ("save_steps", "saves_per_epoch"), "max_length": ("max_seq_length",),
    "packing": ("neat_packing",), "bf16": ("fp16",), "lora_target_modules": ("lora_target_linear",),
    "micro_batch_size": ("batch_size",),
}  # fmt: skip
"""Settings in whose presence a default does not count, besides the setting itself."""
OF_ALL: dict[str, Any] = {
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "optim": "adamw_torch_fused", "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "per_device_train_batch_size": 8, "num_train_epochs": 3, "seed": 42,
    "save_steps": 500, "packing": False,
    EPOCH: "a step of the rows that are left", WARM_UP: "a rate of 0", END: "a Hugging Face folder",
}  # fmt: skip
"""Of transformers' Trainer."""
OF_TRL: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5},
    "reward": {"learning_rate": 1e-4},
    "grpo": {"num_generations": 8, "beta": 0.0, "loss_type": "dapo", "epsilon": 0.2,
             "max_completion_length": 512, "temperature": 1.0},
    "orpo": {"beta": 0.1}, "kto": {"beta": 0.1}, "dpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "simpo_gamma": 0.5},
}  # fmt: skip
"""Of TRL's trainers, where they differ from transformers' and from each other."""
NOT_HERE = ("rloo", "distil", "ppo", "bco")
OF_EVERY_TRL = {"learning_rate": 1e-6, "max_length": 1024, "gradient_checkpointing": True,
                "logging_steps": 10, "bf16": True}  # fmt: skip
OF_PEFT = {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["q_proj", "v_proj"],
           "lora_dropout": 0.05}  # fmt: skip
"""Of TRL's ModelConfig with use_peft, and PEFT's own matrices of Llama, Qwen, Mistral, Gemma."""
OF_AXOLOTL: dict[str, Any] = {
    "lr_scheduler": "cosine", "warmup_ratio": 0.03, "optimizer": "adamw_torch_fused",
    "micro_batch_size": 1, "num_epochs": 1, "sequence_len": 512, "save_strategy": "epoch",
    "save_total_limit": 4, "sample_packing": False,
}  # fmt: skip
INSTEAD = {"lr_scheduler_type", "warmup_steps", "optim", "per_device_train_batch_size",
           "num_train_epochs", "save_steps", "packing", "learning_rate"}  # fmt: skip
"""Of transformers' settings those that axolotl has in other words, or requires."""
OF_LLAMA_FACTORY: dict[str, Any] = {"stage": "sft", "finetuning_type": "lora", "cutoff_len": 2048}
OF_LLAMA_FACTORY_LORA: dict[str, Any] = {"lora_rank": 8, "lora_target": "all"}


NO_LIMIT = ("max_grad_norm", "max_length", "max_completion_length")
"""Settings of transformers and TRL for which null means that there is no limit."""


def with_defaults(file: ForeignFile) -> ForeignFile:
    if file.tool not in TRAINERS:
        return file
    implied = {name: value for name, value in defaults_of(file).items() if is_missing(name, file)}
    settings = {name: value for name, value in file.settings.items() if name not in implied}
    return replace(file, settings=settings | implied, implied=frozenset(implied))


def is_missing(name: str, file: ForeignFile) -> bool:
    """Return True if a file says nothing about a setting, in no words."""
    is_trl = file.tool == "axolotl" and f"trl.{name}" in file.settings
    others = SPELT_OTHERWISE.get(name, ())
    if name in file.settings and name in NO_LIMIT and file.tool != "axolotl":
        return False
    return not is_trl and all(file.value(each) is None for each in (name, *others))


def defaults_of(file: ForeignFile) -> dict[str, Any]:
    if file.tool == "axolotl":
        return {name: v for name, v in OF_ALL.items() if name not in INSTEAD} | OF_AXOLOTL
    if file.tool == "LLaMA-Factory":
        return OF_ALL | of_llama_factory(file)
    chosen = dict(OF_ALL)
    if file.method:
        chosen |= OF_EVERY_TRL | OF_TRL.get(file.method, {})
    if file.method == "grpo":
        chosen.pop("max_length")
    if file.method in NOT_HERE:
        chosen.pop("per_device_train_batch_size")
    if file.value("use_peft") is not None and not is_off(file.value("use_peft")):
        chosen |= OF_PEFT
    return chosen


def of_llama_factory(file: ForeignFile) -> dict[str, Any]:
    chosen: dict[str, Any] = {**OF_LLAMA_FACTORY, "packing": file.value("stage") == "pt"}
    if str(file.value("finetuning_type") or "lora") == "lora":
        rank = int(file.value("lora_rank") or 8)
        chosen |= OF_LLAMA_FACTORY_LORA | {"lora_alpha": 2 * rank}
    if file.value("stage") == "dpo":
        chosen["pref_beta"] = 0.1
    if file.value("pref_loss") == "simpo":
        chosen["simpo_gamma"] = 0.5
    return chosen
