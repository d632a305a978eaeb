"""Collectives of a step, as the dispatcher sees them, and their folding for people."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_iter

from fsdp_trainer.base.torch_private import group_named

NAMES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
"""Names of torch's operators, without those that send no tensors; the last ones are in graphs."""
COMPILED = "_c10d_functional::"
NUMBER = re.compile(r"(?<=\.)\d+(?=[.,]|$)")


class Collective(NamedTuple):
    """One collective of a rank.

    ranks: the members of its group; op: a value of NAMES; bytes: of the whole message, all ranks'
    parts together where they differ; sent: those that this rank sends to others, with a ring;
    across: of them, those to other nodes; dtype: of its numbers; module: who asked, a module or a
    phase; peer: for send and recv the other rank, else None; backward: True within a backward.
    """

    ranks: tuple[int, ...]
    op: str
    bytes: int
    sent: float
    dtype: str
    module: str
    peer: int | None = None
    backward: bool = False


def collective_of(name: str, args: Sequence[Any], module: str) -> Collective:
    """Return the collective that an operator of NAMES starts. args: of the operator."""
    op = NAMES[name]
    if name.startswith(COMPILED):
        group = group_named(args[-1])
    else:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [each for each in tree_iter(args[:2]) if isinstance(each, Tensor)]
    size = len(ranks)
    if op in ("send", "recv"):
        peer = ranks[args[2]]
        total = sum(tensor.nbytes for tensor in tensors)
        sent = float(total) if op == "send" else 0.0
        return Collective(ranks, op, total, sent, _dtype(tensors), module, peer)
    if op == "all_to_all":
        total, sent = _exchanged(name, args, group)
        return Collective(ranks, op, total, sent, _dtype(tensors), module)
    total = _whole(op, name, tensors, size)
    share = 2.0 if op == "all_reduce" else 1.0
    return Collective(ranks, op, total, share * total * (size - 1) / size, _dtype(tensors), module)


def _dtype(tensors: Sequence[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.")


def _whole(op: str, name: str, tensors: Sequence[Tensor], size: int) -> int:
    """Return the bytes of the whole message: of a gather the result, of a reduction the input."""
    if name.startswith(COMPILED):
        return tensors[0].nbytes * (size if op == "all_gather" else 1)
    if op in ("all_gather", "reduce_scatter"):
        sizes = [tensor.nbytes for tensor in tensors]
        return max(sizes) if "base" in name else sum(sizes) * size // (size + 1)
    return sum(tensor.nbytes for tensor in tensors)


def _exchanged(name: str, args: Sequence[Any], group: dist.ProcessGroup) -> tuple[int, float]:
    """Return the bytes that a rank puts into an exchange, and those of them for other ranks."""
    if name.startswith(COMPILED):
        put, _, sizes, _ = args
    else:
        put, sizes = args[1], args[4] if name == "c10d::alltoall_base_" else None
    if not isinstance(put, Tensor):
        total = sum(tensor.nbytes for tensor in put)
        return total, float(total - put[group.rank()].nbytes)
    if sizes:
        of_row = put.nbytes / max(1, sum(sizes))
        return put.nbytes, of_row * (sum(sizes) - sizes[group.rank()])
    return put.nbytes, put.nbytes * (group.size() - 1) / group.size()


def joined_counts(collectives: Iterable[Collective]) -> dict[Collective, int]:
    """Return how often each collective is called, in the order of the first calls.

    Collectives are the same if they differ in blocks' numbers alone.
    """
    counts: dict[Collective, int] = {}
    for one in collectives:
        same = one._replace(module=NUMBER.sub("*", one.module))
        counts[same] = counts.get(same, 0) + 1
    return counts
