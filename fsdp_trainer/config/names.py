"""What somebody meant who typed a key that does not exist: other trainers' names first, then spelling."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

_ACCUMULATION = "gradient accumulation follows from batch.rows: a step has rows / (micro_rows x ranks) micro-batches"
_PRECISION = "use  precision=bf16 , precision=fp32 , precision=pure_bf16  or  precision=fp8"
_CHUNKED = "the head never holds all logits of a micro-batch; how many at once, in MiB, is  loss.chunk_mib=64"
_MIXTURE = "a mixture is written in data.path:  'data.path=[{path: a.jsonl, weight: 0.7},{path: b.jsonl, weight: 0.3}]'"
_WORLD = "how many ranks there are is torchrun's --nproc_per_node and --nnodes, or  launch.nproc_per_node=2 launch.nodes=2  without torchrun; in a plan  plan.world_size=4"
_DROPOUT = "there is no dropout: PEFT's default is 0 too, and a resume needs no random state"

# Names from Hugging Face's Trainer and TRL, axolotl, LLaMA-Factory, torchtitan, torchtune, NeMo and Lightning. The right side is a key
# or group, which keeps the value; with a "=", the whole override; with a space, what to say.
SYNONYMS = {
    "run_name": "run.name", "experiment_name": "run.name", "output_dir": "run.root", "save_dir": "run.root", "dump_folder": "run.root",
    "out_dir": "run.root", "logging_dir": "run.root", "random_seed": "run.seed", "data_seed": "run.seed",
    "overwrite_output_dir": "run.overwrite",
    "max_length": "batch.seq_len", "max_seq_length": "batch.seq_len", "max_seq_len": "batch.seq_len", "sequence_len": "batch.seq_len",
    "sequence_length": "batch.seq_len", "seq_length": "batch.seq_len", "context_length": "batch.seq_len", "block_size": "batch.seq_len",
    "cutoff_len": "batch.seq_len", "model_max_length": "batch.seq_len", "max_tokens": "batch.seq_len",
    "batch_size": "batch.rows", "global_batch_size": "batch.rows", "train_batch_size": "batch.rows",
    "micro_batch_size": "batch.micro_rows", "per_device_train_batch_size": "batch.micro_rows", "local_batch_size": "batch.micro_rows",
    "device_batch_size": "batch.micro_rows", "mbs": "batch.micro_rows", "gbs": "batch.rows",
    "per_device_eval_batch_size": "batch.micro_rows", "eval_batch_size": "batch.micro_rows",
    "gradient_accumulation_steps": _ACCUMULATION, "gradient_accumulation": _ACCUMULATION, "grad_accum": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION, "gradient_accumulation_iters": _ACCUMULATION,
    "max_steps": "train.steps", "num_steps": "train.steps", "train_steps": "train.steps", "training_steps": "train.steps",
    "max_iters": "train.steps", "num_iterations": "train.steps", "total_steps": "train.steps", "iterations": "train.steps",
    "num_epochs": "train.epochs", "num_train_epochs": "train.epochs", "max_epochs": "train.epochs", "epoch": "train.epochs",
    "eval_steps": "train.validate_every", "eval_interval": "train.validate_every", "val_check_interval": "train.validate_every",
    "validation_interval": "train.validate_every", "eval_every": "train.validate_every", "validate_interval": "train.validate_every",
    "label_smoothing_factor": "loss.label_smoothing", "smoothing": "loss.label_smoothing", "z_loss_weight": "loss.z_loss",
    "z_loss_multiplier": "loss.z_loss", "z_loss_coefficient": "loss.z_loss", "zloss": "loss.z_loss", "chunk_size": _CHUNKED,
    "num_output_chunks": _CHUNKED, "chunked_cross_entropy": _CHUNKED, "use_liger": _CHUNKED, "use_liger_kernel": _CHUNKED,
    "fused_linear_cross_entropy": _CHUNKED,
    "interleave_probs": _MIXTURE, "mix_strategy": _MIXTURE, "interleave_under": _MIXTURE, "dataset_weights": _MIXTURE, "data_weights": _MIXTURE,
    "mixture": _MIXTURE, "data_mixture": _MIXTURE, "dataset_mixture": _MIXTURE, "sampling_weights": _MIXTURE, "probabilities": _MIXTURE,
    "max_time": "train.time_limit", "timeout_seconds": "train.time_limit", "max_duration": "train.time_limit",
    "model_name_or_path": "model.init_from", "base_model": "model.init_from", "pretrained_model_name_or_path": "model.init_from",
    "model_path": "model.init_from", "hf_assets_path": "model.init_from", "checkpoint_path": "model.init_from",
    "load_from": "model.init_from", "pretrained": "model.init_from", "model_name": "model", "model_type": "model.family", "flavor": "model",
    "dim": "model.hidden_size", "d_model": "model.hidden_size", "n_embd": "model.hidden_size", "n_layers": "model.num_hidden_layers",
    "n_layer": "model.num_hidden_layers", "num_layers": "model.num_hidden_layers", "n_heads": "model.num_attention_heads",
    "n_head": "model.num_attention_heads", "num_heads": "model.num_attention_heads", "n_kv_heads": "model.num_key_value_heads",
    "num_kv_heads": "model.num_key_value_heads", "num_query_groups": "model.num_key_value_heads", "ffn_dim": "model.intermediate_size",
    "hidden_dim": "model.intermediate_size", "rope_base": "model.rope_theta", "norm_eps": "model.rms_norm_eps",
    "tie_embeddings": "model.tie_word_embeddings", "attn_implementation": "model.attention", "flash_attention": "model.attention",
    "attn_backend": "model.attention", "sdp_backend": "model.attention_kernel", "sdpa_kernel": "model.attention_kernel",
    "sample_packing": "data.packing", "pack": "data.packing", "group_by_length": "data.packing",
    "pad_to_multiple_of": "data.pad_to_multiple",
    "dataset": "data.path", "datasets": "data.path", "dataset_path": "data.path", "dataset_name": "data.path", "data_path": "data.path",
    "train_file": "data.path", "train_files": "data.path", "data_files": "data.path", "train_data": "data.path", "dataset_dir": "data.path",
    "validation_file": "data.validation", "eval_dataset": "data.validation", "val_size": "data.validation", "test_size": "data.validation",
    "val_set_size": "data.validation", "eval_file": "data.validation", "validation_split": "data.validation", "val_data": "data.validation",
    "dataset_format": "data.format", "columns": "data.fields", "field_map": "data.fields", "dataset_text_field": "data.fields",
    "chat_template": "data.template", "chat_template_kwargs": "data.template_args",
    "conversation_template": "data.template", "train_on_inputs": "data.loss_on",
    "train_on_prompt": "data.loss_on", "completion_only_loss": "data.loss_on", "assistant_only_loss": "data.loss_on",
    "truncation": "data.too_long", "dataset_prepared_path": "data.cache", "cache_dir": "data.cache",
    "tokenizer_path": "tokenizer.path", "tokenizer_name": "tokenizer.path", "tokenizer_name_or_path": "tokenizer.path",
    "tokenizer_model": "tokenizer.path",
    "fsdp_strategy": "sharding", "sharding_strategy": "sharding", "distributed_strategy": "sharding", "parallelism": "sharding",
    "strategy": "sharding", "fsdp_reshard_after_forward": "sharding.reshard_after_forward", "offload": "sharding.cpu_offload",
    "fsdp_offload_params": "sharding.cpu_offload", "enable_cpu_offload": "sharding.cpu_offload",
    "data_parallel_replicate_degree": "sharding.replicas", "dp_replicate": "sharding.replicas", "num_replicas": "sharding.replicas",
    "gradient_checkpointing": "activation_checkpoint=full", "enable_activation_checkpointing": "activation_checkpoint=full",
    "activation_checkpointing": "activation_checkpoint=full", "recompute": "activation_checkpoint=full", "ac": "activation_checkpoint",
    "selective_ac_option": "activation_checkpoint.save", "memory_budget": "activation_checkpoint.budget",
    "activation_memory_budget": "activation_checkpoint.budget", "profiler": "profile.steps", "enable_profiling": "profile.steps",
    "enable_memory_snapshot": "profile.memory", "sample_every": "train.validate_every",
    "fp8": "precision=fp8", "enable_fp8": "precision=fp8", "float8_recipe_name": "precision.float8", "fp8_recipe": "precision.float8",
    "bf16": _PRECISION, "fp16": _PRECISION, "tf32": _PRECISION, "mixed_precision": _PRECISION, "dtype": _PRECISION, "torch_dtype": _PRECISION,
    "torch_compile": "compile=enabled", "use_compile": "compile=enabled", "compile_mode": "compile.mode", "torch_compile_mode": "compile.mode",
    "spike_threshold": "train.spike_score", "loss_spike_threshold": "train.spike_score", "spike_zscore": "train.spike_score",
    "skip_on_spike": "train.on_spike=skip", "skip_spikes": "train.on_spike=skip", "skip_steps_sigma_factor": "train.spike_score",
    "max_skipped_steps": "train.max_skipped", "sdc_check_every": "train.check_every",
    "gc_freq": "train.gc_every", "gc_interval": "train.gc_every", "manual_gc": "train.gc_every", "manual_gc_interval": "train.gc_every",
    "prefetch_factor": "data.prefetch", "dataloader_prefetch_factor": "data.prefetch", "num_workers": "data.workers",
    "dataloader_num_workers": "data.workers", "symm_mem": "sharding.messages=symmetric", "symmetric_memory": "sharding.messages=symmetric",
    "inductor_cache_dir": "compile.cache", "compile_cache_dir": "compile.cache",
    "learning_rate": "optim.lr", "max_lr": "optim.lr", "peak_lr": "optim.lr", "wd": "optim.weight_decay", "decay": "optim.weight_decay",
    "max_grad_norm": "optim.grad_clip", "max_norm": "optim.grad_clip", "clip_grad": "optim.grad_clip",
    "gradient_clip_val": "optim.grad_clip", "gradient_clipping": "optim.grad_clip", "clip_grad_norm": "optim.grad_clip",
    "adam_epsilon": "optim.eps", "epsilon": "optim.eps", "adam_beta1": "optim.betas=[0.9,0.95]", "adam_beta2": "optim.betas=[0.9,0.95]",
    "beta1": "optim.betas=[0.9,0.95]", "beta2": "optim.betas=[0.9,0.95]", "optimizer": "optim", "optimizer_type": "optim",
    "optim_bits": "optim=adamw_8bit", "use_8bit_adam": "optim=adamw_8bit", "stochastic_round": "optim.rounding=stochastic",
    "bf16_stochastic_round": "optim.rounding=stochastic", "state_precision": "optim.state_dtype", "fused": "optim.implementation=fused",
    "foreach": "optim.implementation=foreach",
    "scheduler": "schedule", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule", "lr_schedule": "schedule", "decay_type": "schedule",
    "warmup": "schedule.warmup_steps", "num_warmup_steps": "schedule.warmup_steps", "lr_warmup_steps": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "warmup_ratio": "warm-up is counted in steps:  schedule.warmup_steps=100", "min_lr": "the floor is a share of optim.lr:  schedule.min_ratio=0.1",
    "min_lr_ratio": "schedule.min_ratio", "lr_min": "the floor is a share of optim.lr:  schedule.min_ratio=0.1", "decay_ratio": "schedule.decay_share",
    "save_steps": "checkpoint.every", "save_interval": "checkpoint.every", "save_every": "checkpoint.every", "ckpt_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "keep_latest_k": "checkpoint.keep", "keep_last": "checkpoint.keep",
    "async_mode": "checkpoint.mode", "async_save": "checkpoint.mode=async", "save_strategy": "checkpoint.every",
    "load_best_model_at_end": "checkpoint.best", "keep_best": "checkpoint.best", "save_best": "checkpoint.best",
    "early_stopping_patience": "train.early_stop", "patience": "train.early_stop", "early_stopping": "train.early_stop",
    "early_stopping_threshold": "train.early_stop_delta", "min_delta": "train.early_stop_delta",
    "resume_from_checkpoint": "checkpoint.resume", "resume_from": "checkpoint.resume", "auto_resume": "checkpoint.resume",
    "logging_steps": "logging.every", "log_every": "logging.every", "log_interval": "logging.every", "log_freq": "logging.every",
    "log_every_n_steps": "logging.every", "use_wandb": "logging.wandb=online", "enable_wandb": "logging.wandb=online",
    "report_to": "trackers are switched on one by one:  logging.wandb=online  logging.tensorboard=true", "wandb_mode": "logging.wandb",
    "wandb_project": "logging.project", "project_name": "logging.project", "enable_tensorboard": "logging.tensorboard",
    "devices": "launch.nproc_per_node", "nproc": "launch.nproc_per_node", "num_gpus": "launch.nproc_per_node", "n_gpus": "launch.nproc_per_node",
    "gpus": "launch.nproc_per_node", "num_processes": "launch.nproc_per_node", "world_size": _WORLD, "nnodes": "launch.nodes", "num_nodes": "launch.nodes",
    "num_machines": "launch.nodes", "rdzv_endpoint": "launch.rendezvous", "master_addr": "launch.rendezvous", "main_process_ip": "launch.rendezvous",
    "array_parallelism": "jobs of a sweep at a time are  hydra.launcher.jobs=2", "tasks_per_node": "a sweep under Slurm takes  hydra.launcher.gpus_per_node=8",
    "hostfile": "launch.hosts", "host_file": "launch.hosts", "machinefile": "launch.hosts", "deepspeed_hostfile": "launch.hosts",
    "node_list": "launch.hosts", "nodelist": "launch.hosts", "host_list": "launch.hosts",
    "accelerator": "launch.device", "ddp_timeout": "launch.timeout", "nccl_timeout": "launch.timeout",
    "hang_timeout": "launch.stall", "heartbeat_timeout": "launch.stall", "straggler_detection": "logging.stragglers",
    "n_jobs": "how many jobs of a sweep run side by side is  hydra.launcher.jobs=2",
    "use_lora": "adapter=lora", "lora": "adapter=lora", "peft": "adapter=lora", "peft_method": "adapter", "finetuning_type": "adapter",
    "qlora": "adapter=qlora", "load_in_4bit": "adapter=qlora", "quantization_bit": "adapter=qlora", "quantize_base": "adapter=qlora",
    "load_in_8bit": "frozen weights are kept in 16 or 4 bits:  adapter=lora  or  adapter=qlora", "use_dora": "adapter=dora", "peft_use_dora": "adapter=dora",
    "lora_r": "adapter.rank", "lora_rank": "adapter.rank", "lora_dim": "adapter.rank", "lora_alpha": "adapter.alpha", "lora_scale": "adapter.alpha",
    "use_rslora": "adapter.scaling=rslora", "peft_use_rslora": "adapter.scaling=rslora", "target_modules": "adapter.targets",
    "lora_target_modules": "adapter.targets", "lora_target": "adapter.targets", "lora_target_linear": "adapter.targets=all",
    "lora_attn_modules": "adapter.targets", "modules_to_save": "adapter.also", "lora_modules_to_save": "adapter.also", "additional_target": "adapter.also",
    "lora_dropout": _DROPOUT, "dropout": _DROPOUT, "lora_model_dir": "adapter.init_from", "use_peft": "adapter=lora", "use_qlora": "adapter=qlora",
    "r": "adapter.rank", "lora_attn": "adapter.targets", "apply_lora_to_mlp": "adapter.targets=all", "bnb_4bit_quant_type": "adapter=qlora",
    "adapter_name_or_path": "adapter.init_from", "merge_lora": "checkpoint.merge", "merge_adapter": "checkpoint.merge",
}  # fmt: skip

ENTRY_SYNONYMS = {
    "file": "path", "files": "path", "dataset": "path", "data": "path", "dataset_path": "path", "source": "path", "url": "path",
    "weights": "weight", "ratio": "weight", "share": "weight", "prob": "weight", "probability": "weight", "proportion": "weight",
    "epochs": "repeat", "repeats": "repeat", "times": "repeat", "upsample": "repeat", "num_epochs": "repeat", "type": "format",
    "columns": "fields", "label": "name",
}  # fmt: skip
"""Of the parts of an entry of data.path."""

OPTION_SYNONYMS = {
    "compile": {"true": "enabled", "on": "enabled", "false": "disabled", "off": "disabled"},
    "activation_checkpoint": {
        "true": "full",
        "on": "full",
        "sac": "selective",
        "false": "none",
        "off": "none",
    },
    "precision": {
        "bfloat16": "bf16",
        "float32": "fp32",
        "float16": "bf16",
        "fp16": "bf16",
        "float8": "fp8",
    },
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
    },
    "adapter": {"peft": "lora", "false": "none", "off": "none", "true": "lora", "rslora": "lora"},
    "sharding": {
        "fsdp2": "fsdp",
        "zero3": "fsdp",
        "full_shard": "fsdp",
        "hybrid_shard": "hsdp",
        "no_shard": "ddp",
    },
    "model": {
        "llama3_1_8b": "llama3_8b",
        "llama3.1_8b": "llama3_8b",
        "llama3_3_70b": "llama3_70b",
        "llama3_1b": "llama3_2_1b",
    },
    "data": {"chat": "sft", "text": "pretrain"},
}

VALUE_SYNONYMS = {
    "gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "float": "float32", "adam": "adamw",
    "int8": "8bit", "best-fit": "best_fit", "bestfit": "best_fit", "greedy": "best_fit",
    "chatml": "messages", "openai": "messages", "jsonl": "auto", "dpo": "preference",
}  # fmt: skip
"""Of keys that have choices."""
SWITCHED_OFF = ("disabled", "none", "ignore", "never")


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The best-spelt match, if there is one."""
    return next(iter(get_close_matches(name.lower(), list(names), 1, cutoff)), None)


