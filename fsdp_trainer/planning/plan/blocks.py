"""The memory of a part of the model in one micro-batch, found by tracing.

The part runs forward on fake tensors, which have no storage.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.models.four_bit import Linear4
from fsdp_trainer.models.moe import MixtureOfExperts
from fsdp_trainer.models.rope import Rope
from fsdp_trainer.observe.flops import count_numbers
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.planning.plan.expert_exchange import divide_experts
from fsdp_trainer.planning.plan.quick_fakes import QuickFakeMode
from fsdp_trainer.planning.plan.rank_part import part_tokens
from fsdp_trainer.planning.plan.work import (
    BACKWARD,
    FORWARD,
    PRODUCTS,
    Work,
    WorkCounter,
    grown_work,
)

CPU = torch.device("cpu")
UNREAD_LEFT_OUT = 0.5
"""Share of the unread results of selective checkpointing that a compiled block does not keep.

torchtitan's runs of 2024 saved all of these bytes, those of 2025 and 2026 none.
"""


class TracedPart(NamedTuple):
    """Memory of a part of the model in bytes, without its weights and tensors that all blocks use.

    Its input counts only as long as the part itself holds it. forward: at the peak of forward;
    saved: kept from forward to backward; work: of both.
    """

    forward: int
    saved: int
    work: Work

    def less(self, saving: int) -> "TracedPart":
        return self._replace(forward=self.forward - saving, saved=self.saved - saving)


@dataclass(frozen=True)
class Input:
    """Input of a block.

    dtype: torch's name of its format; attention: a name of `models.attention.LAYOUTS`; window:
    attention window in tokens, None without one; has_gradient: False if nothing before the block is
    trained; tensor: ranks of the tensor group, each of which has an equal part of the tokens;
    experts: ranks among which the experts are divided; load: rows that the experts of this rank
    get, divided by the number with even routing.
    """

    rows: int
    length: int
    dtype: str
    attention: str
    window: int | None = None
    has_gradient: bool = True
    tensor: int = 1
    experts: int = 1
    load: float = 1.0


def trace_of_rows(rows: int, traces: dict[int, TracedPart]) -> TracedPart | None:
    """Extrapolate the bytes for `rows` rows from those for two fewer; None without these.

    What is kept is linear in the rows, and a peak grows at least as fast as between fewer.
    """
    fewer = sorted(number for number in traces if number < rows)[-2:]
    if len(fewer) < 2:
        return None
    low, high = fewer
    share = (rows - low) / (high - low)
    pairs = zip(traces[low][:2], traces[high][:2], strict=True)
    forward, saved = (round(a + share * (b - a)) for a, b in pairs)
    return TracedPart(forward, saved, grown_work(traces[low].work, traces[high].work, share))


def trace(
    make: Callable[[], tuple[nn.Module, tuple]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    input_gradient: bool = True,
) -> TracedPart:
    """Trace a module whose first input has this shape and dtype, forward and backward.

    make: returns the module, on the meta device, and its other inputs; input_gradient: False if
    nothing before the module is trained.
    """
    with QuickFakeMode():
        module, others = make()
        module.to_empty(device=CPU)
        leaf = torch.empty(shape, dtype=dtype, requires_grad=input_gradient)
        with WorkCounter() as live:
            for tensor in (leaf, *module.parameters(), *module.buffers(), *tree_iter(others)):
                if isinstance(tensor, Tensor):
                    live.add(tensor.detach())
            before = live.total
            live.begin()
            live.work.clear()
            x = leaf * 2.0  # as in the model, only the module itself holds its input
            out = module(x, *others)
            out = out[0] if isinstance(out, tuple) else out  # auxiliary values are scalars
            del x
            forward = live.most - before
            edge = torch.autograd.graph.get_gradient_edge(out * 2.0) if out.requires_grad else None
            slope = torch.empty_like(out)
            del out
            saved = live.total - before - slope.nbytes if edge else 0
            if edge:
                torch.autograd.backward([edge], [slope])
            return TracedPart(forward, saved, dict(live.work))


def trace_block(
    block: nn.Module, config: ModelConfig, given: Input, recomputed: ActivationCheckpoint
) -> TracedPart:
    """Trace a decoder block as training computes it, with its adapters.

    Each row is one document.
    """
    dtype, attention = getattr(torch, given.dtype), given.attention
    shape = (given.rows, given.length // given.tensor, config.hidden_size)
    if config.by_transformers:  # at least its input
        stream = math.prod(shape) * dtype.itemsize
        return TracedPart(stream, stream, work_of_weights(block, math.prod(shape[:2])))
    block = deepcopy(block).to(dtype)
    for module in block.modules():
        if isinstance(module, Linear4):
            module.dtype = dtype
    part_tokens(block, given.tensor)
    rows = given.rows * given.length // given.tensor * config.num_experts_per_tok
    divide_experts(block, given.experts, given.load, rows)
    if attention == "flex":  # keeps the same tensors as varlen, but only runs compiled
        attention = "varlen"
        mixer: Any = block.self_attn
        mixer.scoring = mixer.scoring._replace(softcap=None)
        mixer.sinks = None
    decoder: Any = SimpleNamespace(blocks=lambda: {"0": block}, mtp_heads=list, image_blocks=list)
    checkpoint_activations(decoder, recomputed)

    def make() -> tuple[nn.Module, tuple]:
        lengths = [[given.length]] * given.rows
        layout = LAYOUTS[attention](lengths, given.length, CPU).with_window(given.window)
        return block, (
            Rope(config)(torch.zeros(given.rows, given.length, dtype=torch.int64), dtype, layout),
            layout,
        )

    return trace(make, shape, dtype, given.has_gradient)


def work_of_weights(block: nn.Module, tokens: int) -> Work:
    """Return the work of a block's weights alone, which some tokens are multiplied with."""
    whole, trained = (2.0 * tokens * numbers for numbers in count_numbers(block))
    return {f"{FORWARD} {PRODUCTS}": whole, f"{BACKWARD} {PRODUCTS}": whole + trained}


