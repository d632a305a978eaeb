"""Messages of a training step, measured on fake tensors and fake ranks, or on real ranks."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from layouts import layout_of
from memory_of_a_step import batch_of_rank, micro_step, peak_of_step, route_evenly, whole_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.experts import ExpertRanks
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.objective import CrossEntropy
from fsdp_trainer.training.weights import draw_weights

SMALL = 2**20  # bytes; the plan leaves out the few numbers per token that the head gathers
GATHER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
ALL_TO_ALL = "c10d::alltoall_base_"


class Message(NamedTuple):
    """A kind of collective: its number of ranks, and gathers: True to gather, False to reduce."""

    ranks: int
    gathers: bool


class Messages(TorchDispatchMode):
    """Counter of collectives, and of the bytes that they gather or reduce on all ranks together."""

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
    """Return the result of `messages` for each case (cfg, config)."""
    return [messages(cfg, config, ranks) for cfg, config in cases]


def messages(cfg, config, ranks):
    """Return the number of messages of a step's last micro-batch by kind, and their total bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        dims = Dims(layout_of(cfg), "cpu", timeout=60)
        with torch.device("meta"):
            model = Decoder(config)
        parallelize(model, dims, Computation.of(cfg))
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
    """Counter of the bytes that a rank sends to another one, gathers and reduces."""

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
    """Return the bytes that this rank of a pipeline sends, gathers and reduces in a step."""
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    model = parallelize(meta_decoder(config), dims, Computation.of(cfg))
    allocate(model, cpu)
    initialize_weights(model, 0)
    pipeline = Pipeline(model, dims, getattr(torch, cfg.precision.param_dtype), cpu)
    count = dims.layout.micro_batches
    batch = whole_batch(cfg)
    objective = CrossEntropy(batch.weights)
    pipeline.train([batch] * count, [objective] * count)  # warm-up: the first run sends more
    with Sent() as sent:
        pipeline.train([batch] * count, [objective] * count)
    return sent.passed, sent.gathered, sent.reduced


class SentByKind(TorchDispatchMode):
    """Counter of the bytes that a rank sends to others, by (number of ranks, gathers).

    rows: bytes sent to other ranks' experts and back, or to owners. waits: number of exchanges of
    row counts.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.rows, self.waits = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in (GATHER, REDUCE):
            whole, part = sorted((args[0].nbytes, args[1].nbytes), reverse=True)
            self.bytes[whole // part, name == GATHER] += whole - part
        elif name == ALL_TO_ALL and args[1].dtype == torch.int64:
            self.waits += 1
        elif name == ALL_TO_ALL and args[4]:  # without sizes they exchange heads
            own = dist.ProcessGroup.unbox(args[2]).rank()
            others = sum(args[4]) - args[4][own]
            self.rows += others * args[1][:1].nbytes
        return func(*args, **(kwargs or {}))

    def result(self):
        """Return the counters as values that a rank can send back."""
        return dict(self.bytes), self.rows, self.waits


class OfExperts(NamedTuple):
    """Bytes that this rank sends in one step, and the most that it holds in the next one.

    sent: bytes by (ranks, gathers); rows: bytes of rows; waits: exchanges of row counts.
    """

    sent: dict[tuple[int, bool], int]
    rows: int
    waits: int
    peak: int


def steps_of_experts(cases):
    """Return this rank's OfExperts for each case (cfg, config), with even routing.

    A step has one micro-batch.
    """
    dist.init_process_group("gloo")
    return [_steps_of_experts(*case) for case in cases]


def _steps_of_experts(cfg, config):
    cpu = torch.device("cpu")
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    model = parallelize(
        meta_decoder(config), dims, Computation.of(cfg), resolve_adapters(cfg.adapter, config)
    )
    allocate(model, cpu)
    draw_weights(model, 0)
    route_evenly(model)
    optimizer = build_optimizer(model, cfg.optim)
    sent = _sent_in_a_step(model, dims, cfg)
    optimizer.step()
    optimizer.zero_grad()

    def compute():
        micro_step(model, cfg, batch_of_rank(cfg, config, dims))

    peaks = []
    for _ in range(3):  # gloo may hold a message for a moment longer
        peaks.append(peak_of_step(model, dims, optimizer, compute))
        optimizer.zero_grad()
    return OfExperts(*sent, min(peaks))


def _sent_in_a_step(model, dims, cfg):
    config = model.config
    sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
    sync.before(last=True)
    with SentByKind() as sent:
        micro_step(model, cfg, batch_of_rank(cfg, config, dims))
    return sent.result()


def rows_of_512_ranks(cfg, config):
    """Return the result of messages_of_experts for the first of 512 fake ranks, on fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    ranks = cfg.sharding.expert
    even = cfg.batch.micro_rows * cfg.batch.seq_len * config.num_experts_per_tok // ranks
    real, ExpertRanks.row_numbers = ExpertRanks.row_numbers, lambda *_: [[even] * ranks] * 2
    try:
        dims = Dims(layout_of(cfg), "cpu", timeout=60)
        model = parallelize(meta_decoder(config), dims, Computation.of(cfg))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            model.to_empty(device="cpu")
            return _sent_in_a_step(model, dims, cfg)
    finally:
        ExpertRanks.row_numbers = real
        dist.destroy_process_group()


def messages_of_owners(cases):
    """Return the bytes that this rank sends in an update of Muon for each case (cfg, config)."""
    dist.init_process_group("gloo")
    return [_messages_of_owners(*case) for case in cases]


def _messages_of_owners(cfg, config):
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    model = parallelize(meta_decoder(config), dims, Computation.of(cfg))
    allocate(model, torch.device("cpu"))
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, cfg.optim, ranks=dims.stage_group)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    with SentByKind() as sent:
        optimizer.step()
    return sent.rows
