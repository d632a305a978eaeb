"""The rows of all components, addressed by one running index.

The component of row n, and its row in that component, are a pure function of n and the shares.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from fsdp_trainer.config.data_files import entries
from fsdp_trainer.config.schema import Data, TrainConfig
from fsdp_trainer.data.files.file_changes import stored_files
from fsdp_trainer.data.order.row_order import RowData, RowOrder, Rows
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import UserError

REPEATED = 4
OFTEN = (
    f"more than {REPEATED} passes over the same text teach less and less (Muennighoff et al."
    " 2023, Scaling Data-Constrained Language Models)"
)
# increase it when rows change their documents: resumed runs then start their data anew, and report
# it
VERSION = 1
PARTS = 1 << 40  # resolution of integer weights: 10⁹ rows are off by < 1/1000 of a row
LEAST = 1e-6  # minimum share of the rows; the cost of finding a turn grows with its inverse


class Turns:
    """The order of turns, in which component i has `parts[i]` of every Σ parts turns.

    After any n turns the count of each component differs from n · share by less than one: the j-th
    turn of a component lies within [⌊j / share⌋, ⌈(j + 1) / share⌉). Scheduling by earliest
    deadline first satisfies this for all components (Baruah et al. 1996, Proportionate progress),
    but has to be computed from the first turn on. Therefore the schedule restarts in every block of
    turns. The counts at the edge of a block follow from the counts at the edge before, where turns
    that may or may not have been used by then are given to the components with the earliest
    deadlines. From such counts all deadlines can be met, and if every component has a turn in a
    block, any two edges can be joined (Hall's condition for intervals).
    """

    def __init__(self, parts: Sequence[int]):
        self.parts, self.whole = [int(part) for part in parts], sum(map(int, parts))
        self.span = max(1024, -(-self.whole // min(part for part in self.parts if part)))
        """Turns in a block.

        Every component has at least one in it; otherwise the counts at two edges could contradict
        each other.
        """
        self.edge, self.block = lru_cache(maxsize=8)(self._edge), lru_cache(maxsize=3)(self._block)

    def taken(self, n: int) -> np.ndarray:
        """Return the turns of each component among the first n: [components] int64."""
        block, within = divmod(n, self.span)
        had = np.bincount(self.block(block)[0][:within], minlength=len(self.parts)) if within else 0
        return self.edge(block) + had

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the component of each turn, and its earlier turns: [turns] int64 each."""
        who, ordinal = np.empty((2, len(turns)), np.int64)
        blocks, places = np.divmod(turns, self.span)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            who[here], ordinal[here] = (part[places[here]] for part in self.block(block))
        return who, ordinal

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the component of each turn of a block, and its earlier turns: [span] each."""
        first = self.edge(block)
        who = self._deal(block * self.span, first, self.edge(block + 1))
        ordinal = np.empty_like(who)
        for i, before in enumerate(first.tolist()):
            ordinal[who == i] = before + np.arange(np.count_nonzero(who == i))
        return who, ordinal

    def _edge(self, block: int) -> np.ndarray:
        """Return the turns of each component before a block."""
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

        before, until: number of turns each component has at the start, and may have at the end.
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

    key: a hash of everything that decides its rows. requested: its weight or repeat.
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
        epochs, rest = divmod(rows, self.order.rows_per_epoch)
        first = epochs * self.order.rows_per_epoch
        return epochs * self.order.store.token_count + self.order.totals(first, first + rest)[1]


class Mixture:
    """Rows of all components over all epochs, addressed by one running index.

    weighted: if True, `requested` are shares of the tokens; they are converted to shares of the
        rows by the average fill of each component's rows, and an epoch has as many rows as all
        components. If False, they are repeats: an epoch holds the rows of each component that many
        times.
    digests: hashes of the files' content, by path, for the checkpoint.
    """

    def __init__(
        self,
        components: Sequence[Component],
        weighted: bool = False,
        digests: Mapping[str, str] | None = None,
    ):
        self.components, self.weighted = list(components), weighted
        self.digests = digests or {}
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
        """Hash of everything that decides the content of each row."""
        self.start = 0
        """The running index of its first row; earlier rows came from another mixture."""

    @property
    def orders(self) -> list[RowOrder]:
        return [component.order for component in self.components]

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

        starts: for each component, the numbers of rows and tokens used before that row.
        """
        started = copy(self)
        started.start = row
        started.components = [
            replace(component, start=rows, start_tokens=tokens)
            for component, (rows, tokens) in zip(self.components, starts, strict=True)
        ]
        return started

    def with_columns(self, columns: Iterator[SampleColumns]) -> "Mixture":
        mixture = copy(self)
        mixture.components = [
            replace(component, order=component.order.with_columns(next(columns)))
            for component in self.components
        ]
        return mixture

    def taken(self, index: int) -> list[int]:
        """Return each component's number of rows before row `index`, from the start of the run."""
        n = index - self.start
        turns = self.turns.taken(n).tolist() if len(self.orders) > 1 else [n]
        return [
            component.start + had for component, had in zip(self.components, turns, strict=True)
        ]

    def locate(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the component of each row, and its index there, both [rows] int64."""
        turns = np.asarray(indices, np.int64) - self.start
        who, ordinal = np.zeros_like(turns), turns
        if len(self.orders) > 1:
            who, ordinal = self.turns.at(turns)
        return who, ordinal + np.array([component.start for component in self.components])[who]

    def read(self, index: int) -> RowData:
        return self.read_rows([index]).row(0)

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
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
        """Return the attention cost of each of these rows: [rows] float64."""
        who, index = self.locate(indices)
        costs = np.zeros(len(index))
        for i in np.unique(who).tolist():
            costs[who == i] = self.orders[i].attention_costs(index[who == i])
        return costs

    def totals(self, start: int, stop: int) -> tuple[float, int, int, int]:
        """Return sums over rows [start, stop), without reading any row.

        The sums are: weight, tokens, supervised tokens, attention cost.
        """
        ranges = zip(self.orders, self.taken(start), self.taken(stop), strict=True)
        weight, tokens, supervised, attention_cost = zip(
            *(order.totals(first, end) for order, first, end in ranges), strict=True
        )
        return sum(weight), sum(tokens), sum(supervised), sum(attention_cost)

    def documents(self, start: int, stop: int) -> int:
        """Return the number of documents in rows [start, stop), without reading any row."""
        ranges = zip(self.orders, self.taken(start), self.taken(stop), strict=True)
        return sum(order.documents(first, end) for order, first, end in ranges)

    def where(self, index: int) -> list[str]:
        """Return FILE:LINE of each document in row `index`."""
        return [store.where(sample) for store, sample in self.samples_of(index)]

    def samples_of(self, index: int) -> list[tuple[TokenStore, int]]:
        (component,), (row,) = (part.tolist() for part in self.locate([index]))
        order = self.orders[component]
        return [(order.store, sample) for sample, _, _ in order.row(row)]

    def state(self, index: int) -> dict[str, Any]:
        sources = [
            {
                "name": c.name,
                "key": c.key,
                "asked": c.requested,
                "rows_per_epoch": c.order.rows_per_epoch,
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
        """Return lines on the use of each component up to row `last`; [] for one component."""
        if len(self.components) == 1:
            return []
        how, epoch = "repeats", "every source as often as its repeat says"
        if self.weighted:
            how, epoch = "weights", "as many rows as all have"
        lines = [f"mixed by {how}; an epoch is {epoch}. In this run:"]
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
        """Return statistics of each component up to row `index`.

        They include the requested and the actual share of tokens, and its tokens and epochs so far.
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


class Stores(Protocol):
    """Prepared data: a store for each component, their names, and the files' content hashes."""

    train: list[TokenStore]
    names: list[str]
    digests: dict[str, str]


@dataclass(frozen=True)
class OrderMaker:
    """Makes the rows of stored samples, in order.

    packing: like data.packing. attention_cost: see RowOrder.
    """

    packing: str
    seq_len: int
    seed: int
    attention_cost: Callable[[np.ndarray], np.ndarray] = np.square

    @classmethod
    def of(
        cls,
        cfg: TrainConfig,
        attention_cost: Callable[[np.ndarray], np.ndarray] = np.square,
        packs: bool = True,
    ) -> "OrderMaker":
        """Return the one that makes the rows of a run.

        packs: False: documents of one row would change each other's results.
        """
        # each prompt has a row by itself
        alone = cfg.objective.method.samples or (cfg.data.packing == "best_fit" and not packs)
        packing = "none" if alone else cfg.data.packing
        return cls(packing, cfg.batch.seq_len, cfg.run.seed, attention_cost)

    def training(self, data: Data, prepared: Stores) -> Mixture:
        """Return the rows of training, in order.

        Raises UserError for a mixture that is not possible.
        """
        named = entries(data.path)
        weighted = any(entry.weight is not None for entry in named)
        given = [entry.weight if weighted else entry.repeat for entry in named]
        requested = [1.0 if times is None else times for times in given]
        if len(prepared.train) == 1:
            requested, weighted = [1.0 if weighted else requested[0]], False
        if weighted:
            requested = [round(weight / sum(requested), 12) for weight in requested]
        stores = zip(prepared.names, prepared.train, requested, strict=False)
        mixture = Mixture(
            [self._component(name, store, data.shuffle, times) for name, store, times in stores],
            weighted,
            prepared.digests,
        )
        shares = zip(mixture.components, mixture.shares, strict=True)
        if small := [component.name for component, share in shares if 0 < share < LEAST]:
            reason = (
                f"{small[0]} would have less than a millionth of the rows. Leave it out, or raise"
                f" its {'weight' if weighted else 'repeat'}"
            )
            raise UserError("the data cannot be mixed", "data.path", reason)
        return mixture

    def validation(self, store: TokenStore) -> Mixture:
        return Mixture([self._component("validation", store, False)])

    def _component(
        self, name: str, store: TokenStore, shuffle: bool, requested: float = 1.0
    ) -> Component:
        packing, seq_len, seed = self.packing, self.seq_len, self.seed
        order = RowOrder(store, seq_len, packing, shuffle, seed, self.attention_cost)
        parts = [store.fingerprint, packing, seq_len, seed, shuffle, VERSION]
        return Component(name, order, "/".join(map(str, parts)), requested)
