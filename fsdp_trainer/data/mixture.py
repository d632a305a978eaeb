"""The rows of all components as one running index.

The component of row n, and its row there, are a pure function of n and the shares.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from fsdp_trainer.config.data_files import entries
from fsdp_trainer.config.schema import PROMPTED, TrainConfig
from fsdp_trainer.data.file_changes import stored_files
from fsdp_trainer.data.order import RowData, RowOrder, Rows
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.store import TokenStore
from fsdp_trainer.errors import Problem, UserError

REPEATED = 4
OFTEN = (
    f"more than {REPEATED} passes over the same text teach less and less (Muennighoff et al."
    " 2023, Scaling Data-Constrained Language Models)"
)
# raise it when a row comes to hold other documents: runs that go on then begin their data anew, and
# say so
VERSION = 1
PARTS = 1 << 40  # weights in whole numbers; 10⁹ rows are not off by a thousandth of one
LEAST = 1e-6  # of all rows; what it takes to find a turn grows with the inverse


class Turns:
    """The order of turns, where component i has `parts[i]` of every Σ parts.

    After any n turns each has had n · share of them to less than one: the j-th turn of a component
    lies within [⌊j / share⌋, ⌈(j + 1) / share⌉), which the earliest deadline first keeps for all
    (Baruah et al. 1996, Proportionate progress). That order would have to be followed from the
    first turn on; so it begins anew in every block of turns. The counts at a block's edge follow
    from those at the edge before: turns that may or may not have been taken by then go to those
    with the earliest deadlines. From such counts all deadlines can be met, and if every component
    has a turn in a block, any two edges can be joined (Hall's condition for intervals).
    """

    def __init__(self, parts: Sequence[int]):
        self.parts, self.whole = [int(part) for part in parts], sum(map(int, parts))
        self.span = max(1024, -(-self.whole // min(part for part in self.parts if part)))
        """Turns in a block.

        Everybody has one in it, or counts at two edges could contradict each other.
        """
        self.edge, self.block = lru_cache(maxsize=8)(self._edge), lru_cache(maxsize=3)(self._block)

    def taken(self, n: int) -> np.ndarray:
        """[components] int64: the turns of each among the first n."""
        block, within = divmod(n, self.span)
        had = np.bincount(self.block(block)[0][:within], minlength=len(self.parts)) if within else 0
        return self.edge(block) + had

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose these turns are, and how many turns it has had before, both int64."""
        who, ordinal = np.empty((2, len(turns)), np.int64)
        blocks, places = np.divmod(turns, self.span)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            who[here], ordinal[here] = (part[places[here]] for part in self.block(block))
        return who, ordinal

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """[span] each: who has which turn, and its how manieth that is."""
        first = self.edge(block)
        who = self._deal(block * self.span, first, self.edge(block + 1))
        ordinal = np.empty_like(who)
        for i, before in enumerate(first.tolist()):
            ordinal[who == i] = before + np.arange(np.count_nonzero(who == i))
        return who, ordinal

    def _edge(self, block: int) -> np.ndarray:
        """Turns of each before a block."""
        if block == 0:
            return np.zeros(len(self.parts), np.int64)
        first = (block - 1) * self.span
        had, rests = zip(*(divmod(first * part, self.whole) for part in self.parts), strict=True)
        due = [
            (-((rest - self.whole) // part), i)
            for i, (part, rest) in enumerate(zip(self.parts, rests, strict=True))
            if rest
        ]
        before = np.array(had, np.int64)
        before[[i for _, i in sorted(due)[: first - sum(had)]]] += 1
        begun = [-(-(first + self.span) * part // self.whole) for part in self.parts]
        return before + np.bincount(self._deal(first, before, begun), minlength=len(self.parts))

    def _deal(
        self, first: int, before: Sequence[int] | np.ndarray, until: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return the components that have the turns from `first` on: [span] int64.

        before, until: how many turns each component has had, and may have had at the end.
        """
        releases, deadlines, owners = [], [], []
        for i, part in enumerate(self.parts):
            had, rest = divmod(first * part, self.whole)
            turns = np.arange(int(before[i]) - had, int(until[i]) - had)
            releases.append((turns * self.whole - rest) // max(1, part))
            deadlines.append(-((rest - (turns + 1) * self.whole) // max(1, part)))
            owners.append(np.full(len(turns), i))
        released, deadline, owner = (
            np.concatenate(every) for every in (releases, deadlines, owners)
        )
        by_release = np.argsort(released, kind="stable")
        jobs = (deadline * len(self.parts) + owner)[by_release].tolist()
        opens = [*released[by_release].tolist(), self.span]
        who: list[int] = []
        waiting: list[int] = []
        job = 0
        for turn in range(self.span):
            while opens[job] <= turn:
                heappush(waiting, jobs[job])
                job += 1
            who.append(heappop(waiting) % len(self.parts))
        return np.array(who)


@dataclass
class Component:
    """A part of the data that is packed and ordered by itself.

    key: a hash of all that decides its rows; requested: its weight or repeat.
    """

    name: str
    order: RowOrder
    key: str = ""
    requested: float = 1.0
    start: int = 0
    """Rows of it that were used before the mixture's first row."""
    start_tokens: int = 0
    """Tokens in those rows."""

    def tokens(self, rows: int) -> int:
        """Tokens in its first `rows` rows."""
        epochs, rest = divmod(rows, self.order.rows_per_epoch)
        first = epochs * self.order.rows_per_epoch
        return epochs * len(self.order.store.tokens) + self.order.totals(first, first + rest)[1]


class Mixture:
    """Rows of all components over all epochs, by one running index.

    weighted: `requested` are shares of the tokens; rows are shared out so, as full as those of each
    component are on average. An epoch has as many rows as all components have. Else they are
    repeats: an epoch holds exactly so many times the rows of each. digests: of the files' content,
    by path, for a checkpoint to keep.
    """

    def __init__(
        self,
        components: Sequence[Component],
        weighted: bool = False,
        digests: Mapping[str, str] | None = None,
    ):
        self.components, self.weighted = list(components), weighted
        self.digests = digests or {}
        self.orders = [component.order for component in self.components]
        rows = [order.rows_per_epoch for order in self.orders]
        requested = [component.requested for component in self.components]
        if weighted:
            shares = np.array(requested) / [order.fill for order in self.orders]
            parts = [max(1, round(share * PARTS)) for share in (shares / shares.sum()).tolist()]
        else:
            parts = [
                max(1, round(times * each)) if times else 0
                for times, each in zip(requested, rows, strict=True)
            ]
        self.shares = [part / sum(parts) for part in parts]
        """Each component's share of the rows, from 0 to 1."""
        self.turns = Turns(parts)
        self.rows_per_epoch: int = sum(rows) if weighted else sum(parts)
        self.seq_len = self.orders[0].seq_len
        self.fill: float = sum(
            share * order.fill for share, order in zip(self.shares, self.orders, strict=True)
        )
        """Share of positions that hold a token."""
        self.source_names = [name for order in self.orders for name in order.store.source_names]
        self._first_source = np.cumsum(
            [0, *(len(order.store.source_names) for order in self.orders)]
        )
        self.folder = ", ".join(str(order.store.folder) for order in self.orders)
        self.fingerprint = self._hash(
            self.orders[0].store.fingerprint, [order.store.fingerprint for order in self.orders]
        )
        self.key = self._hash(
            self.components[0].key, [component.key for component in self.components]
        )
        """Hash of all that decides which row is which."""
        self.start = 0
        """The running index of its first row: what came before was another mixture's."""

    def _hash(self, alone: str, each: list[str]) -> str:
        if len(each) == 1 and self.components[0].requested == 1:
            return alone
        parts = [
            self.weighted,
            [*zip(each, (component.requested for component in self.components), strict=True)],
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=10).hexdigest()

    def started_at(self, row: int, starts: Sequence[tuple[int, int]]) -> "Mixture":
        """Return this mixture with `row` as the running index of its first row.

        starts: of each component, the rows before that, and the tokens in them.
        """
        started = copy(self)
        started.start = row
        started.components = [
            replace(component, start=rows, start_tokens=tokens)
            for component, (rows, tokens) in zip(self.components, starts, strict=True)
        ]
        return started

    def taken(self, index: int) -> list[int]:
        """Rows of each component before row `index`, those before the mixture included."""
        n = index - self.start
        turns = self.turns.taken(n).tolist() if len(self.orders) > 1 else [n]
        return [
            component.start + had for component, had in zip(self.components, turns, strict=True)
        ]

    def locate(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two int64 arrays: the component of each row, and its index there."""
        turns = np.asarray(indices, np.int64) - self.start
        who, ordinal = (
            self.turns.at(turns) if len(self.orders) > 1 else (np.zeros_like(turns), turns)
        )
        return who, ordinal + np.array([component.start for component in self.components])[who]

    def read(self, index: int) -> RowData:
        """Row `index` by itself."""
        return self.read_rows([index]).row(0)

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these indices, in their order."""
        who, index = self.locate(indices)
        if len(self.orders) == 1:
            return self.orders[0].read_rows(index)
        rows = Rows.empty(len(index), self.seq_len)
        for i in np.unique(who).tolist():
            places = np.flatnonzero(who == i)
            part = self.orders[i].read_rows(index[places])
            part.sources += self._first_source[i]
            rows.put(places, part)
        return rows

    def attention_costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """[rows] of what attention costs in each of these rows."""
        who, index = self.locate(indices)
        costs = np.zeros(len(index))
        for i in np.unique(who).tolist():
            costs[who == i] = self.orders[i].attention_costs(index[who == i])
        return costs

    def totals(self, start: int, stop: int) -> tuple[float, int, int, int]:
        """Return sums over rows [start, stop), without reading one.

        Weight, tokens, supervised tokens, and what attention costs.
        """
        ranges = zip(self.orders, self.taken(start), self.taken(stop), strict=True)
        weight, tokens, supervised, attention_cost = zip(
            *(order.totals(first, end) for order, first, end in ranges), strict=True
        )
        return sum(weight), sum(tokens), sum(supervised), sum(attention_cost)

    def documents(self, start: int, stop: int) -> int:
        """Return how many documents rows [start, stop) hold, without reading one."""
        ranges = zip(self.orders, self.taken(start), self.taken(stop), strict=True)
        return sum(order.documents(first, end) for order, first, end in ranges)

    def attention_cost_share(self, cost: Callable[[np.ndarray], np.ndarray]) -> float:
        """Return what attention costs, as a share of what it would if every row were one document.

        cost: of documents' lengths, as the components were built with.
        """
        # of one epoch: small sources have thousands
        per_row = [
            order.totals(0, order.rows_per_epoch)[3] / order.rows_per_epoch for order in self.orders
        ]
        of_rows = sum(share * row for share, row in zip(self.shares, per_row, strict=True))
        return of_rows / self.seq_len**2

    def where(self, index: int) -> list[str]:
        """Return FILE:LINE of what is in row `index`."""
        return [store.where(sample) for store, sample in self.samples_of(index)]

    def samples_of(self, index: int) -> list[tuple[TokenStore, int]]:
        """Return the stores and places of the samples that are in row `index`."""
        (component,), (row,) = (part.tolist() for part in self.locate([index]))
        order = self.orders[component]
        return [(order.store, sample) for sample, _, _ in order.row(row)]

    def state(self, index: int) -> dict[str, Any]:
        """The position of each component before row `index`, as a checkpoint stores it."""
        sources = [
            {
                "name": c.name,
                "key": c.key,
                "asked": c.requested,
                "rows_per_epoch": c.order.rows_per_epoch,
            }
            | {
                "start": c.start,
                "start_tokens": c.start_tokens,
                "rows": rows,
                "tokens": c.tokens(rows),
            }
            for c, rows in zip(self.components, self.taken(index), strict=True)
        ]
        return {
            "key": self.key,
            "start": self.start,
            "rows_per_epoch": self.rows_per_epoch,
            "sources": sources,
            **stored_files(self.digests),
        }

    def plan(self, last: int) -> list[str]:
        """Lines on how much of each component a run to row `last` reads; [] for one component."""
        if len(self.components) == 1:
            return []
        epoch = (
            "as many rows as all have"
            if self.weighted
            else "every source as often as its repeat says"
        )
        lines = [
            f"mixed by {'weights' if self.weighted else 'repeats'}; an epoch is {epoch}. In"
            " this run:"
        ]
        for c, share, rows in zip(self.components, self.shares, self.taken(last), strict=True):
            tokens, epochs = share * c.order.fill / self.fill, rows / c.order.rows_per_epoch
            lines.append(
                f"    {c.name}: {tokens:.2%} of the tokens, {share:.2%} of the rows,"
                f" {epochs:.2f} epochs of {c.order.rows_per_epoch:,} rows"
            )
            if epochs > REPEATED:
                lines.append(f"        {OFTEN}")
        return lines

    def report(self, index: int) -> list[dict[str, Any]]:
        """Figures of each component up to row `index`.

        The requested share of tokens, the actual one, its tokens and epochs so far.
        """
        rows = self.taken(index)
        got = [c.tokens(n) - c.start_tokens for c, n in zip(self.components, rows, strict=True)]
        requested = [
            share * order.fill / self.fill
            for share, order in zip(self.shares, self.orders, strict=True)
        ]
        return [
            {
                "name": c.name,
                "share_asked": round(requested[i], 6),
                "share": round(got[i] / max(1, sum(got)), 6),
                "tokens": c.start_tokens + got[i],
                "rows": rows[i],
                "epochs": round(rows[i] / c.order.rows_per_epoch, 4),
            }
            for i, c in enumerate(self.components)
        ]


def build_order(
    cfg: TrainConfig,
    prepared: Prepared,
    attention_cost: Callable[[np.ndarray], np.ndarray] = np.square,
) -> Mixture:
    """The rows of training, in their order. attention_cost: see RowOrder.

    Raises UserError for a mixture that cannot be.
    """
    named = entries(cfg.data.path)
    weighted = any(entry.weight is not None for entry in named)
    given = [entry.weight if weighted else entry.repeat for entry in named]
    requested = [1.0 if times is None else times for times in given]
    if len(prepared.train) == 1:
        requested, weighted = [1.0 if weighted else requested[0]], False
    if weighted:
        requested = [round(weight / sum(requested), 12) for weight in requested]
    stores = zip(prepared.names, prepared.train, requested, strict=False)
    mixture = Mixture(
        [
            _component(cfg, name, store, cfg.data.shuffle, attention_cost, times)
            for name, store, times in stores
        ],
        weighted,
        prepared.digests,
    )
    if small := [
        c.name
        for c, share in zip(mixture.components, mixture.shares, strict=True)
        if 0 < share < LEAST
    ]:
        reason = (
            f"{small[0]} would have less than a millionth of the rows. Leave it out, or raise its"
            f" {'weight' if weighted else 'repeat'}"
        )
        raise UserError("the data cannot be mixed", [Problem("data.path", reason)])
    return mixture


def validation_order(
    cfg: TrainConfig,
    store: TokenStore,
    attention_cost: Callable[[np.ndarray], np.ndarray] = np.square,
) -> Mixture:
    """All rows of what is held out, unshuffled."""
    return Mixture([_component(cfg, "validation", store, False, attention_cost)])


def _component(
    cfg: TrainConfig,
    name: str,
    store: TokenStore,
    shuffle: bool,
    attention_cost: Callable[[np.ndarray], np.ndarray],
    requested: float = 1.0,
) -> Component:
    packing, seq_len, seed = cfg.data.packing, cfg.batch.seq_len, cfg.run.seed
    if cfg.objective.name in PROMPTED:
        packing = "none"  # a row is a prompt
    order = RowOrder(store, seq_len, packing, shuffle, seed, attention_cost)
    parts = [store.fingerprint, packing, seq_len, seed, shuffle, VERSION]
    return Component(name, order, "/".join(map(str, parts)), requested)
