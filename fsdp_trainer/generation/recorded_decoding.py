"""One new token in each row as a CUDA graph: kernels that are recorded once and launched together.

A GPU computes a token in a small part of the time that Python needs to launch its kernels one by
one. A graph has fixed shapes, so attention is over all columns of the cache and a mask hides those
that are not filled yet. Results equal the model's but for rounding.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.generation.key_value_cache import BlockCache, KeyValueCache, attend_to_cached
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.sdpa import PLAIN, Scoring
from fsdp_trainer.parallel.tensor_layers import TensorModule

LEAST_TOKENS = 16
"""Number of tokens in which a graph saves more time than recording it takes."""
TOLERANCE = 0.02
"""Largest difference of the logits, relative to the largest one, that rounding explains."""
Run = Callable[[], None]
_unrecorded: WeakSet[nn.Module] = WeakSet()
"""Models whose forward could not be recorded."""


def can_record(model: Decoder, device: torch.device) -> bool:
    """Return True if a forward of this model makes no collective and never waits for the device.

    False while parameters are sharded, and with experts, whose counts of tokens the host reads.
    """
    return (
        device.type == "cuda"
        and model not in _unrecorded
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
    goes on without a recording, so a failure is only a warning.
    """
    try:
        recorded = RecordedDecoding(model, cache, tokens)
        recorded.run()
        difference = (recorded.logits - logits).abs().max() / logits.abs().max()
        if difference <= TOLERANCE:
            return recorded
        reason = f"its logits differ by {difference:.2g} of the largest one"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    _unrecorded.add(model)
    warnings.warn(f"generation goes on without a CUDA graph: {reason}", stacklevel=2)
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
            name: forward_of(block) for name, block in model.blocks().items()
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
        """Set `logits` from the tokens, the cache and the number of filled columns."""
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
        columns = torch.arange(capacity, device=end.device)
        self.window = None
        self.after = columns - end  # negative for filled columns
        self.visible = (columns >= starts[:, None]) & (self.after < 0)
        self.row_lengths = (end - starts)[:, None]

    @property
    def positions(self) -> Tensor:
        """[rows, 1] int64: the new tokens' positions in their rows."""
        return self.row_lengths - 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention."""
        visible = self.visible
        if self.window is not None:
            visible = visible & (self.after >= -self.window)
        return attend_to_cached(q, k, v, visible[:, None, None], scoring)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, 1] int64: the length of each row so far."""
        return self.row_lengths


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward without hooks: those of FSDP2 make streams wait for each other."""
    return partial(type(module).forward, module)


def record(compute: Run, device: torch.device) -> Run:
    """Run a function once, and return one that launches the same kernels on the same memory."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        compute()  # whatever is prepared in a first run must not be recorded
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may use the GPU meanwhile: they copy the next batches
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        compute()
    return graph.replay
