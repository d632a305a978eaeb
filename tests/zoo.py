"""Small models of every family and variant, made by transformers."""

import torch

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
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.5, 4.0],
    "original_max_position_embeddings": 64,
}
GEMMA = {"pad_token_id": None, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_hidden_layers": 3}
# class of transformers → options
ZOO = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama all heads": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama head_dim": ("Llama", {"head_dim": 16}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 untied": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 4}),
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
            "rope_parameters": LONGROPE,
        },
    ),
}


def make_model(name, **options):
    """The model with random weights that tell mistakes: no norm is 1, no bias 0."""
    import transformers

    family, own = ZOO[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **options})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
    return model
