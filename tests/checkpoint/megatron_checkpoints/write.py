"""Writes the folders beside this file with megatron-core, on two ranks without a GPU.

pip install megatron-core==0.16.1
torchrun --nproc_per_node=2 tests/checkpoint/megatron_checkpoints/write.py

Each rank holds half of every matrix. The logits of megatron-core's own forward are saved beside.
"""

import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from transformers import LlamaConfig

HERE = Path(__file__).parent
FORMS = {
    "stacked": {},
    "separate": {"non_homogeneous_layers": True},
    "halves": {"singleton_local_shards": True},
}
"""How megatron-core stores the blocks: one tensor of all, one for each, or halves by name."""
CONFIG = LlamaConfig(
    vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=64,
    tie_word_embeddings=False,
)  # fmt: skip


def main():
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda tracker, name=None: nullcontext()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=CONFIG.num_hidden_layers,
        hidden_size=CONFIG.hidden_size,
        ffn_hidden_size=CONFIG.intermediate_size,
        num_attention_heads=CONFIG.num_attention_heads,
        num_query_groups=CONFIG.num_key_value_heads,
        kv_channels=CONFIG.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=CONFIG.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=2,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=72,  # padded
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for _, parameter in sorted(model.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # the same on both ranks
            dist.broadcast(parameter.data, 0)
    ids = torch.arange(20)[None]
    causal = torch.ones(20, 20).triu(1).bool()[None, None]
    with torch.no_grad():
        part = model(ids, ids, causal)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous())
    logits = torch.cat(parts, -1)[..., : CONFIG.vocab_size].contiguous()
    for form, metadata in FORMS.items():
        folder = HERE / form
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "iter_0000010").mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text("10")
            CONFIG.save_pretrained(folder)
            save_file({"ids": ids, "logits": logits}, folder / "expected")
        dist.barrier()
        state = model.sharded_state_dict(metadata=metadata)
        dist_checkpointing.save({"model": state, "iteration": 10}, folder / "iter_0000010")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
