"""One of many fake ranks, and the places where the program must not read fake numbers."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

from fsdp_trainer.base import torch_private
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.data.records.labelled_texts import POSITIVE, QUERIES, QUERY
from fsdp_trainer.methods import contrast, embedding, kto, reranking
from fsdp_trainer.models import head, sdpa
from fsdp_trainer.models.attention import LAYOUTS, PLAIN, Scoring, VarlenAttention
from fsdp_trainer.optim import eight_bit, muon_owners
from fsdp_trainer.optim.compact import CompactOptimizer, NumberChunk
from fsdp_trainer.optim.muon_owners import Part, ShardLayout, stack_shape
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.parallel.experts import ExpertRanks
from fsdp_trainer.planning.rehearse.kinds import positions_of
from fsdp_trainer.planning.rehearse.rehearsed_run import Rehearsed

T = TypeVar("T")

FLOAT32_ROWS = head.float32_rows


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Make this process a rank of `world` ranks that do not exist: no collective waits."""
    # imports torch's tests
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with warnings.catch_warnings():
            # fake groups have no timeout
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(run: Rehearsed, expert_rows: int) -> Iterator[None]:
    """Give all new tensors no storage, and replace what would read their numbers.

    expert_rows: rows that a rank sends to the experts of one block in a micro-batch.
    """
    with ExitStack() as stack:
        for replaced in stand_ins(run, expert_rows):
            stack.enter_context(replaced)
        stack.enter_context(run.graphs.mode)
        yield


def stand_ins(run: Rehearsed, expert_rows: int) -> Iterator[AbstractContextManager[Any]]:
    """Yield the replacements of the functions that read numbers, or that ask for a GPU."""

    def even_rows(ranks: ExpertRanks, _counts: Tensor, _received: Tensor) -> list[list[int]]:
        each, more = divmod(expert_rows, ranks.size)
        return [[each + (rank < more) for rank in range(ranks.size)]] * 2

    yield patch.object(ExpertRanks, "row_numbers", even_rows)
    # torch computes the place of a shard with a tensor of ranks, and reads it
    offsets = torch_private.compute_local_shape_and_global_offset
    yield patch.object(torch_private, offsets.__name__, with_real_tensors(offsets))
    # computed once, from numbers
    yield patch.object(eight_bit, "table", with_real_tensors(eight_bit.table))
    yield patch.object(muon_owners, "layouts_of", partial(layouts_of_all, run.layout))
    yield patch.object(TrainerOptimizer, "step_unless", step_unread(TrainerOptimizer.step_unless))
    yield patch.object(
        CompactOptimizer, "undrawn_chunks", first_only(CompactOptimizer.undrawn_chunks)
    )
    # how many documents are chosen is a number of theirs
    for module in (kto, reranking):
        yield patch.object(module, "sum_where", lambda values, _chosen: values.sum(-1))
    if run.cfg.objective.method.reads == QUERIES:
        yield from stand_ins_for_texts(run)
    yield torch_private.no_pipeline_vote()
    yield torch_private.metadata_outside_modes()
    is_capped = any(one and one.final_logit_softcapping for one in (run.config, run.second))
    if run.tensors == "cpu" and not (is_capped or run.cfg.compile.enabled):
        yield patch.object(head, "float32_rows", all_rows_at_once)
    if run.tensors == "cpu":
        yield from stand_ins_for_cuda(run.device)


def stand_ins_for_cuda(device: str) -> Iterator[AbstractContextManager[Any]]:
    """Yield the replacements of what tensors on a CPU cannot do, or do otherwise than a GPU."""
    # flex attention has no backward on a CPU
    yield patch.dict(LAYOUTS, flex=WithoutScoring)
    if device == "cuda":
        for sizes in (head.CHUNK_BYTES, head.MOST_TOKENS, head.SCRATCH_BYTES):
            yield patch.dict(sizes, cpu=sizes["cuda"])
        yield patch.object(head, "_Accumulator", SumInPlace)
        # attention with a mask keeps more
        yield patch.object(sdpa, "runs_on_gpu", lambda _tensor: True)


