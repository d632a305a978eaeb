"""Patterns of modules' names in PEFT's configuration mean what they mean there, however many."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from world import write_json

from fsdp_trainer.checkpoint.formats import tensor_files
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk
from fsdp_trainer.checkpoint.unread_tensors import unread_beside
from fsdp_trainer.config.paths import base_of_adapter
from fsdp_trainer.config.rules.rules_adapter import typed_base
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters import peft_config
from fsdp_trainer.models.adapters.peft_config import NamePatterns, PeftFolder, read_config

WORDS = st.sampled_from(["a", "ab", "b_b", "b.b", "b-b", "7", "17"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
EXPRESSIONS = st.sampled_from([".*b", "^a", r"\d+\.a", "a|b", "(a)", "[ab]+.7", ""])


def as_peft(patterns, name):
    """PEFT's own rule (`get_pattern_key`): the first expression that matches the name's end."""
    matched = (k for k in patterns if re.match(rf"(.*\.)?({k})$", name))
    return patterns.get(next(matched, None), "default")


@settings(max_examples=300)
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


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_search_that_does_not_end_is_given_up(monkeypatch, key):
    monkeypatch.setattr(peft_config, "SEARCH_SECONDS", 0.05)
    endless, name = "(.*)*(.*)*x", "model.layers.0.self_attention.q"
    config = {"target_modules": ["q"], key: {endless: 1} if key == "rank_pattern" else endless}
    peft = PeftFolder(Path("adapter"), config, {}, {})
    with pytest.raises(UserError, match="to search model"):
        _ = peft.targets(name), peft.pattern("rank_pattern", "r", name)


NO_FOLDERS = [
    "a\0b", "a\nb", "\x1b[2J", "x" * 300, f"{'x' * 5000}/x", f"{'x' * 200}/" * 50, "a/" * 300,
    "~no-such-user/x", 5,
]  # fmt: skip


@pytest.mark.parametrize("name", ["\ud800", *NO_FOLDERS])
def test_a_base_model_that_no_folder_can_have_is_none(tmp_path, name):
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": name})
    assert base_of_adapter(tmp_path) == ""


@pytest.mark.parametrize("name", NO_FOLDERS)
def test_a_first_model_that_no_folder_can_have_is_none(tmp_path, name):
    configuration = {"model": {"init_from": name}}
    write_json(tmp_path / "config.yaml", configuration)
    assert typed_base(tmp_path) == ""
    for file in ("MANIFEST.json", "trainer.json"):
        (tmp_path / file).write_text("{}")
    assert unread_beside(None, tmp_path) is None


def test_a_base_model_is_found_in_a_folder_with_any_spaces(tmp_path):
    folder = tmp_path / "a\u3000b\xa0c"
    folder.mkdir()
    named = {"base_model_name_or_path": str(folder)}
    write_json(tmp_path / "adapter_config.json", named)
    assert base_of_adapter(tmp_path) == str(folder)


ODD = yaml.safe_load("""
lora_alpha: [.nan, .inf, 1.0e+300, "8", null, true]
r: [0, -1, 4.0, "4", null]
rank_pattern: [[1], {q: 0}, {q: x}]
alpha_pattern: [5, {q: .nan}]
target_modules: [5, [5], [[q]]]
modules_to_save: [5, [null]]
layers_to_transform: [x, [1.5]]
lora_dropout: [x, [0]]
""")


@pytest.mark.parametrize("key", ODD)
def test_a_value_of_another_type_in_an_adapters_configuration_is_named(tmp_path, key):
    for value in ODD[key]:
        config = {"target_modules": ["q_proj"], key: value}
        write_json(tmp_path / "adapter_config.json", config)
        with pytest.raises(
            UserError, match=r"describes an adapter that is not supported"
        ) as raised:
            read_config(tmp_path)
        assert len(raised.value.problems) == 1


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_an_expression_for_whole_names_may_begin_with_flags(key):
    config = {"target_modules": "all-linear", key: "(?i).*Q_PROJ|.*k_proj"}
    peft = PeftFolder(Path("adapter"), config, {}, {})
    names = ["model.q_proj", "model.k_proj", "model.q_proj.other", "model.k_proj.other"]
    matching = [key == "target_modules"] * 2 + [key == "exclude_modules"] * 2
    assert [peft.targets(name) for name in names] == matching


@pytest.mark.parametrize("text", ["(", "[z-a]", "a{99999999999999}"])
def test_a_text_that_is_no_expression_is_named(text):
    with pytest.raises(UserError, match="is no regular expression"):
        PeftFolder(Path("adapter"), {"target_modules": text}, {}, {}).targets("model.q")


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
