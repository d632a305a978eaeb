"""Words that a method cannot use are refused before anything starts, with what to type instead."""

from pathlib import Path

import pytest
from tables import rows
from world import cli

HERE = Path(__file__).parent
REFUSED = rows((HERE / "refused_words.txt").read_text().replace("TESTS", str(HERE)))


@pytest.mark.parametrize("typed, parts", REFUSED)
def test_what_a_method_cannot_do_is_refused_before_anything_starts(typed, parts):
    said = cli("data.path=demo:sums tokenizer.path=demo:bytes", typed, code=2).err
    assert all(part in " ".join(said.split()) for part in parts.split(" | ")), said
