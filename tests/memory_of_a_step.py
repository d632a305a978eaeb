"""Peak memory of a training step, measured in two ways that are independent of the plan."""

import contextlib
from types import MethodType

import inject
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import layout_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.decoder import Decoder, ImageInputs, MicroBatch
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.models.moe import Router, Routing
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.rehearse.live_bytes import LiveBytes
from fsdp_trainer.training.batches import Assembler
from fsdp_trainer.training.gradients import GradientSync, clip_gradients
from fsdp_trainer.training.guard import EmbeddingGradProbe
from fsdp_trainer.training.objective import CrossEntropy


@contextlib.contextmanager
def only_tensors():
    """Let the plan leave out gloo's copies, which no operator makes."""
    with inject.around("allocator_copy", lambda *_: 0.0):
        yield


def peaks(cases):
    """Return the peak bytes up to the clipping for each case (cfg, config, ranks, by).

    by: `live`, by LiveBytes, or `tracker`, by torch's tracker. Tensors have no storage.
    """
    return [peak(*case) for case in cases]


def peak(cfg, config, ranks, by):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    cpu = torch.device("cpu")
    try:
        dims = Dims(layout_of(cfg), "cpu", timeout=60)
        with torch.device("meta"):
            model = Decoder(config)
        adapters = resolve_adapters(cfg.adapter, config)
        parallelize(model, dims, Computation.of(cfg), adapters, cfg.train.freeze)
        with FakeTensorMode(allow_non_fake_inputs=True), cpu:
            model.to_empty(device="cpu")
            optimizer, probe = build_optimizer(model, cfg.optim), EmbeddingGradProbe(model)
            sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                optimizer.state[parameter] = optimizer.empty_state(parameter)
            count = cfg.batch.rows // (cfg.batch.micro_rows * ranks)

            def compute():
                for i in range(count):
                    sync.before(last=i == count - 1)
                    micro_step(model, cfg)
                    probe.pop()

            if by == "live":
                return peak_of_step(model, dims, optimizer, compute)
            with FSDPMemTracker(model, optimizer) as tracker:
                compute()
                clip_gradients(model, dims, 1.0, None)
            return tracker.get_tracker_snapshot("peak")[cpu]["Total"]
    finally:
        dist.destroy_process_group()


def micro_step(model, cfg, batch=None):
    """Run forward and backward of a micro-batch; batch: None: the one of whole_batch."""
    batch = batch or whole_batch(cfg)
    model(batch, CrossEntropy(batch.weights))[0].backward()


def whole_batch(cfg):
    """Return a micro-batch of full rows of which all tokens are supervised."""
    rows, length = cfg.batch.micro_rows, cfg.batch.seq_len
    lengths = [[length - length // 4, length // 4]] * rows
    layout = DocumentAttention(lengths, length, torch.device("cpu"))
    places = torch.zeros(rows, length, dtype=torch.int64)
    return MicroBatch(
        places, places, layout, places.flatten(), places.flatten(), torch.ones(rows * length)
    )


def batch_of_rank(cfg, config, dims):
    """Return this rank's part of whole_batch's rows if a context group shares them, else None."""
    ranks = context_ranks(
        dims,
        context_method(cfg.sharding, cfg.batch.seq_len, config.on_tensor_rank(1)).method,
        config.windows,
    )
    if ranks is None:
        return None
    length = cfg.batch.seq_len
    rows = Rows.empty(cfg.batch.micro_rows, length)
    rows.documents = [[length - length // 4, length // 4]] * cfg.batch.micro_rows
    rows.labels[:], rows.weights[:] = 0, 1
    groups = dims.batch_rank, dims.batch_ranks
    cpu = torch.device("cpu")
    assembler = Assembler(length, 1, cfg.batch.micro_rows, *groups, cpu, context=ranks)
    return assembler.assemble(rows)


def peak_of_stages(cfg, config):
    """Return the peak bytes of this rank's live storages in a pipeline's step with clipping."""
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    model = parallelize(meta_decoder(config), dims, Computation.of(cfg))
    allocate(model, cpu)
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, cfg.optim)
    pipeline = Pipeline(model, dims, getattr(torch, cfg.precision.param_dtype), cpu)
    count = dims.layout.micro_batches
    batch = whole_batch(cfg)
    objectives = [CrossEntropy(batch.weights)] * count
    pipeline.train([batch] * count, objectives)
    optimizer.step()
    optimizer.zero_grad()
    return peak_of_step(model, dims, optimizer, lambda: pipeline.train([batch] * count, objectives))


def steps_with_images(cases, count):
    """Return this rank's peak bytes in a step with images, and `count` of a step, for each.

    cases: (cfg, config, arrays of one image, its tokens). count: is given a function.
    """
    dist.init_process_group("gloo")
    return [_step_with_images(*case, count) for case in cases]


def _step_with_images(cfg, config, arrays, tokens, count):
    cpu = torch.device("cpu")
    dims = Dims(layout_of(cfg), "cpu", timeout=60)
    adapters = resolve_adapters(cfg.adapter, config)
    model = meta_decoder(config)
    parallelize(model, dims, Computation.of(cfg), adapters, cfg.train.freeze)
    allocate(model, cpu)
    initialize_weights(model, 0)
    model.fill_buffers()
    optimizer = build_optimizer(model, cfg.optim)
    batch = whole_batch(cfg)
    batch.tokens[0, :tokens] = model.tower.token

    def compute():
        # as in training, only the batch holds the pixels
        own = {name: value.clone() for name, value in arrays.items()}
        positions = batch.positions[None].repeat(3, 1, 1)
        batch.images = ImageInputs(own, tokens, positions if "image_grid_thw" in own else None)
        micro_step(model, cfg, batch)

    counted = count(compute)
    optimizer.step()
    optimizer.zero_grad()
    return peak_of_step(model, dims, optimizer, compute), counted


def peak_of_step(model, dims, optimizer, compute):
    """Return the most bytes alive while `compute` fills the gradients and they are clipped.

    Parameters and the optimizer's state count from the start.
    """
    with LiveBytes() as measure:
        for parameter in model.parameters():
            for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                measure.add(tensor)
        compute()
        clip_gradients(model, dims, 1.0, None)
    return measure.most


def route_evenly(model):
    """Make every router send the same number of tokens to each expert, whatever the logits are."""
    for module in model.modules():
        if isinstance(module, Router):
            module.forward = MethodType(_even_routing, module)


def _even_routing(router, x):
    logits = F.linear(x, router.matrix())
    experts = torch.arange(len(x) * router.chosen, device=x.device) % logits.shape[1]
    experts = experts.view(len(x), router.chosen)
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    if router.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights.to(x.dtype), logits)
