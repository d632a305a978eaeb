"""Whatever the data and the world: every token as often as it should be, steps of the same content,
and the same rest after any interruption."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import Texts

from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.training.batches import Batches, BatchOptions

SEQ_LEN = 16
MOST_ROWS = 80
CPU = torch.device("cpu")


class Numbered(Texts):
    """A store in which no two tokens are alike: they count from `first` on, so that a token tells
    its sample and what comes next."""

    folder = Path("numbered")
    weight_sums = supervised = None

    def __init__(self, samples, first=1, sources=1):
        """samples: (source, weights of its tokens), of which the first token's is 0."""
        super().__init__([len(weights) for _, weights in samples])
        self.fingerprint = f"of {first}"
        self.source_names = [f"{first}/{i}" for i in range(sources)]
        self.sources = np.array([source % sources for source, _ in samples], np.int32)
        self.tokens += first
        self.weights = np.concatenate([weights for _, weights in samples]).astype(np.float32)
        self.weight_sums = np.add.reduceat(self.weights.astype(np.float64), self.offsets)
        self.supervised = np.add.reduceat(self.weights > 0, self.offsets)

    def __len__(self):
        return len(self.lengths)

    def of_learnt(self, numbers):
        """Each learnt token, by its place among all that are learnt."""
        return {"learnt": self.tokens[self.weights > 0][numbers]}


# A text is supervised whole and may be longer than a row; a chat has any weights, not all of them
# 0, and fits.
TEXTS = st.tuples(
    st.integers(0, 2), st.sampled_from([2, 3, 15, 16, 17, 31, 32, 33, 70]) | st.integers(2, 40)
).map(lambda text: (text[0], np.array([0.0, *[1.0] * (text[1] - 1)])))


def weighted(weights, largest):
    """Samples of up to `largest` tokens with any of these weights, not all of them 0."""
    lists = st.lists(st.sampled_from(weights), min_size=1, max_size=largest).filter(any)
    return st.tuples(st.integers(0, 2), lists).map(
        lambda pair: (pair[0], np.array([0.0, *pair[1]]))
    )


MASKED = weighted([0, 1], 70)  # may be longer than a row, too
CHATS = weighted([0, 0.25, 1], SEQ_LEN - 1)


@dataclass
class Data:
    """Any data in any packing: one component, or a mixture."""

    make: Callable[[], Mixture]
    """The same order, made anew."""
    stores: list[Numbered]
    repeats: list[int] | None
    """How often an epoch has the samples of each; None: they are mixed by weights."""

    def of(self, tokens):
        """(sample, source) of each token, counted over all stores."""
        tokens = np.asarray(tokens)
        starts = np.concatenate([store.tokens[store.offsets] for store in self.stores])
        before = np.cumsum([0, *(len(store.source_names) for store in self.stores)])
        sources = np.concatenate(
            [store.sources + first for store, first in zip(self.stores, before, strict=False)]
        )
        samples = np.searchsorted(starts, tokens, side="right") - 1
        return samples, sources[samples]


