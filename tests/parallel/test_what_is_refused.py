"""Words that do not go together are refused before anything starts, with what to type instead."""

import pytest
from folders import TESTS
from tables import rows

REFUSED = rows((TESTS / "parallel/refused_words.txt").read_text().replace("TESTS", str(TESTS)))


@pytest.mark.parametrize("ranks, typed, parts", REFUSED)
def test_what_does_not_go_together_is_refused_with_what_does(train, ranks, typed, parts):
    run = train("refused", typed, ranks=int(ranks), code=2)
    said = " ".join(run.err.split())
    assert all(part in said for part in parts.split(" | ")), said
    assert not run.metrics
