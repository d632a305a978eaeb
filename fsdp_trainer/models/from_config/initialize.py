"""Random weights as a function of seed, parameter name and position, for any sharding."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A, B
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

BLOCK = 1 << 16  # numbers drawn from one generator
ADDS_TO_STREAM = re.compile(
    r"model\.layers\.(\d+)\."
    r"(self_attn\.o_proj\.weight|mlp\.down_proj\.weight|mlp\.experts\.down_proj"
    r"|mlp\.shared_experts?\.down_proj\.weight)"
)
Draw = Callable[..., Tensor]
"""`torch.randn`, or another function of (count, generator) that returns random numbers."""


@torch.no_grad()
def initialize_weights(
    model: Decoder, seed: int, parameters: Mapping[str, Tensor] | None = None
) -> None:
    """Initialise this rank's part of every parameter, or of `parameters` by name.

    Draws only the rows of which this rank holds a part.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    for name, parameter in parameters.items():
        local = local_part(parameter)
        part = local_slice(parameter)
        initialize_part(model.config, name, local, part, parameter.shape, seed)


def initialize_part(
    config: ModelConfig,
    name: str,
    local: Tensor,
    part: tuple[slice, ...],
    shape: tuple[int, ...],
    seed: int,
) -> None:
    """Initialise `local`, which is `part` of a parameter of `shape`.

    Norms scale by 1; biases and the padding of the vocabulary are 0. Adapters start as in PEFT:
    B is 0, A is drawn from U(-1/√in, 1/√in), which is He's uniform with a = √5. All else is drawn
    from N(0, init_std²).
    """
    if f".{A}." in name:
        bound = shape[-1] ** -0.5
        local.copy_(draw_part(seed, name, part, shape, bound, draw_symmetric))
    elif f".{B}." in name:
        local.zero_()
    elif name.endswith(MAGNITUDE):
        pass  # `parallel.materialize.initialize_magnitudes` computes them from the weights
    elif name.endswith("norm.weight"):
        local.fill_(1.0 - config.family_spec.norm_offset)
    elif name.endswith("bias"):
        local.zero_()
    else:
        local.copy_(draw_part(seed, name, part, shape, init_std(config, name)))
    if name in config.names.vocabulary:
        local[max(0, config.vocab_size - part[0].start) :] = 0


def draw_part(
    seed: int,
    name: str,
    part: tuple[slice, ...],
    shape: tuple[int, ...],
    scale: float,
    draw: Draw = torch.randn,
) -> Tensor:
    """Return `part` of a float32 parameter: numbers from `draw`, multiplied by `scale`.

    Complete rows are drawn, then cut.
    """
    row = math.prod(shape[1:])
    first = part[0].start
    count = part[0].stop - first
    rows = draw_numbers(seed, name, first * row, count * row, scale, draw)
    return rows.view(-1, *shape[1:])[:, *part[1:]]


def draw_numbers(
    seed: int, name: str, start: int, count: int, scale: float, draw: Draw = torch.randn
) -> Tensor:
    """Return numbers from `start` on of the infinite sequence of (seed, name): [count] float32.

    All threads of torch draw, each some of the blocks, so that their number changes nothing.
    """
    numbers = torch.empty(count)
    blocks = range(start // BLOCK, -(-(start + count) // BLOCK))

    def fill(some: Sequence[int]) -> None:
        for block in some:
            digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            # always the complete block: a shorter draw returns other numbers
            drawn = draw(BLOCK, generator=generator)
            first, last = max(start, block * BLOCK), min(start + count, (block + 1) * BLOCK)
            part = drawn[first - block * BLOCK : last - block * BLOCK]
            torch.mul(part, scale, out=numbers[first - start : last - start])

    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2:
        fill(blocks)
        return numbers
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, [blocks[i::threads] for i in range(threads)]):
            pass
    return numbers


def draw_symmetric(count: int, generator: torch.Generator) -> Tensor:
    """Draw numbers from U(-1, 1): [count] float32."""
    return torch.rand(count, generator=generator).mul_(2).sub_(1)


def init_std(config: ModelConfig, name: str) -> float:
    """Return the standard deviation of a matrix's initial weights.

    Matrices that add to the residual stream may start smaller, so that it does not grow with depth:
    initializer `depth` scales all of them by 1/√(2·blocks) (GPT-2, §2.3), `layer` scales those of
    block i, counted from 1, by 1/√(2·i) (as in OLMo and torchtitan).
    """
    adds = ADDS_TO_STREAM.fullmatch(name)
    if adds is None or config.initializer == "plain":
        return config.initializer_range
    blocks = config.num_hidden_layers if config.initializer == "depth" else int(adds[1]) + 1
    return config.initializer_range / math.sqrt(2 * blocks)
