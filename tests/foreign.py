"""Models in folders of other tools, to compare with the same model in a Hugging Face folder."""

import shutil

import torch
from zoo import make_folder

from fsdp_trainer.checkpoint.load import load_model

EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
AS_LLAMA_CPP = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen2_moe": {**EXPERTS, "norm_topk_prob": False},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": 4},
}
"""Keys of models in whose place llama.cpp assumes these values."""


def of(folder):
    """Return transformers' model of a folder."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def make_other(tmp_path, family="llama", **options):
    """Return a Hugging Face folder, and a new one with its files but without weights."""
    folder = make_folder(tmp_path / "hf", family, **options)
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=lambda _, names: [n for n in names if "safetens" in n])
    return folder, other


def require_equal(folder, other):
    """Check that every weight of both folders is the same, to the bit."""
    expected, read = (dict(load_model(path).named_weights()) for path in (folder, other))
    assert expected.keys() == read.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, read[name]), name


def read_on_ranks(folder):
    """Return the norms of a model's weights that FSDP2 shards over all ranks, by name."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fsdp_trainer.checkpoint.load import read_into
    from fsdp_trainer.models.hf.new_model import meta_decoder
    from fsdp_trainer.models.hf.read_architecture import read_architecture

    dist.init_process_group("gloo")
    try:
        model = meta_decoder(read_architecture(folder))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        model.to_empty(device="cpu")
        read_into(model, folder)
        return {name: p.full_tensor().clone() for name, p in model.named_weights().items()}
    finally:
        dist.destroy_process_group()
