"""Several ranks on one GPU: a layout of many can be tried where there are few. It is slow."""

import os

import torch

from fsdp_trainer.errors import UserError

NCCL_THAT_SHARES = (2, 30)
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # kernels of all ranks must fit on the GPU at the same time, or they wait for each other forever
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}
"""Environment variables with which NCCL connects ranks on one GPU."""


def share_gpus(ranks: int) -> None:
    """Let NCCL connect `ranks` ranks on each GPU. Raises UserError if it is too old for that."""
    version = torch.cuda.nccl.version()
    if version < NCCL_THAT_SHARES:
        reason = (
            f"NCCL connects several ranks on one GPU from 2.30 on, and here is "
            f"{'.'.join(map(str, version))}. For a GPU for each rank:  launch.ranks_per_gpu=1\n"
            "A newer one:  pip install --no-deps -U 'nvidia-nccl-cu13>=2.30'  (for CUDA 12: -cu12),"
            " or  LD_PRELOAD=…/libnccl.so.2  in the shell"
        )
        raise UserError("ranks cannot share a GPU", f"launch.ranks_per_gpu={ranks}", reason)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
