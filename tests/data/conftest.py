"""Data that tests prepare with the smallest tokenizer."""

import json
from functools import partial

import pytest
from texts import arguments_of

from fsdp_trainer.data.prepared import prepare


@pytest.fixture(scope="session")
def how():
    """Return `how(root, *paths, ...)`, which returns the arguments of `prepare`."""
    return arguments_of


@pytest.fixture(scope="session")
def prepared_in(how):
    """Return `prepared_in(root, *paths, ...)`, which tokenizes files into a cache."""
    return lambda *given, **options: prepare(*how(*given, **options))


@pytest.fixture
def prepared(prepared_in, tmp_path):
    """Return `prepared(*paths, ...)`, which tokenizes files into the cache `tmp_path / "c"`."""
    return partial(prepared_in, tmp_path / "c")


@pytest.fixture
def jsonl(tmp_path):
    """Return `jsonl(*rows, name="a.jsonl")`, which writes rows, or lines as they are, to a file."""

    def write(*rows, name="a.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
        return tmp_path / name

    return write


@pytest.fixture
def preview(tmp_path, program):
    """Return `preview(*words, code=0)`, which returns what the program prints of the data."""
    return partial(program, "preview", "tokenizer.path=demo:bytes", f"data.cache={tmp_path}/cache")
