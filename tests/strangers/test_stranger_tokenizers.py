"""Folders with random tokenizers and descriptions give the tokens and texts of AutoTokenizer."""

import pytest

pytest.importorskip("transformers")
from fuzz_tokenizers import main


def test_random_tokenizers_and_their_descriptions_give_what_auto_tokenizer_gives():
    assert main(seed=0, count=60) == 0, "see what is printed"
