"""Random chats over random templates in the shapes of published ones."""

import pytest
from fuzz_chats import RIGHT, WRONG, run

pytest.importorskip("transformers")


def test_nothing_but_the_answers_of_a_random_chat_is_learnt_and_all_of_them():
    outcomes = run(seed=1, count=252, own=None)
    assert not outcomes[WRONG]
    assert outcomes[RIGHT] > 230
