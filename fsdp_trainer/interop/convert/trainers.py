"""Which trainer of TRL's a file's settings are for."""

from typing import Any

OWN_TOOL = "TrainingArguments"
TRAINER = "(the trainer)"
"""Stands in the settings for the trainer that they belong to."""
OF_GRPO = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "luspo", "sapo", "vespo")
OF_DPO = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
          "aot", "aot_pair", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm",
          "kto_pair")  # fmt: skip
SIGNS: dict[str, tuple[str, ...]] = {
    "rloo": ("normalize_advantages", "reward_clip_range", "rloo_k"),
    "grpo": ("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size",
             "scale_rewards", "epsilon", "epsilon_high", "importance_sampling_level",
             "mask_truncated_completions", "reward_funcs", "reward_weights",
             "multi_objective_aggregation", "top_entropy_quantile"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "reward": ("center_rewards_coefficient",),
    "distil": ("lmbda", "seq_kd", "teacher_model_name_or_path"),
    "dpo": ("f_divergence_type", "f_alpha_divergence_coef", "rpo_alpha", "ld_alpha",
            "use_weighting", "discopop_tau", "loss_weights", "reference_free"),
    "sft": ("completion_only_loss", "assistant_only_loss", "packing_strategy", "eval_packing",
            "dataset_text_field", "packing", "padding_free"),
}  # fmt: skip
"""Settings that only one trainer has, in the order in which trainers are looked for."""
LOSSES = {"grpo": OF_GRPO, "kto": ("kto", "apo_zero_unpaired"), "cpo": ("simpo",),
          "dpo": OF_DPO, "sft": ("nll", "dft", "chunked_nll")}  # fmt: skip
"""Values of loss_type by trainer."""
SHARED = {"use_peft", "lora_r", "lora_target_modules", "lora_modules_to_save", "use_rslora",
          "use_dora", "lora_task_type", "dataset_train_split", "dataset_test_split",
          "dataset_streaming"}  # fmt: skip
"""Settings of all of TRL's scripts. A file with none of another trainer's is taken for sft's."""
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
    for method, signs in SIGNS.items():
        if set_here & set(signs) or any(one in LOSSES.get(method, ()) for one in loss):
            return method
    return "sft" if set_here & SHARED else None


def loss_types(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [str(one).strip("[]'\" ") for one in listed if one is not None]
