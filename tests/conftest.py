"""Fixtures that tests share: a pool of ranks, and prepared data."""

import contextlib
import gc
import os
import re
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks share the machine's cores
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # for processes that tests start; see below

import composing
import hypothesis
import pytest
from folders import TESTS
from ledger import Ledger
from program import Program
from world import Run, World, split, start_server, write_chats

sys.dont_write_bytecode = False  # otherwise each worker compiles every test module again
composing.keep()
hypothesis.settings.register_profile("same examples", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same examples")
internal_errors: list[str] = []
SLOW = {*(TESTS / "slow.txt").read_text().splitlines()}
DEADLINE = float(os.environ.get("FSDP_TRAINER_TESTS_DEADLINE", "inf"))
"""Seconds since 1970, after which no test starts: .ci/run must end in time on any machine."""
SHIFT = int(os.environ.get("FSDP_TRAINER_TESTS_SHIFT", "0"))
"""Number of folders that come last instead of first, and so are those left out."""


def pytest_configure(config):
    """Start the server that the ranks of all of pytest's workers are forked from."""
    is_controller = getattr(config.option, "numprocesses", 0) and not hasattr(config, "workerinput")
    if is_controller and "not ranks" not in config.option.markexpr:
        start_server()


def pytest_internalerror(excrepr):
    """Record an error in pytest itself, or in one of its workers."""
    internal_errors.append(str(excrepr))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that start ranks, and slow ones; begin with folder number SHIFT, if given."""
    if SHIFT:
        folders = sorted({item.path.parent for item in items})
        items.sort(key=lambda item: (folders.index(item.path.parent) - SHIFT) % len(folders))
    for item in items:
        if "world" in item.fixturenames:
            item.add_marker(pytest.mark.ranks)
        file, test = re.match(r"(.*?)::[^\[]*", item.nodeid).group(1, 0)
        if file in SLOW or test in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    """Skip the test if it is too late to start it; pytest lists the folders in the end."""
    if time.time() > DEADLINE:
        pytest.skip(f"left out, because CI's time is over: tests in {item.path.parent.name}")


def pytest_unconfigure():
    """Print the end of the first internal error again.

    People read the last lines of a log, where xdist prints only the consequences.
    """
    if internal_errors:
        print(f"\nthe first internal error ended with:\n{internal_errors[0][-3000:]}")


@pytest.fixture(scope="module", autouse=True)
def loaded_is_exempt():
    """Exempt all that is loaded from garbage collection, before the first test of a file.

    Going through all objects of torch and transformers again and again takes a tenth of the time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world():
    pool = World()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ledger(world):
    """Return the runs that many tests ask, see ledger.py."""
    return Ledger(world)


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Return a file with a hundred short chats."""
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 100)


@pytest.fixture(scope="session")
def inputs(chats, tmp_path_factory):
    """Return overrides by key: data, tokenizer, and a cache that all tests share."""
    return {
        "data.path": chats,
        "tokenizer.path": "demo:bytes",
        "data.cache": tmp_path_factory.mktemp("cache"),
    }


@pytest.fixture(scope="session")
def input_words(inputs):
    """Return `inputs` as words of a command line."""
    return [f"{key}={value}" for key, value in inputs.items()]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return overrides for compilation, with a long timeout and one cache for all tests.

    Only for tests of computed numbers. pytest's workers share the cache.
    """
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"
    return ["compile=enabled", f"compile.cache={cache}", "launch.timeout=300s"]


@pytest.fixture
def enter():
    """Return a function `enter(fault)` that applies a fault until the test ends."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def program():
    """Return `program("verb", "key=value", code=0)`, see program.py."""
    return Program()


@pytest.fixture
def train(world, inputs, tmp_path):
    """Return `train("name", *overrides, ranks=2, code=0)`, which does a small training.

    It returns the Run.
    """

    def start(name: str, *overrides: str, ranks: int = 1, **options) -> Run:
        overrides = split(overrides)
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
