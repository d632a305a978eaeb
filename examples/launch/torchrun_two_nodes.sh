#!/usr/bin/env bash
# Two nodes of 8 GPUs without a scheduler. Start it on both, with the same HEAD, the name of one of them:
#   HEAD=node0 bash examples/launch/torchrun_two_nodes.sh optim.lr=2e-5
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else no node that comes back can join (torch 2.13)
exec torchrun --nnodes=2 --nproc_per_node=8 --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="${HEAD:?the name of one of the two nodes}:29500" --rdzv-id=llama8b_sft \
  -m fsdp_trainer +recipe=llama8b_sft data.path=/shared/chats.jsonl run.root=/shared/runs "$@"
