"""Words that do not go together are refused before anything starts, with what to type instead."""

from pathlib import Path

import pytest
from tables import rows

REFUSED = rows(Path(__file__).with_name("refused_words.txt").read_text())


@pytest.mark.parametrize("ranks, typed, parts", REFUSED)
def test_what_does_not_go_together_is_refused_with_what_does(train, ranks, typed, parts):
    run = train("refused", typed, ranks=int(ranks), code=2)
    said = " ".join(run.err.split())
    assert all(part in said for part in parts.split(" | ")), said
    assert not run.metrics
