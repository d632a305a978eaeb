"""Small models of every family and variant, made by transformers."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from world import read_json, write_json

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

MODELS = read_json(Path(__file__).with_name("small_models.json"))
SIZES, FOLDER_SIZES, LLAMA3 = (MODELS[name] for name in ("sizes", "folder_sizes", "llama3_rope"))
ZOO = MODELS["families"]
"""Prefix of transformers' class names, and options of its config, by name."""


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


PUBLISHED = read_json(Path(__file__).with_name("published_models.json"))
WILD = PUBLISHED["configs"]
"""Contents of published config.json files, with smaller sizes except Gemma 3's.

They have keys that other files leave out, repeat, or spell differently.
"""
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
    config = read_json(folder / "config.json")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    write_json(folder / "config.json", config)
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
