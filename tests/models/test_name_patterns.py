"""Patterns of modules' names in PEFT's configuration mean what they mean there, however many."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.checkpoint.formats import tensor_files
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk
from fsdp_trainer.models.adapters import peft_config
from fsdp_trainer.models.adapters.peft_config import NamePatterns

WORDS = st.sampled_from(["a", "ab", "b_b", "b.b", "b-b", "7", "17"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
EXPRESSIONS = st.sampled_from([".*b", "^a", r"\d+\.a", "a|b", "(a)", "[ab]+.7", ""])


def as_peft(patterns, name):
    """PEFT's own rule (`get_pattern_key`): the first expression that matches the name's end."""
    matched = (k for k in patterns if re.match(rf"(.*\.)?({k})$", name))
    return patterns.get(next(matched, None), "default")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES | EXPRESSIONS, st.integers(), max_size=6), NAMES)
def test_the_first_pattern_counts_that_peft_finds(patterns, name):
    assert NamePatterns(patterns).value(name, "default") == as_peft(patterns, name)


def test_expressions_are_compiled_once_and_names_are_not_searched(monkeypatch):
    calls = []

    def compiled(text):
        calls.append("compile")
        return SimpleNamespace(match=lambda name: calls.append("match"))

    monkeypatch.setattr(peft_config.re, "compile", compiled)
    names = [f"model.layers.{i}.mlp.experts.{k}.up_proj" for i in range(8) for k in range(128)]
    patterns = NamePatterns(dict.fromkeys(names, 4) | {f"a{i}$": 2 for i in range(600)})
    assert [patterns.value(name, 8) for name in names] == [4] * len(names)
    assert calls == ["compile"] * 600
    assert patterns.value("another", 8) == 8
    assert calls == ["compile"] * 600 + ["match"] * 600


def test_rows_of_a_stack_are_read_from_their_own_chunks_alone(monkeypatch, tmp_path):
    visited = []

    class Part(tuple):
        __slots__ = ()

        def __iter__(self):
            visited.append(self)
            return super().__iter__()

    parts = [Part((slice(i, i + 1), slice(0, 2))) for i in reversed(range(300))]
    chunks = [Chunk(tmp_path / "f", 8 * part[0].start, part) for part in parts]
    monkeypatch.setattr(tensor_files, "read", lambda path, offset, into: into.fill_(offset / 8))
    tensor = TensorOnDisk(tensor_files.torch.float32, (300, 2), chunks)
    rows = [tensor_files.read_whole(tensor, i, i + 2) for i in range(0, 300, 2)]
    assert [row[:, 1].tolist() for row in rows] == [[i, i + 1] for i in range(0, 300, 2)]
    assert len(visited) == 300
