"""Data that tests prepare with the smallest tokenizer."""

import json
from functools import partial

import pytest

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template


@pytest.fixture(scope="session")
def how():
    """Return `how(root, *paths, seq_len=512, template=None, **receivers, **keys of data)`.

    It returns the arguments of `prepare`. A path may be an entry of a mixture. receivers: `say` and
    `progress` of a Reporter.
    """
    tokenizer = load_tokenizer("demo:bytes")

    def arguments(root, *paths, seq_len=512, template=None, **options):
        receivers = {name: options.pop(name) for name in ("say", "progress") if name in options}
        options["path"] = [path if isinstance(path, dict) else str(path) for path in paths]
        loaded = load_template(template, tokenizer)
        reporter = Reporter(**receivers)
        return Data(**options), Batch(seq_len=seq_len), tokenizer, loaded, root, reporter

    return arguments


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
