"""Time of a Muon step on sharded matrices: by owner ranks, by torch's Muon, by gathering all.

    python -m benchmarks.muon [--repeat 5] [--check]

The matrices of 4 blocks of a Llama of width 256 on 2 and on 4 ranks, with Newton-Schulz in float32.
A round is one step of each way. The weights after the first step are compared first.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.harness import arguments, finish, in_turn, print_result, ratio, run_ranks, spread
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.optim.footprint import is_matrix
from fsdp_trainer.optim.newton_schulz import orthogonalize
from fsdp_trainer.optim.optimizers import build_optimizer

SHAPE = ModelConfig(
    hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=64,
)  # fmt: skip
RANKS = (2, 4)
LR, MOMENTUM = 0.02, 0.95


def main() -> None:
    """Measure, print and store the result, or run one rank's part."""
    given = arguments(__doc__, repeat=5, rank=0)
    if given.rank:
        return print_seconds(given.repeat)
    result: dict[str, Any] = {
        "what": f"{SHAPE.num_hidden_layers} blocks of width {SHAPE.hidden_size}, {given.repeat} rounds"
    }
    compared = {}
    for ranks in RANKS:
        measured = run_ranks("benchmarks.muon", ranks, "--rank", "1", "--repeat", str(given.repeat))
        slowest = {
            way: [max(each) for each in zip(*(one[way] for one in measured), strict=True)]
            for way in ("owners", "gather all", "torch's Muon")
        }
        ratios = {
            f"{way} / owners": ratio(slowest[way], slowest["owners"])
            for way in ("gather all", "torch's Muon")
        }
        result[f"{ranks} ranks"] = {
            "seconds": {way: spread(seconds) for way, seconds in slowest.items()},
            **ratios,
            "largest_difference_to_gather_all": max(one["difference"] for one in measured),
        }
        compared |= {f"{ranks} ranks, {name}": each for name, each in ratios.items()}
    finish("muon", result, compared, given.check)


def print_seconds(rounds: int) -> None:
    """Print this rank's seconds per step of every way, and how far owners and gathering differ."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps, models = {}, {}
    for way, prepare in WAYS.items():
        models[way] = sharded(mesh)
        steps[way] = timed(prepare(models[way]), models[way])
        steps[way]()  # creates the optimizer states
    pairs = zip(models["owners"].parameters(), models["gather all"].parameters(), strict=True)
    difference = max((a.to_local() - b.to_local()).abs().max().item() for a, b in pairs)
    print_result({**in_turn(steps, rounds), "difference": difference})
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may abort the interpreter's end


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Return a sharded model in which only the blocks' matrices are trained.

    Embedding, head and vectors are left out, because every way would use AdamW for them.
    """
    model = Decoder(SHAPE)
    initialize_weights(model, 0)
    for name, parameter in model.named_parameters():
        in_block = name.startswith("model.layers.")
        parameter.requires_grad = in_block and is_matrix(name, parameter.ndim)
    for block in model.blocks().values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that Muon updates."""
    return [p for p in model.parameters() if p.requires_grad]


def timed(step: Callable[[], Any], model: nn.Module) -> Callable[[], float]:
    """Give the model random gradients; return a function that runs a step and returns its seconds.

    It begins with a barrier of all ranks.
    """
    for i, parameter in enumerate(matrices_of(model)):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + i)
        parameter.grad = torch.zeros_like(parameter)
        local: Any = parameter.grad
        local = local.to_local()
        local.copy_(torch.randn(local.shape, generator=generator))

    def measure() -> float:
        dist.barrier()
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    return measure


def by_owners(model: nn.Module) -> Callable[[], Any]:
    """Return the step of fsdp_trainer's Muon, where each matrix has an owner rank."""
    optimizer = build_optimizer(model, Optim("muon", lr=LR, ns_dtype="float32"))
    no = torch.tensor(False)
    return lambda: optimizer.step_unless(no)


def by_torch(model: nn.Module) -> Callable[[], Any]:
    """Return the step of torch.optim.Muon on DTensors, in bfloat16, its only format."""
    options: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0}
    muon = torch.optim.Muon(matrices_of(model), adjust_lr_fn="match_rms_adamw", **options)
    return muon.step


def by_gathering(model: nn.Module) -> Callable[[], Any]:
    """Return a step in which every rank gathers and computes every matrix, and keeps its rows."""
    momenta = {p: torch.zeros_like(p.to_local()) for p in matrices_of(model)}

    @torch.no_grad()
    def step() -> None:
        for parameter, momentum in momenta.items():
            gradient = parameter.grad.to_local()
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal_rows(parameter, gradient.lerp(momentum, MOMENTUM))
            scale = 0.2 * max(parameter.shape) ** 0.5
            parameter.to_local().sub_(update, alpha=LR * scale)

    return step


def orthogonal_rows(parameter: DTensor, rows: Tensor) -> Tensor:
    """Return this rank's rows of the orthogonalized matrix. rows: its rows before."""
    sharded = DTensor.from_local(rows, parameter.device_mesh, parameter.placements)
    whole = orthogonalize(sharded.full_tensor()[None], "quintic", 5)[0]
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


WAYS = {"owners": by_owners, "gather all": by_gathering, "torch's Muon": by_torch}


if __name__ == "__main__":
    main()
