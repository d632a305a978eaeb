#!/usr/bin/env bash
# llama8b_sft: 1 × 8 GPUs in a container. Written by fsdp-trainer launch-files.
set -euo pipefail
# NCCL's ranks talk through shared memory, of which Docker gives 64 MiB; --init passes signals on, and docker the exit code
exec docker run --rm --init --stop-timeout=600 --shm-size=16g --gpus 8 \
  -v "$PWD":/work -v /data:/data -v /shared:/shared -w /work fsdp_trainer \
  fsdp-trainer train +recipe=llama8b_sft \
    'data.path=[/shared/chats/*.jsonl,/data/my b.jsonl]' \
    model.init_from=/shared/models/l8b \
    run.root=/shared \
    tokenizer.path=here/t \
    'run.name="llama8b_sft"'
