"""One rank of DeepSpeed's ZeRO-3 with its optimizer's states offloaded; see benchmarks.offload.

    python -m benchmarks.deepspeed_update PLACE FOLDER [PATH]

PLACE: cpu or nvme; FOLDER: for the files; PATH: a folder to import deepspeed from. Does an update
for each line that it reads, and prints its seconds.
"""

import os
import sys
import time

PLACE, FOLDER, PATH = (*sys.argv[1:], "")[:3]
sys.path += [PATH] if PATH else []
os.environ |= {
    "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511" if PLACE == "cpu" else "29512",
}  # fmt: skip

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.offload import SHAPE  # noqa: E402
from fsdp_trainer.models.decoder import Decoder  # noqa: E402

OFFLOAD = {
    # with pipeline_read and pipeline_write 0.19.8 fails in an assertion on a CPU
    "device": PLACE, "nvme_path": FOLDER, "pin_memory": False, "buffer_count": 5,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 3, "sub_group_size": 10**8, "offload_optimizer": OFFLOAD},
    "aio": {"block_size": 8388608, "queue_depth": 8, "thread_count": 1, "overlap_events": True},
}


class Matrices(nn.Module):
    """Linear layers with the shapes of the matrices of the model that is compared."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            shapes = [p.shape for p in Decoder(SHAPE).parameters() if p.ndim == 2]
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)

    def forward(self) -> torch.Tensor:
        """Return a sum that has a gradient for each matrix."""
        rows = (torch.ones(1, layer.in_features, dtype=torch.bfloat16) for layer in self.layers)
        return torch.stack(
            [layer(row).float().sum() for layer, row in zip(self.layers, rows, strict=True)]
        ).sum()


def main() -> None:
    """Do an update for each line of the input."""
    deepspeed.init_distributed("gloo")
    model = Matrices()
    engine, *_ = deepspeed.initialize(
        model=model, config=CONFIG, model_parameters=model.parameters()
    )
    for _ in sys.stdin:
        engine.backward(engine())
        started = time.perf_counter()
        engine.step()
        print("seconds", time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
