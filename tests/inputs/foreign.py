"""Models in folders of other tools, to compare with the same model in a Hugging Face folder."""

import shutil

import torch
from refused import refusal
from stored import assert_byte_equal
from zoo import make_folder

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.cli import main

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


def export(source, out, *words, code=0):
    """Run `export` in this process; return the file or folder that is written."""
    assert main(["export", f"source={source}", f"out={out}", *words]) == code
    return out


def why_refused(folder):
    """Return the message with which a model is not loaded."""
    return refusal(load_model, folder)


class Evil:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("code of others runs",)


def require_equal(folder, other):
    """Check that every weight of both folders is the same, to the bit."""
    assert_byte_equal(*(dict(load_model(path).named_weights()) for path in (folder, other)))


def require_equal_on_ranks(world, folder, weights):
    """Check that three ranks, each reading its own rows, read these weights of a folder."""
    for read in world.call(3, read_on_ranks, folder):
        for name, weight in weights.items():
            assert torch.equal(read[name], weight), name


def read_on_ranks(folder):
    """Return the weights of a folder that FSDP2 shards over all ranks, by name."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fsdp_trainer.checkpoint.load import read_into
    from fsdp_trainer.models.hf.new_model import meta_decoder
    from fsdp_trainer.models.hf.read_architecture import read_architecture

    dist.init_process_group("gloo")
    model = meta_decoder(read_architecture(folder))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    read_into(model, folder)
    return {name: p.full_tensor().clone() for name, p in model.named_weights().items()}
