"""Messages of a training step, measured on fake tensors and fake ranks, or on real ranks."""

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from layouts import layout_of
from memory_of_a_step import batch_of_rank, micro_step, peak_of_step, route_evenly, whole_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

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
from fsdp_trainer.rehearse.step_recorder import StepRecorder
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.objective import CrossEntropy
from fsdp_trainer.training.weights import draw_weights

SMALL = 2**20  # bytes; the plan leaves out the few numbers per token that the head gathers


class Message(NamedTuple):
    """A kind of collective: its number of ranks, and gathers: True to gather, False to reduce."""

    ranks: int
    gathers: bool


def collectives_of(compute):
    """Return the collectives between several ranks that this rank starts, as `rehearse` counts."""
    with StepRecorder() as recorder:
        compute()
    return [one for one in recorder.collectives if len(one.ranks) > 1]


def by_message(collectives):
    """Return the collectives that gather, or reduce and scatter, as a list for each Message."""
    kinds = defaultdict(list)
    for one in collectives:
        if one.op in ("all_gather", "reduce_scatter"):
            kinds[Message(len(one.ranks), one.op == "all_gather")].append(one)
    return kinds


def bytes_sent(collectives):
    """Return the bytes that this rank sends in gathers and reductions, by Message."""
    kinds = by_message(collectives).items()
    return {message: sum(one.sent for one in alike) for message, alike in kinds}


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
            called = collectives_of(lambda: micro_step(model, cfg))
        kinds = by_message(one for one in called if one.bytes >= SMALL).items()
        count = {message: len(alike) for message, alike in kinds}
        return count, {message: sum(one.bytes for one in alike) for message, alike in kinds}
    finally:
        dist.destroy_process_group()


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
    called = collectives_of(lambda: pipeline.train([batch] * count, [objective] * count))
    ops = ("send", "all_gather", "reduce_scatter")
    return tuple(sum(one.bytes for one in called if one.op == op) for op in ops)


class SentByKind(NamedTuple):
    """A rank's messages: bytes by Message, bytes of rows, and the exchanges of row counts.

    Rows go to other ranks' experts and back, or to owners. It holds where no heads are exchanged.
    """

    bytes: dict[Message, float]
    rows: float
    waits: int

    @classmethod
    def of(cls, collectives):
        exchanges = [one for one in collectives if one.op == "all_to_all"]
        rows = sum(one.sent for one in exchanges if one.dtype != "int64")
        waits = sum(one.dtype == "int64" for one in exchanges)
        return cls(bytes_sent(collectives), rows, waits)


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
    batch = batch_of_rank(cfg, config, dims)
    return SentByKind.of(collectives_of(lambda: micro_step(model, cfg, batch)))


def rows_of_512_ranks(cfg, config):
    """Return SentByKind of a step for the first of 512 fake ranks, on fake tensors."""
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
    return SentByKind.of(collectives_of(optimizer.step)).rows
