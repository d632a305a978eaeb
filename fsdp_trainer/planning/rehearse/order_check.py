"""Comparison of the collectives that the ranks of a group call, in their order."""

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest
from typing import NamedTuple

from fsdp_trainer.planning.rehearse.collectives import Collective
from fsdp_trainer.planning.rehearse.rank_step import RankStep

POINT_TO_POINT = ("send", "recv")


class Mismatch(NamedTuple):
    """The first collective in which two ranks of a group differ.

    group: its dimension; number: of the collective in the group, from 1; first, second: what each
    calls, None if it calls nothing more.
    """

    group: str
    ranks: tuple[int, int]
    number: int
    first: Collective | None
    second: Collective | None

    def __str__(self) -> str:
        calls = [
            "nothing more"
            if one is None
            else f"{one.op} of {one.bytes:,} bytes of {one.dtype} for {one.module}"
            for one in (self.first, self.second)
        ]
        return (
            f"in the {self.group} group of ranks {self.ranks[0]:,} and {self.ranks[1]:,}, "
            f"collective {self.number:,}: rank {self.ranks[0]:,} calls {calls[0]}, "
            f"rank {self.ranks[1]:,} {calls[1]}"
        )


def mismatches(steps: Sequence[RankStep]) -> list[Mismatch]:
    return [one for pair in combinations(steps, 2) for one in _of_pair(*pair)]


def _of_pair(one: RankStep, other: RankStep) -> Iterator[Mismatch]:
    ranks = one.rank, other.rank
    used = {each.ranks: None for step in (one, other) for each in step.collectives}
    for group in used:
        if not {*ranks} <= {*group}:
            continue
        calls = [
            [each for each in step.collectives if each.ranks == group and each.peer is None]
            for step in (one, other)
        ]
        yield from _first(one.groups.get(group, "world"), ranks, *calls)
    for sender, receiver in ((one, other), (other, one)):
        sent = [e for e in sender.collectives if e.op == "send" and e.peer == receiver.rank]
        got = [e for e in receiver.collectives if e.op == "recv" and e.peer == sender.rank]
        yield from _first("pipeline", (sender.rank, receiver.rank), sent, got)


def _first(
    group: str, ranks: tuple[int, int], one: Sequence[Collective], other: Sequence[Collective]
) -> Iterator[Mismatch]:
    for number, (first, second) in enumerate(zip_longest(one, other), 1):
        if _said(first) != _said(second):
            yield Mismatch(group, ranks, number, first, second)
            return


def _said(call: Collective | None) -> tuple[object, ...] | None:
    """Return what the two sides must agree on."""
    if call is None:
        return None
    op = "message" if call.op in POINT_TO_POINT else call.op
    # ranks of an exchange may have different numbers of rows for each other
    return op, call.dtype, None if op == "all_to_all" else call.bytes
