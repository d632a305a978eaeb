"""The messages of a step of training, on tensors without storage and ranks that do not exist."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from memory_of_a_step import micro_step, whole_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_trainer.config.pipeline import micro_batches
from fsdp_trainer.models.decoder import Decoder, meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.objective import CrossEntropy

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


class Sent(TorchDispatchMode):
    """Adds up the bytes of what a rank sends to another one, gathers and reduces."""

    def __init__(self):
        super().__init__()
        self.passed, self.gathered, self.reduced = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::send":
            self.passed += sum(tensor.nbytes for tensor in args[0])
        elif name == GATHER:
            self.gathered += args[0].nbytes
        elif name == REDUCE:
            self.reduced += args[1].nbytes
        return func(*args, **(kwargs or {}))


def messages_of_stages(cfg, config):
    """Return the bytes that this rank of a pipeline passes on, gathers and reduces in a step."""
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    dims = Dims(cfg.sharding, "cpu", timeout=60)
    model = parallelize(meta_decoder(config), dims, cfg)
    allocate(model, cpu)
    initialize_weights(model, 0)
    count = micro_batches(cfg, 4)
    pipeline = Pipeline(model, dims, cfg, count, cpu)
    batch = whole_batch(cfg)
    objective = CrossEntropy(batch.weights)
    pipeline.train([batch] * count, [objective] * count)  # the first one finds out who computes
    with Sent() as sent:
        pipeline.train([batch] * count, [objective] * count)
    return sent.passed, sent.gathered, sent.reduced
