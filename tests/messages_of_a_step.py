"""The messages of a step of training, on tensors without storage and ranks that do not exist."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from memory_of_a_step import micro_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import parallelize
from fsdp_trainer.training.gradients import GradientSync

SMALL = 2**20  # bytes: the head gathers a few numbers of each token, which the plan leaves out
GATHER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


class Message(NamedTuple):
    """A collective over so many ranks, which gathers or, if not, reduces."""

    ranks: int
    gathers: bool


class Messages(TorchDispatchMode):
    """Counts collectives, and the bytes of what they gather or reduce, of all ranks together."""

    def __init__(self):
        super().__init__()
        self.count, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in (GATHER, REDUCE):
            gathers = name == GATHER
            whole, part = args[:2] if gathers else (args[1], args[0])
            message = Message(whole.numel() // part.numel(), gathers)
            if whole.nbytes >= SMALL:
                self.count[message] += 1
                self.bytes[message] += whole.nbytes
        return func(*args, **(kwargs or {}))


def messages_of(cases, ranks):
    """[(cfg, config)] → of each what `messages` returns."""
    return [messages(cfg, config, ranks) for cfg, config in cases]


def messages(cfg, config, ranks):
    """Return how many messages the last micro-batch of a step sends, by their kind, and the bytes
    of all of a kind."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        dims = Dims(cfg.sharding, "cpu", timeout=60)
        with torch.device("meta"):
            model = Decoder(config)
        parallelize(model, dims, cfg)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            model.to_empty(device="cpu")
            sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
            sync.before(last=True)
            with Messages() as measure:
                micro_step(model, cfg)
        return dict(measure.count), dict(measure.bytes)
    finally:
        dist.destroy_process_group()
