"""Which trainer of TRL's a file's settings are for."""

from typing import Any

from fsdp_trainer.config.yaml_text import table_beside

OWN_TOOL = "TrainingArguments"
TRAINER = "(the trainer)"
"""Stands in the settings for the trainer that they belong to."""
TABLES = table_beside(__file__, "trainers.yaml")
EXPLICIT = ("rl", "rlhf_type", "stage")
"""Settings that name the method, in other tools."""
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "cpo", "simpo")
"""Methods that learn from preferences."""
SPELT = {"rm": "reward", "pairwise": "reward", "reward_modeling": "reward"}


def method_of(settings: dict[str, Any], tool: str) -> str | None:
    for name in EXPLICIT:
        if isinstance(said := settings.get(name), str):
            return SPELT.get(said.lower(), said.lower())
    if tool != OWN_TOOL:
        return None
    set_here = {name.removeprefix("trl.") for name, value in settings.items() if value is not None}
    loss = loss_types(settings.get("loss_type"))
    for method, signs in TABLES["signs"].items():
        if set_here & set(signs) or any(one in TABLES["losses"].get(method, ()) for one in loss):
            return method
    return "sft" if set_here & set(TABLES["shared"]) else None


def loss_types(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [str(one).strip("[]'\" ") for one in listed if one is not None]
