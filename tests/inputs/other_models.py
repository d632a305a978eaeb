"""Small models of architectures that the decoder does not know, made by transformers."""

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

COMMON = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
PLAIN: dict = {}
GPT = {
    "vocab_size": 264,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 96,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
}
OTHERS: dict[str, dict] = {
    "granite": COMMON
    | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    | {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "granitemoe": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": COMMON | {"sliding_window": 16},
    "glm": COMMON | {"head_dim": 16},
    "glm4": COMMON | {"head_dim": 16},
    "glm4_moe": COMMON
    | EXPERTS
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "cohere": COMMON | {"logit_scale": 0.25},
    "cohere2": COMMON
    | {"logit_scale": 0.25, "sliding_window": 16}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "stablelm": COMMON | {"use_qkv_bias": True, "hidden_size": 64},
    "nemotron": COMMON | {"head_dim": 12},
    "gpt_neox": COMMON | {"rotary_pct": 0.5},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 8, "tie_word_embeddings": False},
    "falcon": COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "smollm3": COMMON,
    "exaone4": COMMON
    | {"sliding_window": 16}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo": COMMON,
    "olmo3": COMMON
    | {"sliding_window": 16}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "phi": COMMON,
    "seed_oss": COMMON | {"head_dim": 16},
    "apertus": COMMON,
    "ernie4_5": COMMON | {"head_dim": 16},
    "lfm2": COMMON | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96},
    "opt": COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "mamba": {"vocab_size": 264, "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2}
    | {"expand": 2, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None},
    "falcon_h1": COMMON
    | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}
    | {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "head_dim": 16},
    "qwen3_next": COMMON
    | EXPERTS
    | DELTA
    | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "gemma": COMMON | {"head_dim": 16},
}
"""Sizes by model_type."""


RUN = [
    "precision=fp32", "schedule=constant", "schedule.warmup_steps=0", "checkpoint.export_hf=true",
    "checkpoint.every=null", "launch.watchdog=false",
]  # fmt: skip
"""Overrides of a run that is compared with transformers."""
ADAMW = ["optim.lr=1e-3", "optim.eps=1e-5", "optim.weight_decay=0.1", "optim.grad_clip=null"]
"""The optimizer of `adamw_steps`."""
SGD = ["optim=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.grad_clip=null"]


def make_other(kind, **options):
    """Return transformers' model of a model_type, in float32."""
    config = CONFIG_MAPPING[kind](**OTHERS.get(kind, {}) | options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and kind != "mamba":
            parameter.data.mul_(3)  # so that attention and experts matter
    return model.eval()


def make_other_folder(folder, kind, **options):
    """Write a model of transformers and a tokenizer; return the folder."""
    make_other(kind, **options).save_pretrained(folder)
    load_tokenizer("demo:bytes").save(folder)
    return folder


def adamw_steps(model, loss_of, count):
    """Return the losses of some steps of torch's AdamW.

    loss_of: returns the loss of the model.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def log_probabilities(model, inputs):
    """Return the log-probability of each token of a document but the first."""
    scores = model(**inputs).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


def loss_of(model, samples):
    """Return the mean negative log-likelihood of all supervised tokens, each sample alone.

    samples: (the model's inputs, which tokens are supervised).
    """
    total = sum((log_probabilities(model, inputs) * mask[1:]).sum() for inputs, mask in samples)
    return -total / sum(mask[1:].sum() for _, mask in samples)
