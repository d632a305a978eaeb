"""Steps of an optimizer on a few tensors, in one process or sharded over four ranks."""

import torch
import torch.distributed as dist
import yaml
from layouts import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer.checkpoint.state import optimizer_state, weights
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.optim.optimizers import build_optimizer

SHAPES = yaml.safe_load("""
large: [7, 1024]
middle: [3, 512]
narrow: [9, 20]
tall: [14, 6]
square: [8, 8]
stack: [5, 6, 4]
experts: [2, 3, 512]
experts_bias: [4, 8]
vector: [11]
""")
"""Of the tensors of a block. Some rows are several blocks of 8-bit moments, some are none."""
LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "rows of replicas": ((2, 2), [Replicate(), Shard(0)]),
    "whole on each": ((4,), [Replicate()]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(-1)]),
    "columns and rows": ((2, 2), [Shard(-1), Shard(0)]),
    "columns of replicas": ((2, 2), [Replicate(), Shard(-1)]),
}
"""The shape of a mesh, and how every matrix lies on it."""
STEPS, SKIPPED = 4, 2


def small_decoder(**sizes):
    """Return a decoder with norms of queries and keys, and initial weights."""
    sizes = {"hidden_size": 16, "head_dim": 4, "intermediate_size": 24} | sizes
    config = {"family": "qwen3", "vocab_size": 50, "num_hidden_layers": 1, **sizes}
    model = Decoder(ModelConfig(**config))
    initialize_weights(model, 0)
    return model


def gradient_of(number, step, shape, is_even=False):
    """Return random numbers; some of them tiny, and zeros in a matrix' first row, unless is_even.

    Muon amplifies the rounding of matrices with small singular values.
    """
    generator = torch.Generator().manual_seed(100 * step + number)
    gradient = torch.randn(shape, generator=generator)
    if not is_even:
        gradient[..., ::3] *= 1e-4
        gradient[: len(shape) == 2] = 0
    return gradient


def placing(layout):
    """Return a function that shards a tensor, the columns of matrices and stacks alike."""
    if not layout:
        return lambda tensor: tensor
    shape, places = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)

    def place(tensor):
        own = [Shard(tensor.ndim - 1) if p == Shard(-1) else p for p in places]
        if tensor.ndim == 1:
            own = [Replicate()] * len(places)
        return distribute_tensor(tensor, mesh, own, src_data_rank=None)  # all have it

    return place


def tensors_of_a_block(place, dtype=torch.float32):
    """Return a model of the tensors by the names of a block's, and one table beside them."""
    model, block = nn.Module(), nn.ParameterDict()
    model.model = nn.ModuleDict({"layers": block})
    for i, (name, shape) in enumerate(SHAPES.items()):
        block[name] = nn.Parameter(place(gradient_of(i, 99, shape).to(dtype)))
    model.table = nn.Parameter(place(gradient_of(len(SHAPES), 99, (12, 8)).to(dtype)))
    return model


def steps(cfg, layout=None, dtype=torch.float32, count=STEPS, skipped=SKIPPED):
    """Return whole weights and states by name after some steps, one of them skipped."""
    place = placing(layout)
    model = tensors_of_a_block(place, dtype)
    optimizer = build_optimizer(model, cfg, seed=7)
    for step in range(count):
        factor = torch.nan if step == skipped else 1.0
        for i, p in enumerate(model.parameters()):
            gradient = gradient_of(i, step, p.shape, is_even=cfg.name == "muon")
            p.grad = place((gradient * factor).to(dtype))
        optimizer.step_unless(torch.tensor(step == skipped))
    for p in model.parameters():
        assert set(optimizer.empty_state(p)) == set(optimizer.state[p])
    return whole(weights(model) | optimizer_state(model, optimizer))


def steps_on_a_rank(cases):
    """Return what `steps` gives for each case: an optimizer's configuration, layout and dtype."""
    dist.init_process_group("gloo")
    return [steps(*case) for case in cases]


def optimizer_of(name, **options):
    """Return the configuration of an optimizer that takes large steps."""
    return Optim(name, **{"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6, **options})
