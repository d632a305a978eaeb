"""Small models of every family and variant, made by transformers."""

import json

import torch
from safetensors.torch import load_file, save_file

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.5, 4.0],
    "original_max_position_embeddings": 16,
}
GEMMA = {
    "pad_token_id": None,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "num_hidden_layers": 3,
}
MSCALE_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_mtp_layers": 0,
}
# name → (prefix of transformers' class names, options of its config)
ZOO = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama all heads": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama head_dim": ("Llama", {"head_dim": 16}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "mistral window yarn": ("Mistral", {"sliding_window": 8, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 untied": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "head_dim": 16}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 20, "rope_parameters": MSCALE_YARN}),
    "deepseek_v3 plain": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "v_head_dim": 20,
            "rope_interleave": False,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 long": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"sliding_window": 8, "pad_token_id": None}),
    "phi4 mini": (
        "Phi3",
        {
            "hidden_size": 48,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 256,
            "pad_token_id": None,
            "sliding_window": 16,
            "rope_parameters": LONGROPE,
        },
    ),
}


def make_model(name, **options):
    """Return a model with random weights that reveal mistakes: no norm is 1, no bias is 0."""
    import transformers

    family, own = ZOO[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **options})
    model = (
        getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
        ._from_config(config, attn_implementation="eager")
        .eval()
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    return model


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
# contents of published config.json files, with smaller sizes except Gemma 3's: keys that other
# files leave out, repeat, or spell differently
WILD = {
    **{
        f"{kind} minimal": {**SMALL, "model_type": kind, "num_attention_heads": 32}
        for kind in ["gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"]
    },
    "deepseek v3": {
        **SMALL,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
    "moonlight": {
        **SMALL,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "rope_theta": 50000.0,
        "scoring_func": "sigmoid",
    },
    "gemma3 4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
        "eos_token_id": [1, 106],
    },
    "gemma3 1b": {
        **SMALL,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 256,
        "num_key_value_heads": 1,
        "num_attention_heads": 4,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "query_pre_attn_scalar": 256,
        "cache_implementation": "hybrid",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma2": {
        **SMALL,
        "model_type": "gemma2",
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 224,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "rope_theta": 10000.0,
    },
    "mistral v0.1": {
        **SMALL,
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    "mistral v0.3": {
        **SMALL,
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "rope_theta": 1000000.0,
    },
    "nemo": {
        **SMALL,
        "model_type": "mistral",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    "qwen2.5": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5 yarn": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen2 window": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "max_window_layers": 3,
        "use_sliding_window": True,
    },
    "olmo2": {
        **SMALL,
        "model_type": "olmo2",
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "rope_scaling": None,
    },
    "phi3": {
        **SMALL,
        "model_type": "phi3",
        "sliding_window": 2047,
        "rope_scaling": None,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 4096,
    },
    "phi3.5": {
        **SMALL,
        "model_type": "phi3",
        "sliding_window": 262144,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [2.0] * 8, "type": "longrope"},
        "rope_theta": 10000.0,
    },
    "phi4 mini": {
        **SMALL,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"long_factor": [1.0] * 6, "short_factor": [2.0] * 6, "type": "longrope"},
        "tie_word_embeddings": True,
    },
    "llama 3.1": {
        **SMALL,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "pretraining_tp": 1,
        "mlp_bias": False,
    },
    "smollm2": {
        **SMALL,
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {},
    },
}

HF = [
    "model=auto",
    "precision=fp32",
    "batch.seq_len=64",
    "batch.rows=6",
    "batch.micro_rows=3",
    "launch.timeout=60s",
    "launch.data_timeout=60s",
]
"""Overrides to train a Hugging Face folder."""
FOLDER_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def store_in_mxfp4(folder):
    """Replace the experts' matrices of a GPT-OSS folder by random ones in MXFP4, as published.

    Returns the folder's tensors as transformers decodes them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(folder / "model.safetensors")
    decoded, generator = dict(stored), torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), generator=generator)
        scales = torch.randint(255, (experts, columns, rows // 32), generator=generator)
        stored[f"{name}_blocks"] = blocks.to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        decoded[name] = convert_moe_packed_tensors(blocks.to(torch.uint8), scales)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


def make_folder(folder, family="llama", dtype=torch.float32, shard="1GB", **options):
    """Write a model with transformers, and a tokenizer; return the folder."""
    model = make_model(
        family,
        **{
            "vocab_size": 264,
            **FOLDER_SIZES,
            "max_position_embeddings": 128,
            **ZOO[family][1],
            **options,
        },
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # buffers stay float32, as in published files
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    load_tokenizer("demo:bytes").save(folder)
    return folder
