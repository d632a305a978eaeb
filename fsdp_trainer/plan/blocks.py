"""The memory of a part of the model in one micro-batch, found by tracing.

The part runs forward and backward on fake tensors, which have no storage.
"""

import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models.adapters.adapter_spec import NF4, AdapterSpec
from fsdp_trainer.models.adapters.adapter_targets import block_linears
from fsdp_trainer.models.adapters.adapters import adapted_layers
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.models.four_bit import Linear4
from fsdp_trainer.models.moe import MixtureOfExperts
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.rope import Rope
from fsdp_trainer.models.setup import ModelSetup
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.plan.expert_exchange import divide_experts
from fsdp_trainer.plan.rank_part import part_tokens

CPU = torch.device("cpu")
UNREAD_LEFT_OUT = 0.5
"""Share of the unread results of selective checkpointing that a compiled block does not keep.

torchtitan's runs of 2024 saved all of these bytes, those of 2025 and 2026 none.
"""


class TracedPart(NamedTuple):
    """Memory of a part of the model in bytes, without its weights and tensors that all blocks use.

    Its input counts only as long as the part itself holds it. forward: at the peak of forward;
    saved: kept from forward to backward; backward: at the peak of backward, including `saved` and
    `gradients`; gradients: gradients of the part's weights at that moment.
    """

    forward: int
    saved: int
    backward: int
    gradients: int

    def less(self, saving: int) -> "TracedPart":
        """Return the same part with `saving` bytes less kept from forward to backward."""
        return TracedPart(
            self.forward - saving, self.saved - saving, self.backward - saving, self.gradients
        )


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
    gpu: bool = False
    window: int | None = None
    has_gradient: bool = True
    tensor: int = 1
    experts: int = 1
    load: float = 1.0


class Storages(TorchDispatchMode):
    """Records the storages that operators allocate, and when they are freed.

    events: (number of the storage, bytes), with negative bytes when it is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # two of three calls, and it allocates nothing
            return out
        given = {
            t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)
        }
        for storage in (t.untyped_storage() for t in tree_iter(out) if isinstance(t, Tensor)):
            if storage._cdata not in given and storage._cdata not in self.numbers:
                number = self.numbers[storage._cdata] = len(self.events)
                self.events.append((number, storage.nbytes()))
                weakref.finalize(storage, self._gone, storage._cdata, number, storage.nbytes())
        return out

    def _gone(self, address: int, number: int, size: int) -> None:
        del self.numbers[address]
        self.events.append((number, -size))

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of the storage of `tensor`; None if it was not recorded."""
        return self.numbers.get(tensor.untyped_storage()._cdata)


class Order(NamedTuple):
    """Order in which a part allocates and frees storages, the same for all sizes of its input.

    numbers: number of the storage of each event; end, middle, stop: count of events until forward
    has its result, until backward begins, and until backward ends; stop is 0 without backward;
    gradients: storage numbers of the gradients of the part's weights.
    """

    numbers: tuple[int, ...]
    end: int
    middle: int = 0
    stop: int = 0
    gradients: frozenset[int | None] = frozenset()


class PartTrace(NamedTuple):
    """The allocations of a part. sizes: bytes of each event of `order`, negative when freed."""

    order: Order
    sizes: tuple[int, ...]

    def part(self) -> TracedPart:
        """Return the peaks of forward and backward, and the bytes kept between them."""
        live, order = list(accumulate(self.sizes)), self.order
        forward = max(live[: order.end])
        if not order.stop:
            return TracedPart(forward, 0, 0, 0)
        peak = max(range(order.middle, order.stop), key=live.__getitem__)
        before = zip(order.numbers[: peak + 1], self.sizes[: peak + 1], strict=True)
        gradients = sum(size for number, size in before if number in order.gradients)
        return TracedPart(forward, live[order.middle - 1], live[peak], gradients)