@st.composite
def data_sets(draw):
    """Draw data sets with up to 4 components."""
    packing, shuffle, seed = (
        draw(st.sampled_from(["best_fit", "none", "stream"])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
    by = draw(st.sampled_from(("nothing", "repeats", "weights")))
    stores = []
    for _ in range(1 if by == "nothing" else draw(st.integers(2, 4))):
        samples = draw(
            st.lists(
                TEXTS | MASKED if packing == "stream" else TEXTS | MASKED | CHATS,
                min_size=1,
                max_size=20,
            )
        )
        stores.append(
            Numbered(
                samples, 1 + sum(len(store.tokens) for store in stores), draw(st.integers(1, 3))
            )
        )
    of_each = {"nothing": st.just(1), "repeats": st.integers(1, 3), "weights": st.floats(0.01, 1)}[
        by
    ]
    weights = [draw(of_each) for _ in stores]
    starts = [draw(st.integers(0, 50)) if by == "weights" else 0 for _ in stores]

    def make():
        orders = [
            RowOrder(
                *(store, SEQ_LEN, packing, shuffle, seed),
                columns=SampleColumns(of_tokens=store.of_learnt),
            )
            for store in stores
        ]
        components = [
            Component(f"c{i}", *parts)
            for i, parts in enumerate(zip(orders, map(str, orders), weights, starts, strict=True))
        ]
        return Mixture(components, by == "weights")

    return Data(make, stores, None if by == "weights" else [int(times) for times in weights])


@dataclass(frozen=True)
class World:
    ranks: int
    micro_rows: int


WORLDS = st.builds(World, st.integers(1, 9), st.integers(1, 4))


def computed(data, order, world, plan):
    """The rows of a step, as all ranks of a world compute them: each its tokens, and its targets
    with their weights; in no order.

    What holds for every micro-batch is looked at on the way.
    """
    ranks = [
        Batches(order, BatchOptions(world.micro_rows, rank, world.ranks, CPU))
        for rank in range(world.ranks)
    ]
    dealt = [list(rank.micro_batches(plan)) for rank in ranks]
    assert {len(batches) for batches in dealt} == {rank.count(plan) for rank in ranks}
    assert len({rank.count(plan) for rank in ranks}) == 1
    rows, weight, squares = [], 0.0, 0
    for batch in (batch for batches in dealt for batch in batches):
        assert batch.tokens.shape == batch.positions.shape == (world.micro_rows, SEQ_LEN)
        learnt = batch.weights > 0
        assert len(batch.index)
        assert not batch.weights[int(learnt.sum()) :].any()
        index, targets, weights = (x[learnt] for x in (batch.index, batch.targets, batch.weights))
        predicting = batch.tokens.flatten()[index]
        assert torch.equal(targets, predicting + 1)
        if batch.columns:
            assert torch.equal(batch.columns["learnt"][learnt], targets)
        assert np.array_equal(data.of(targets)[0], data.of(predicting)[0])
        if len(order.source_names) > 1:
            assert np.array_equal(batch.sources[learnt], data.of(targets)[1])
        weight += float(weights.double().sum())
        for i, lengths in enumerate(batch.layout.lengths):
            n = sum(lengths)
            assert min(lengths, default=1) > 0
            assert n <= SEQ_LEN
            assert not batch.tokens[i, n:].any()
            assert batch.positions[i, :n].tolist() == [
                place for length in lengths for place in range(length)
            ]
            for document in torch.split(batch.tokens[i, :n], lengths) if lengths else ():
                assert torch.equal(
                    document, torch.arange(int(document[0]), int(document[0]) + len(document))
                )
                assert len(set(data.of(document)[0].tolist())) == 1
            squares += sum(length**2 for length in lengths)
            mine = index // SEQ_LEN == i
            if lengths:
                rows.append(
                    (
                        tuple(batch.tokens[i, :n].tolist()),
                        tuple(zip(targets[mine].tolist(), weights[mine].tolist(), strict=True)),
                    )
                )
    assert len(rows) == plan.stop - plan.start
    assert np.isclose(weight, plan.weight)
    assert squares == plan.attention_cost
    assert (sum(len(tokens) for tokens, _ in rows), sum(len(learnt) for _, learnt in rows)) == (
        plan.tokens,
        plan.supervised,
    )
    return sorted(rows)


@settings(max_examples=30)
@given(
    data_sets(),
    st.integers(1, 13),
    st.integers(1, 3),
    st.lists(WORLDS, min_size=1, max_size=3),
    st.data(),
)
def test_epochs_are_complete_and_steps_the_same_in_every_world_and_after_every_interruption(
    data, rows, epochs, worlds, draw
):
    """A complete epoch has every token as often as asked, and learns each with its weight."""
    order = data.make()
    last_row = min(epochs * order.rows_per_epoch, MOST_ROWS)
    plans = list(Batches(order, BatchOptions(1, 0, 1, CPU)).plans(rows, last_row))
    assert plans[0].start == 0
    assert plans[-1].stop == last_row
    assert all(before.stop == after.start for before, after in pairwise(plans))
    assert all(plan.stop - plan.start == rows for plan in plans[:-1])
    assert 0 < plans[-1].stop - plans[-1].start <= rows
    whole = [computed(data, order, World(1, 2), plan) for plan in plans]
    if data.repeats and last_row == epochs * order.rows_per_epoch:
        content = [row for step in whole for row in step]
        times = [
            repeat * epochs
            for store, repeat in zip(data.stores, data.repeats, strict=True)
            for _ in store.tokens
        ]
        tokens = np.repeat(np.concatenate([store.tokens for store in data.stores]), times)
        weights = np.repeat(np.concatenate([store.weights for store in data.stores]), times)
        assert sorted(token for held, _ in content for token in held) == tokens.tolist()
        learnt = list(zip(tokens[weights > 0].tolist(), weights[weights > 0].tolist(), strict=True))
        assert sorted(target for _, targets in content for target in targets) == learnt
    for world in worlds:
        done = draw.draw(st.integers(0, len(plans)))
        again = data.make()
        batches = Batches(again, BatchOptions(world.micro_rows, 0, world.ranks, CPU))
        rest = list(batches.plans(rows, last_row, done, done and plans[done - 1].stop))
        assert rest == plans[done:]
        assert [computed(data, again, world, plan) for plan in rest] == whole[done:]