def has_experts(block: Any) -> bool:
    return isinstance(getattr(block, "mlp", None), MixtureOfExperts)


def fed_numbers(block: Any, config: ModelConfig) -> int:
    """Return how many numbers per token the matrix products of a feed-forward read and write."""
    if not has_experts(block):
        return 3 * config.intermediate_size
    of_one = 3 * config.expert_size + 2 * config.hidden_size
    return config.num_experts_per_tok * of_one + 3 * config.shared_size


def compiled_saving(
    config: ModelConfig,
    given: Input,
    recomputed: ActivationCheckpoint,
    eager: TracedPart,
    adapted: bool,
    fed: int,
) -> int:
    """Return how many bytes less a compiled block keeps for backward than the traced one.

    eager: the traced block; adapted: True if it has adapters; fed: see `fed_numbers`.

    torch's partitioner (`min_cut_rematerialization_partition`) keeps inputs and outputs of matrix
    products and of attention, and recomputes the elementwise operators between them. With selective
    checkpointing it need not keep a result that backward does not read: the block's last product,
    unless a norm follows.
    """
    norms = NORMS[config.family_spec.norms]
    hidden, sizes = config.hidden_size, config.projection_sizes
    numbers = given.rows * given.length
    itemsize = getattr(torch, given.dtype).itemsize
    if recomputed.mode == "full":
        return 0
    if recomputed.mode == "selective":
        saves_last = "matmul" in recomputed.save or "second_matmul" in recomputed.save
        unread = numbers * hidden * itemsize if saves_last and norms[3] is None else 0
        return round(UNREAD_LEFT_OUT * unread)
    queries, keys = sizes["q_proj"], sizes["k_proj"]
    attention = 2 * (queries + keys) + (queries + keys) * bool(config.family_spec.qk_norm)
    stream = hidden * (3 + (norms[0] is not None) + (norms[3] is not None))
    if adapted:  # inputs of frozen products are not read
        stream, fed = 2 * hidden, fed * 2 // 3
    saved = numbers * itemsize * (stream / given.tensor + attention + fed)
    return max(0, eager.saved - round(saved))


_known: dict[str, Any] = {}


def remembered(name: str, config: ModelConfig, arguments: Any, compute: Callable[[], Any]) -> Any:
    """Return compute(), called only once for each name, configuration and arguments.

    Fields of the configuration that do not change a block are ignored.
    """
    config = replace(config, num_hidden_layers=1, layer_types=(), vocab_size=1, source={})
    key = f"{name} {config} {arguments}"
    if key not in _known:
        _known[key] = compute()
    return _known[key]
