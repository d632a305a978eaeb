"""One new token in each row as a CUDA graph: kernels that are recorded once and launched together.

A GPU computes a token in a small part of the time that Python needs to launch its kernels one by
one. A graph has fixed shapes, so attention is over all columns of the cache and a mask hides those
that are not filled yet. Results equal the model's but for rounding.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import stop_allocating_to_graph
from fsdp_trainer.generation.key_value_cache import BlockCache, KeyValueCache, attend_to_cached
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.sdpa import PLAIN, Scoring
from fsdp_trainer.parallel.tensor_layers import TensorModule

LEAST_TOKENS = 16
"""Number of tokens in which a graph saves more time than recording it takes."""
TOLERANCE = 0.05
"""Largest difference of the logits, relative to the largest one, that rounding explains.

Another kernel of attention makes 0.013 in 28 blocks of bfloat16 with random weights, on a CPU."""
ATTEMPTS = 3
"""Number of generations in a row that may fail to record a model before none tries any more."""
ALIGNED = 16
"""Numbers to whose multiple a row of the mask is padded: a kernel would copy it for each block."""
Run = Callable[[], None]
_failures: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many generations in a row failed to record each model."""


def can_record(model: Decoder, device: torch.device) -> bool:
    """Return True if a forward of this model makes no collective and never waits for the device.

    False while parameters are sharded, and with experts, whose counts of tokens the host reads.
    """
    return (
        device.type == "cuda"
        and _failures.get(model, 0) < ATTEMPTS
        and not model.config.by_transformers
        and "experts" not in model.config.feed_forwards
        and not isinstance(model, TensorModule)
        and all(type(p) is nn.Parameter for p in model.parameters())
    )


def try_to_record(
    model: Decoder, cache: KeyValueCache, tokens: Tensor, logits: Tensor
) -> "RecordedDecoding | None":
    """Return a recording that gives these logits for these tokens; None if there is none.

    tokens: [rows], the newest ones, whose keys and values are in the cache. The model's own forward
    goes on without a recording, so a failure is only a warning. What failed may have been a moment:
    the next generation may try again, unless the last ATTEMPTS all failed.
    """
    try:
        recorded = RecordedDecoding(model, cache, tokens)
        recorded.run()
        difference = (recorded.logits - logits).abs().max() / logits.abs().max()
        if difference <= TOLERANCE:
            _failures.pop(model, None)
            return recorded
        reason = f"its logits differ by {difference:.2g} of the largest one"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    _failures[model] = _failures.get(model, 0) + 1
    then = f"{_failures[model]} of {ATTEMPTS} attempts"
    warnings.warn(f"generation goes on without a CUDA graph ({then}): {reason}", stacklevel=2)
    return None


class RecordedDecoding:
    """A recorded forward of one new token in each row of a cache, which must keep its rows."""

    def __init__(self, model: Decoder, cache: KeyValueCache, tokens: Tensor):
        device = cache.device
        self.tokens = tokens[:, None].clone()
        self.end = torch.full((1,), cache.end, device=device)
        self.starts = to_device(cache.starts, device)
        for block in cache.blocks.values():
            block.clear(cache.end)  # also what a mask hides must be finite
        self.caches = {
            name: FixedBlockCache(block, self.end) for name, block in cache.blocks.items()
        }
        self.blocks: dict[str, Any] = {
            name: forward_of(with_short_norms(block)) for name, block in model.blocks().items()
        }
        self.model, self.capacity = model, cache.capacity
        self.logits = torch.empty(0)
        self.run = record(self.compute, device)

    def next_logits(self, tokens: Tensor, end: int) -> Tensor:
        """Return the logits after one more token in each row: [rows, vocabulary].

        tokens: [rows]. end: number of filled columns, with the new tokens'.
        """
        self.tokens.copy_(tokens[:, None])
        self.end.fill_(end)
        self.run()
        return self.logits

    @torch.no_grad()
    def compute(self) -> None:
        model: Any = self.model
        layout = AllColumns(self.starts, self.end, self.capacity)
        embed, norm, head = map(forward_of, (model.embedding, model.final_norm, model.lm_head))
        with model.inference():
            x = model.scaled_embedding(embed(self.tokens))
            x, _ = model.run_blocks(x, layout.positions, layout, self.blocks, self.caches)
            self.logits = head(norm(x[:, 0]))


