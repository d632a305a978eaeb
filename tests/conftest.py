"""What tests share: a world of ranks, and prepared data."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the machine's cores are for the ranks
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest
from world import DEMO, Run, World


@pytest.fixture(scope="session")
def world():
    pool = World()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Tokenised data, shared by all tests."""
    return f"data.cache={tmp_path_factory.mktemp('cache')}"


@pytest.fixture
def train(world, cache, tmp_path):
    """`train("name", *overrides, ranks=2)`: a small training of the demo task; gives the Run."""

    def start(name: str, *overrides: str, ranks: int = 1, **options) -> Run:
        data = [] if any(o.startswith("data.path=") for o in overrides) else DEMO[:1]
        tokenizer = [] if any(o.startswith(("tokenizer.path=", "model.init_from=")) for o in overrides) else DEMO[1:]
        return world.train(tmp_path / name, *data, *tokenizer, cache, *overrides, ranks=ranks, **options)

    return start
