"""Folders with random tokenizers and descriptions give the tokens and texts of AutoTokenizer."""

import pytest

pytest.importorskip("transformers")
from random_tokenizers import differences

SEEDS = range(60)


def test_random_tokenizers_and_their_descriptions_give_what_auto_tokenizer_gives(tmp_path):
    folders = {seed: tmp_path / str(seed) for seed in SEEDS}
    for folder in folders.values():
        folder.mkdir()
    different = {seed: differences(folder, seed) for seed, folder in folders.items()}
    assert {seed: lines for seed, lines in different.items() if lines} == {}
