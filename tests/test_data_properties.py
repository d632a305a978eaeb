"""Whatever the data and the world: every token once an epoch, steps of the same content, and the same rest after any interruption."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.data.order import RowOrder
from fsdp_trainer.training.batches import Batches

SEQ_LEN = 16
CPU = torch.device("cpu")


class Numbered:
    """A store in which no two tokens are alike: they count from 1, so that a token tells its sample, its place and what comes next."""

    source_names = ("a", "b", "c")

    def __init__(self, samples, fingerprint="f"):
        """samples: (source, weights of its tokens); the first token's is 0."""
        self.fingerprint = fingerprint
        self.sources = np.array([source for source, _ in samples], np.int32)
        self.lengths = np.array([len(weights) for _, weights in samples])
        self.weights = np.concatenate([weights for _, weights in samples]).astype(np.float32)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.tokens = np.arange(1, self.offsets[-1] + 1).astype(np.int32)
        self.weight_sums = np.add.reduceat(self.weights.astype(np.float64), self.offsets[:-1])
        self.supervised = np.add.reduceat(self.weights > 0, self.offsets[:-1])

    def __len__(self):
        return len(self.lengths)

    def samples_of(self, tokens):
        return np.searchsorted(self.offsets, np.asarray(tokens) - 1, side="right") - 1

    def read(self, sample, start=0, length=None):
        part = slice(self.offsets[sample] + start, min(self.offsets[sample] + start + (length or SEQ_LEN**3), self.offsets[sample + 1]))
        return self.tokens[part], self.weights[part]


@dataclass(frozen=True)
class World:
    ranks: int
    micro_rows: int


# A text is learnt whole and may be longer than a row; a chat has any weights, not all of them 0, and fits.
TEXTS = st.tuples(st.integers(0, 2), st.sampled_from([2, 3, 15, 16, 17, 31, 32, 33, 70]) | st.integers(2, 40)).map(
    lambda text: (text[0], np.array([0.0, *[1.0] * (text[1] - 1)]))
)
CHATS = st.tuples(st.integers(0, 2), st.lists(st.sampled_from([0, 0.25, 1]), min_size=1, max_size=SEQ_LEN - 1).filter(any)).map(
    lambda chat: (chat[0], np.array([0.0, *chat[1]]))
)
WORLDS = st.builds(World, st.integers(1, 9), st.integers(1, 4))


@st.composite
def orders(draw):
    """Any data in any packing: makes the same order again and again."""
    packing = draw(st.sampled_from(["best_fit", "none", "stream"]))
    samples = draw(st.lists(TEXTS if packing == "stream" else TEXTS | CHATS, min_size=1, max_size=30))
    return partial(RowOrder, Numbered(samples), SEQ_LEN, packing, draw(st.booleans()), draw(st.integers(0, 3)))


def computed(order, world, plan):
    """The rows of a step, as all ranks of a world compute them: each its tokens, and its targets with their weights; in no order.

    What holds for every micro-batch is looked at on the way.
    """
    ranks = [Batches(order, world.micro_rows, rank, world.ranks, CPU) for rank in range(world.ranks)]
    dealt = [list(rank.micro_batches(plan)) for rank in ranks]
    assert {len(batches) for batches in dealt} == {rank.count(plan) for rank in ranks} and len({rank.count(plan) for rank in ranks}) == 1
    rows, weight, squares = [], 0.0, 0
    for batch in (batch for batches in dealt for batch in batches):
        assert batch.tokens.shape == batch.positions.shape == (world.micro_rows, SEQ_LEN)
        learnt = batch.weights > 0
        assert len(batch.index) % 128 == 0 and not batch.weights[int(learnt.sum()) :].any()  # padding comes last, and weighs nothing
        index, targets, weights = (x[learnt] for x in (batch.index, batch.targets, batch.weights))
        assert torch.equal(targets, batch.tokens.flatten()[index] + 1)  # the next token, and of the same document:
        starts = order.store.tokens[order.store.offsets[:-1]]
        assert not np.isin(targets.numpy(), starts).any()
        assert batch.sources is None or batch.sources[learnt].tolist() == order.store.sources[order.store.samples_of(targets)].tolist()
        weight += float(weights.double().sum())
        for i, lengths in enumerate(batch.layout.lengths):
            n = sum(lengths)
            assert min(lengths, default=1) > 0 and n <= SEQ_LEN and not batch.tokens[i, n:].any()
            assert batch.positions[i, :n].tolist() == [place for length in lengths for place in range(length)]
            ends = np.cumsum([0, *lengths]).tolist()
            for start, end in pairwise(ends):
                document = batch.tokens[i, start:end]
                assert torch.equal(document, torch.arange(int(document[0]), int(document[0]) + end - start))
                assert len(set(order.store.samples_of(document).tolist())) == 1
            squares += sum(length**2 for length in lengths)
            mine = index // SEQ_LEN == i
            if lengths:
                rows.append((tuple(batch.tokens[i, :n].tolist()), tuple(zip(targets[mine].tolist(), weights[mine].tolist(), strict=True))))
    assert len(rows) == plan.stop - plan.start
    assert np.isclose(weight, plan.weight) and squares == plan.squares
    assert (sum(len(tokens) for tokens, _ in rows), sum(len(learnt) for _, learnt in rows)) == (plan.tokens, plan.supervised)
    return sorted(rows)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(orders(), st.integers(1, 13), st.integers(1, 3), st.lists(WORLDS, min_size=1, max_size=3), st.data())
def test_steps_are_the_same_in_every_world_and_after_every_interruption(made, rows, epochs, worlds, data):
    order = made()
    last_row = epochs * order.rows_per_epoch
    plans = list(Batches(order, 1, 0, 1, CPU).steps(rows, last_row))
    assert plans[0].start == 0 and plans[-1].stop == last_row
    assert all(before.stop == after.start for before, after in pairwise(plans))
    assert all(plan.stop - plan.start == rows for plan in plans[:-1]) and 0 < plans[-1].stop - plans[-1].start <= rows
    whole = [computed(order, World(1, 2), plan) for plan in plans]
    for world in worlds:
        done = data.draw(st.integers(0, len(plans)))
        again = made()
        rest = list(Batches(again, world.micro_rows, 0, world.ranks, CPU).steps(rows, last_row, done, done and plans[done - 1].stop))
        assert rest == plans[done:]
        assert [computed(again, world, plan) for plan in rest] == whole[done:]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(orders(), st.integers(1, 13), st.integers(1, 3), WORLDS)
def test_every_epoch_has_every_token_once_and_learns_each_with_its_weight(made, rows, epochs, world):
    order = made()
    store = order.store
    expected = {token: weight for token, weight in zip(store.tokens.tolist(), store.weights.tolist(), strict=True) if weight}
    seen: list[int] = []
    learnt: list[tuple[int, float]] = []
    for plan in Batches(order, world.micro_rows, 0, world.ranks, CPU).steps(rows, epochs * order.rows_per_epoch):
        for tokens, targets in computed(order, world, plan):
            seen += tokens
            learnt += targets
    assert np.array_equal(np.sort(seen), np.repeat(store.tokens, epochs))
    assert sorted(learnt) == sorted(list(expected.items()) * epochs)
