"""Context parallelism: how tokens are dealt to ranks, and what is refused."""

import numpy as np
import pytest

from fsdp_trainer.config.context_methods import choose_context_method
from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.parallel.balance_tokens import deal_tokens, token_costs


def test_the_start_says_how_rows_are_split(ledger):
    said = "shared by 2 ranks, 128 tokens each, by ulysses: 4 heads over 2 ranks"
    assert said in ledger.run("context").out


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths, windows",
    [
        ([8192], [None]),
        ([8192], [512, 512, 512, None]),
        ([400] * 20, [None]),
        ([5000, 100, 3000], [None]),
        ([8000, 64, 64], [1024, None]),
    ],
)
def test_the_slowest_rank_computes_little_more_than_the_mean(ranks, lengths, windows):
    costs = token_costs(lengths, 8192, windows)
    parts = deal_tokens(costs, ranks)
    assert sorted(parts.ravel()) == list(range(8192))
    assert (np.diff(parts) > 0).all()
    shares = costs[parts].sum(1)
    assert shares.max() < 1.05 * shares.mean()


@pytest.mark.parametrize(
    "heads, row, softcap, method",
    [
        (8, 131_072, False, "ulysses"),
        (14, 8192, False, "gathered"),
        (14, 131_072, False, "ring"),
        (14, 131_072, True, "gathered"),
    ],
)
def test_whole_heads_are_dealt_where_they_divide_and_else_keys_travel(heads, row, softcap, method):
    split = Sharding(context=4)
    assert choose_context_method(split, heads, row, softcap).method == method
