"""Data that tests prepare with the smallest tokenizer."""

import json
from functools import partial

import pytest
from texts import arguments_of
from world import write_chats

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
def sources(tmp_path):
    """Return three files in a folder, with 40, 20 and 9 chats of their own."""
    (tmp_path / "data").mkdir()
    return [
        write_chats(tmp_path / f"data/{name}.jsonl", n, start)
        for name, n, start in (("a", 40, 0), ("b", 20, 200), ("c", 9, 300))
    ]


@pytest.fixture
def preview(tmp_path, program):
    """Return `preview(*words, code=0)`, which returns what the program prints of the data."""
    return partial(program, "preview", "tokenizer.path=demo:bytes", f"data.cache={tmp_path}/cache")
