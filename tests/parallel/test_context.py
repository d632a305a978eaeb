"""Context parallelism: how tokens are dealt to ranks, and what is refused."""

import numpy as np
import pytest
import yaml

from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.models.config import ModelConfig, RankConfig
from fsdp_trainer.parallel.balance_tokens import deal_tokens, token_costs


def test_the_start_says_how_rows_are_split(ledger):
    said = "shared by 2 ranks, 128 tokens each, by ulysses: 4 heads over 2 ranks"
    assert said in ledger.run("context").out


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths, windows",
    yaml.safe_load("""
- [[8192], [null]]
- [[8192], [512, 512, 512, null]]
- [[5000, 100, 3000], [null]]
- [[8000, 64, 64], [1024, null]]
- - [400, 400, 400, 400, 400, 400, 400, 400, 400, 400,
     400, 400, 400, 400, 400, 400, 400, 400, 400, 400]
  - [null]
"""),
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
    yaml.safe_load("""
- [8, 131072, false, ulysses]
- [14, 8192, false, gathered]
- [14, 131072, false, ring]
- [14, 131072, true, gathered]
"""),
)
def test_whole_heads_are_dealt_where_they_divide_and_else_keys_travel(heads, row, softcap, method):
    cap = 30.0 if softcap else None
    part = RankConfig(ModelConfig(num_attention_heads=heads, attn_logit_softcapping=cap))
    assert context_method(Sharding(context=4), row, part).method == method
