"""Folders with random tokenizers and descriptions give the tokens and texts of AutoTokenizer."""

import pytest

pytest.importorskip("transformers")
from random_tokenizers import differences


def test_random_tokenizers_and_their_descriptions_give_what_auto_tokenizer_gives(tmp_path):
    """Tokens, their text, special tokens, the vocabulary's size, and those of the saved folder."""
    for seed in range(60):
        (folder := tmp_path / str(seed)).mkdir()
        assert differences(folder, seed) == [], seed