def stand_ins_for_texts(run: Rehearsed) -> Iterator[AbstractContextManager[Any]]:
    """Yield the replacements of what finds some of a step's texts by numbers.

    Every micro-batch of every rank has the same texts, and scores of pairs are all different.
    """
    kinds = [kind for row in run.rows.kinds or [] for kind in row]
    queries, positives = kinds.count(QUERY), kinds.count(POSITIVE)
    documents = max(1, len(kinds) - queries)

    def places(like: Tensor, count: float) -> Tensor:
        return like.new_zeros(round(count), dtype=torch.int64)

    of_rank = [len(kinds) * run.micro_batches, queries * run.micro_batches]
    readers = run.layout.batch_ranks
    replaced: dict[str, Callable[[Tensor], Any]] = {
        "pairs_of": lambda chosen: (places(chosen, len(chosen) * positives / queries),) * 2,
        "places_of": lambda chosen: places(chosen, len(chosen) * positives / documents),
        "less_alike": lambda scores: (places(scores, len(scores) * (len(scores) - 1) / 2),) * 2,
    }
    for name, function in replaced.items():
        yield patch.object(contrast, name, function)
    yield patch.object(embedding, "numbers_on_host", lambda _counts: [of_rank] * readers)


def with_real_tensors(function: Callable[..., T]) -> Callable[..., T]:
    def call(*args: Any, **options: Any) -> T:
        with unset_fake_temporarily():
            return function(*args, **options)

    return call


def layouts_of_all(
    layout: Layout, parameters: Sequence[Tensor], group: dist.ProcessGroup | None
) -> list[ShardLayout]:
    """Return the parts that all ranks of a group hold: fake ranks cannot be asked."""
    ranks = dist.get_process_group_ranks(group)
    positions = [positions_of(layout, rank) for rank in ranks]
    known: dict[Any, ShardLayout] = {}
    layouts = []
    for parameter in parameters:
        kind = tuple(parameter.shape), str(getattr(parameter, "placements", ""))
        if kind not in known:
            parts = [part_at(parameter, position) for position in positions]
            known[kind] = ShardLayout(stack_shape(parameter.shape), parts)
        layouts.append(known[kind])
    return layouts


def part_at(parameter: Tensor, position: dict[str, int]) -> Part:
    shape: Sequence[int] = parameter.shape
    starts: Sequence[int] = [0] * len(shape)
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        coordinate = tuple(position[name] for name in names)
        shape, starts = torch_private.shape_and_offset_at(parameter, coordinate)
    ranges = [(start, start + size) for start, size in zip(starts, shape, strict=True)]
    matrices, rows, columns = ranges if len(ranges) == 3 else [(0, 1), *ranges]
    return matrices, rows, columns


def step_unread(step_unless: Callable[..., None]) -> Callable[..., None]:
    """Return `step_unless` for a host that cannot read the verdict."""

    def step(optimizer: TrainerOptimizer, skip: Tensor) -> None:
        if optimizer.skips_on_device:
            step_unless(optimizer, skip)
        else:
            optimizer.step()

    return step


def first_only(chunks: Callable[..., Iterator[NumberChunk]]) -> Callable[..., Any]:
    """Return `chunks` that yields the first one: the others are as large, or smaller.

    A matrix of experts has hundreds, which are updated one after the other.
    """
    return lambda *args: islice(chunks(*args), 1)


def all_rows_at_once(
    product: Tensor, logits: Tensor, in_place: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield all rows of a chunk's product as float32, in the memory of the few that fit a buffer.

    A head goes through hundreds of such parts, with the same operators on the same memory. What
    overlaps is never read, since there are no numbers.
    """
    scratch = head.scratch_of(product) if logits is product and not in_place else logits
    if in_place or scratch.numel() < sum(product.shape):
        yield from FLOAT32_ROWS(product, logits, in_place)
    else:
        yield slice(None), scratch.as_strided(product.shape, (1, 1))


class WithoutScoring(VarlenAttention):
    """Stands for flex attention, which keeps the same tensors as attention over variable lengths.

    It leaves out the soft cap of scores and the sinks, whose gradient it keeps.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        if scoring.sinks is not None and scoring.sinks.requires_grad:
            v = v + 0 * scoring.sinks.sum()
        return super().attend(q, k, v, scoring._replace(softcap=None, sinks=None))


class SumInPlace:
    """Stands for the sum of a weight's gradient on a GPU, which needs no buffer."""

    def __init__(self, weight: Tensor, columns: int):
        self.total = torch.empty_like(weight, dtype=torch.float32)
        # memory in the format of the product, which a CPU could not write as float32
        self.own = self.total.view(weight.dtype)[:columns, : weight.shape[1]]

    def __call__(self, slopes: Tensor, hidden: Tensor) -> None:
        torch.mm(slopes.T, hidden, out=self.own)