class FixedBlockCache:
    """The cache of one block, in which a new token's column is read from the device.

    end: [1] int64, number of filled columns with the new token's.
    """

    def __init__(self, block: BlockCache, end: Tensor):
        self.keys, self.values, self.end = block.keys, block.values, end

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See Cache. Returns all columns. k, v: [rows, 1, kv heads, head_dim]."""
        column = self.end - 1
        self.keys.index_copy_(2, column, k.transpose(1, 2))
        self.values.index_copy_(2, column, v.transpose(1, 2))
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)


class AllColumns(PackedAttention):
    """One new token in each row, and a mask over all columns of the cache.

    starts: [rows] int64, each row's first column. end: [1] int64, number of filled columns.
    """

    def __init__(self, starts: Tensor, end: Tensor, capacity: int):
        self.window, self.capacity = None, capacity
        columns = torch.arange(round_up(capacity, ALIGNED), device=end.device)
        self.after = columns - end  # negative for filled columns
        self.visible = (columns >= starts[:, None]) & (self.after < 0)
        self.row_lengths = (end - starts)[:, None]
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}  # shared by all windows

    @property
    def positions(self) -> Tensor:
        """[rows, 1] int64: the new tokens' positions in their rows."""
        return self.row_lengths - 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        dtype = q.dtype if scoring.softcap is None and scoring.sinks is None else torch.bool
        if (self.window, dtype) not in self.masks:
            self.masks[self.window, dtype] = self.mask(dtype)
        mask = self.masks[self.window, dtype][:, None, None, : self.capacity]
        return attend_to_cached(q, k, v, mask, scoring)

    def mask(self, dtype: torch.dtype) -> Tensor:
        visible = self.visible
        if self.window is not None:
            visible = visible & (self.after >= -self.window)
        if dtype == torch.bool:
            return visible
        return torch.where(visible, 0.0, float("-inf")).to(dtype)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, 1] int64: the length of each row so far."""
        return self.row_lengths


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward without hooks: those of FSDP2 make streams wait for each other."""
    return partial(type(module).forward, module)


def with_short_norms(module: nn.Module) -> nn.Module:
    """Return a module with the same weights, in which a plain norm is one operator, not seven.

    Without hooks, like `forward_of`. Where weights are replaced, both modules have the new ones.
    """
    if type(module) is RMSNorm and not module.offset and not module.in_float32:
        twin: nn.Module = object.__new__(ShortNorm)
    else:
        twin = object.__new__(type(module))
    children = {name: child and with_short_norms(child) for name, child in module._modules.items()}
    vars(twin).update({**vars(module), "_modules": children})
    return twin


class ShortNorm(RMSNorm):
    """The same norm, rounded once: torch has a kernel for it."""

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


class GraphRecorder:
    """A stream on which graphs are recorded, and a memory pool for their tensors, of one device.

    The newest graph is referenced until the next one is recorded: the pool lives as long, and the
    next one computes in the same memory. Graphs of a pool must not run at the same time; all are
    launched on the stream that computes, and each writes whatever it reads.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.newest: torch.cuda.CUDAGraph | None = None

    def record(self, compute: Run) -> torch.cuda.CUDAGraph:
        """Return a graph of the kernels that a function launches; it is not run by this."""
        graph = torch.cuda.CUDAGraph()
        pool = self.newest.pool() if self.newest else torch.cuda.graph_pool_handle()
        # torch.cuda.graph would empty the allocator's caches, which the next training step fills
        # again. thread_local: other threads, which prepare the next batches meanwhile, may allocate
        # and pin memory and copy on their own streams; the default would make those calls errors
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            compute()
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            stop_allocating_to_graph(graph, self.device, pool)
            raise
        self.newest = graph
        return graph


recorder = cache(GraphRecorder)


def record(compute: Run, device: torch.device) -> Run:
    """Run a function once, and return one that launches the same kernels on the same memory."""
    here = recorder(device)
    here.stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(here.stream):
        compute()  # whatever is prepared in a first run must not be recorded
        try:
            graph = here.record(compute)
        except torch.OutOfMemoryError:  # while it records, torch frees nothing of its caches
            torch.cuda.empty_cache()
            graph = here.record(compute)
    torch.cuda.current_stream(device).wait_stream(here.stream)
    return graph.replay
