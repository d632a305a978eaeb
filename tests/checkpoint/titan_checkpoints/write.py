"""Writes the folders beside this file with torchtitan, on two ranks without a GPU.

pip install torchtitan==0.3.0 triton     # 0.2.2 for the other folder
torchrun --nproc_per_node=2 tests/checkpoint/titan_checkpoints/write.py

Trains six steps on the same four rows, and keeps the checkpoint of the third and all losses.
"""

import json
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.models.llama3 as llama3
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer
from transformers import LlamaConfig

HERE = Path(__file__).parent
STEPS, KEPT = 6, 3
SIZES = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, new_optimizer = MODELS[release()]()
    for _, parameter in sorted(model.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    for layer in model.layers.values() if hasattr(model.layers, "values") else model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = new_optimizer([model])
    rows = torch.tensor(json.loads((HERE / "rows.json").read_text()))
    own = rows.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    folder = HERE / f"torchtitan-{release()}"
    for step in range(1, STEPS + 1):
        logits = model(own[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(
            mean, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
        )
        losses.append(mean.item() / dist.get_world_size())
        if step == KEPT:
            save(model, optimizer, folder, step)
    if dist.get_rank() == 0:
        config = LlamaConfig(**SIZES)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def release():
    """Return the release of torchtitan that is installed, such as 0.3."""
    return ".".join(version("torchtitan").split(".")[:2])


def save(model, optimizer, folder, step):
    """Save what torchtitan's CheckpointManager saves, under the same names."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    state = dict(model.state_dict())
    state["optimizer"] = optimizer
    state["train_state"] = {"step": torch.tensor(step), "ntokens_seen": torch.tensor(step * 60)}
    dcp.save(state, checkpoint_id=folder)


def release_0_2():
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    args = llama3.TransformerModelArgs(
        dim=SIZES["hidden_size"],
        n_layers=SIZES["num_hidden_layers"],
        n_heads=SIZES["num_attention_heads"],
        n_kv_heads=SIZES["num_key_value_heads"],
        vocab_size=SIZES["vocab_size"],
        multiple_of=24,
        ffn_dim_multiplier=0.5,
        rope_theta=SIZES["rope_theta"],
        max_seq_len=SIZES["max_position_embeddings"],
        rope_scaling_args=RoPEScalingArgs(original_max_position_embeddings=1_000_000),
    )
    options = {**OPTIMIZER, "fused": True, "foreach": False}
    make = partial(OptimizersContainer, optimizer_cls=torch.optim.AdamW, optimizer_kwargs=options)
    return llama3.Transformer(args), make


def release_0_3():
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.models.common.attention import ScaledDotProductAttention

    # each row is one document; the kernels for several documents need a GPU
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    width, vocabulary = SIZES["hidden_size"], SIZES["vocab_size"]
    norm = llama3.RMSNorm.Config(normalized_shape=width, eps=SIZES["rms_norm_eps"])
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=vocabulary, embedding_dim=width),
        norm=norm,
        lm_head=llama3.Linear.Config(in_features=width, out_features=vocabulary),
        layers=llama3._build_llama3_layers(
            n_layers=SIZES["num_hidden_layers"],
            dim=width,
            n_heads=SIZES["num_attention_heads"],
            n_kv_heads=SIZES["num_key_value_heads"],
            hidden_dim=SIZES["intermediate_size"],
            rope=llama3.ComplexRoPE.Config(
                dim=SIZES["head_dim"],
                max_seq_len=SIZES["max_position_embeddings"],
                theta=SIZES["rope_theta"],
            ),
            attn_backend="flex",
        ),
    )
    return config.build(), lambda parts: default_adamw(**OPTIMIZER).build(model_parts=parts)


MODELS = {"0.2": release_0_2, "0.3": release_0_3}
"""What makes the model and its optimizer, by release of torchtitan."""

if __name__ == "__main__":
    main()