def choice_meant(value: Any, choices: Collection[Any]) -> Any:
    """Which of a key's choices `value` should have been: by another program's name, switched on or off, or by spelling; None: nobody knows."""
    off = [choice for choice in SWITCHED_OFF if choice in choices]
    text = str(value).lower()
    if (synonym := VALUE_SYNONYMS.get(text)) in choices:
        return synonym
    if off and text in ("true", "false", "on", "off", "yes", "no"):
        return (
            off[0]
            if text in ("false", "off", "no")
            else next(choice for choice in choices if choice not in off)
        )
    return nearest(text, map(str, choices)) if isinstance(value, str) else None


def synonyms_of(key: str) -> list[str]:
    """What other programs call `key`."""
    return [
        name for name, meant in SYNONYMS.items() if meant.split("=")[0] == key and " " not in meant
    ]


def meant_by(key: str, keys: Collection[str], groups: Collection[str]) -> str | None:
    """What `key` should have been: a real key or group, an override (has a `=`), a sentence (has a space), or None."""
    *_, leaf = path = key.lower().replace("-", "_").replace("/", ".").split(".")
    siblings = {k.split(".")[-1]: k for k in keys if path[:-1] and k.startswith(path[0] + ".")}
    if close := nearest(leaf, siblings, 0.85):
        return siblings[close]
    leaves = {k.split(".")[-1]: k for k in keys} | {g: g for g in groups}
    spelt = nearest(leaf, [*SYNONYMS, *leaves], 0.85) or ""
    synonym = SYNONYMS.get(leaf) or SYNONYMS.get("_".join(path)) or SYNONYMS.get(spelt)
    if synonym and (
        " " in synonym or (target := synonym.split("=")[0]) in keys or target in groups
    ):
        return synonym
    if close := nearest(leaf, siblings):
        return siblings[close]
    if same := [k for k in keys if k.split(".")[-1] == leaf]:
        return nearest(key, same) or same[0]
    if close := nearest(leaf, leaves):
        return leaves[close]
    return nearest(key, keys)