def trace_of_rows(rows: int, traces: dict[int, PartTrace]) -> PartTrace | None:
    """Extrapolate the trace for `rows` rows from those for two other numbers of rows.

    traces: traces by number of rows. The size of each storage is assumed to be linear in the number
    of rows, or constant, like that of a weight. Returns None with fewer than two traces, if their
    orders differ, or if a size does not grow by an integer number of bytes per row.
    """
    if len(traces) < 2:
        return None
    (low, smaller), (high, larger) = sorted(traces.items())[-2:]
    growths = [more - less for less, more in zip(smaller.sizes, larger.sizes, strict=False)]
    if smaller.order != larger.order or any(growth % (high - low) for growth in growths):
        return None
    grown = [growth // (high - low) * (rows - low) for growth in growths]
    return PartTrace(smaller.order, tuple(map(sum, zip(smaller.sizes, grown, strict=True))))


def trace(
    make: Callable[[], tuple[nn.Module, tuple]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    input_gradient: bool = True,
) -> PartTrace:
    """Trace a module whose first input and output have this shape and dtype.

    make: returns the module, on the meta device, and its other inputs; input_gradient: False if
    nothing before the module is trained.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, others = make()
        module.to_empty(device=CPU)
        leaf = torch.empty(shape, dtype=dtype, requires_grad=input_gradient)
        with Storages() as storages:
            # as in the model, only the module itself holds its input and its output's gradient
            x = leaf * 2.0
            out = module(x, *others)
            out = out[0] if isinstance(out, tuple) else out  # auxiliary values are scalars
            del x
            end = len(storages.events)
            if not out.requires_grad:
                return _logged(storages.events, end)
            edge = torch.autograd.graph.get_gradient_edge(out * 2.0)
            del out
            middle = len(storages.events)
            torch.autograd.backward((edge,), (torch.empty((), dtype=dtype).expand(shape),))
            stop = len(storages.events)
        own = frozenset(storages.number(p.grad) for p in module.parameters() if p.grad is not None)
        return _logged(storages.events[:stop], end, middle, stop, own)


def _logged(events: list[tuple[int, int]], *marks: Any) -> PartTrace:
    numbers, sizes = zip(*events, strict=True)
    return PartTrace(Order(numbers, *marks), sizes)


def trace_block(
    block: nn.Module, config: ModelConfig, given: Input, recomputed: ActivationCheckpoint
) -> PartTrace:
    """Trace a decoder block as training computes it, with its adapters.

    Each row is traced as two documents: their number hardly changes the memory.
    """
    dtype, attention = getattr(torch, given.dtype), given.attention
    if config.by_transformers:
        block, config = stand_in(block, config)
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
        lengths = [[given.length - given.length // 4, given.length // 4]] * given.rows
        layout = LAYOUTS[attention](lengths, given.length, CPU).with_window(given.window)
        return block, (
            Rope(config)(torch.zeros(given.rows, given.length, dtype=torch.int64), dtype, layout),
            layout,
        )

    shape = (given.rows, given.length // given.tensor, config.hidden_size)
    return trace(make, shape, dtype, given.has_gradient)


def stand_in(block: nn.Module, config: ModelConfig) -> tuple[nn.Module, ModelConfig]:
    """Return a dense block in place of one of transformers', and the configuration that it has.

    It has adapters if that has any, of the same mean rank on all of its matrices, and weights in 4
    bits or frozen as that has.
    """
    config = replace(config.dense_stand_in(), num_hidden_layers=1, layer_types=())
    ranks = [layer.lora_A.out_features for layer in adapted_layers(block).values()]
    adapters = None
    if ranks:
        rank = max(1, sum(ranks) // len(ranks))
        names = block_linears(ModelSetup(config).model)
        base = NF4 if any(isinstance(module, Linear4) for module in block.modules()) else "auto"
        adapters = AdapterSpec("lora", "standard", base, dict.fromkeys(names, (rank, 1.0)))
    other = ModelSetup(config, adapters).model.blocks()["0"]
    if adapters is None:
        other.requires_grad_(any(p.requires_grad for p in block.parameters()))
    return other, config


def with_repeated_keys(
    traced: TracedPart, config: ModelConfig, given: Input, recomputed: ActivationCheckpoint
) -> TracedPart:
    """Add to a block's bytes the keys and values that `attention.sdpa` repeats on a GPU."""
    dtype: torch.dtype = getattr(torch, given.dtype)
    if (
        not given.gpu
        or config.num_attention_heads == config.num_key_value_heads
        or not (given.attention == "mask" or dtype == torch.float32)
    ):
        return traced
    more = (
        2
        * given.rows
        * given.length
        * (config.num_attention_heads - config.num_key_value_heads)
        * config.head_dim
        * dtype.itemsize
    )
    return traced._replace(
        forward=traced.forward + more,
        backward=traced.backward + more,
        saved=traced.saved + more * (recomputed.mode != "full"),
    )


def has_experts(block: Any) -> bool:
    """Return True if the block's feed-forward is a mixture of experts."""
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
    ranks: int,
    fed: int,
) -> int:
    """Return how many bytes less a compiled block keeps for backward than the traced one.

    eager: the traced block; ranks: sum of the ranks of its adapters; fed: see `fed_numbers`.

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
    repeated = given.gpu and (given.attention == "mask" or given.dtype == "float32")
    attention = 2 * queries + 2 * (queries if repeated else keys)
    if config.family_spec.qk_norm:
        attention += queries + keys
    stream = hidden * (3 + (norms[0] is not None) + (norms[3] is not None))
    saved = numbers * itemsize * (stream / given.tensor + attention + fed + ranks)
    return max(0, eager.saved - round(saved))


def trace_norm(norm: nn.Module, config: ModelConfig, tokens: int, dtype: str) -> TracedPart:
    """Trace the norm before the head. tokens: number of supervised tokens."""
    if config.by_transformers:
        with torch.device("meta"):
            norm = RMSNorm(config)
    norm = deepcopy(norm).to(getattr(torch, dtype))
    return trace(lambda: (norm, ()), (tokens, config.hidden_size), getattr(torch, dtype)).part()


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
