"""What tests share: a world of ranks, and prepared data."""

import contextlib
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the machine's cores are for the ranks
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # of processes that tests start; see below

import composing
import pytest
from world import Run, World, write_chats

sys.dont_write_bytecode = False  # else each worker compiles every module of tests anew
composing.keep()
internal_errors: list[str] = []


def pytest_internalerror(excrepr):
    """Keep what broke in pytest itself, or in one of its workers."""
    internal_errors.append(str(excrepr))


def pytest_unconfigure():
    """Print the end of the first such error again: the last lines of a log are what people see,
    and what xdist prints there is what followed from it."""
    if internal_errors:
        print(f"\nthe first internal error ended with:\n{internal_errors[0][-3000:]}")


@pytest.fixture(scope="session")
def world():
    pool = World()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A hundred short chats."""
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 100)


@pytest.fixture(scope="session")
def inputs(chats, tmp_path_factory):
    """Data, tokenizer and a cache that all tests share, as overrides by key."""
    return {
        "data.path": chats,
        "tokenizer.path": "demo:bytes",
        "data.cache": tmp_path_factory.mktemp("cache"),
    }


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Overrides that compile, patiently, with one cache for all tests that look at what is
    computed; pytest's workers share it."""
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"
    return ["compile=enabled", f"compile.cache={cache}", "launch.timeout=300s"]


@pytest.fixture
def enter():
    """`enter(fault)`: from now on until the test ends."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def train(world, inputs, tmp_path):
    """`train("name", *overrides, ranks=2, code=0)`: a small training; gives the Run."""

    def start(name: str, *overrides: str, ranks: int = 1, **options) -> Run:
        given = {o.split("=")[0] for o in overrides}
        if "model.init_from" in given:
            given.add("tokenizer.path")
        return world.train(
            tmp_path / name,
            *(f"{k}={v}" for k, v in inputs.items() if k not in given),
            *overrides,
            ranks=ranks,
            **options,
        )

    return start
