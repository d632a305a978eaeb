"""Writes the folders beside this file with DeepSpeed, on two ranks without a GPU.

DS_BUILD_OPS=0 pip install deepspeed==0.19.8
for stage in 1 2 3 "2 frozen" "3 frozen"; do
  torchrun --nproc_per_node=2 tests/checkpoint/zero_checkpoints/write.py $stage
done
"""

import os
import shutil
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

HERE = Path(__file__).parent
deepspeed.comm.torch.build_shm_op = lambda: None  # it would be compiled for minutes


def main(stage, frozen=""):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if frozen:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    ids = torch.arange(20)[None]
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    folder = HERE / "_".join(["stage", str(stage), *filter(None, [frozen])])
    if engine.global_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    torch.distributed.barrier()
    engine.save_checkpoint(str(folder))
    moments = {}
    if stage == 3 and not frozen:  # in other stages it finds none; these train alike
        for name, parameter in model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                moments[f"{name} {moment}"] = safe_get_full_optimizer_state(parameter, moment)
    if engine.global_rank == 0:
        for script in folder.glob("*.py"):
            script.unlink()
        config.save_pretrained(folder)
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        save_file({name: t.contiguous() for name, t in weights.items()}, folder / "expected")
        if moments:
            save_file({name: t.contiguous() for name, t in moments.items()}, folder / "moments")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(int(sys.argv[1]), *sys.argv[2:])
