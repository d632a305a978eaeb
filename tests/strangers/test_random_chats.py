"""Random chats over random templates in the shapes of published ones."""

from collections import Counter

import pytest
from fuzz_chats import RIGHT, WRONG, cases, outcome

from fsdp_trainer.data.templates.chat_template import BUILT_IN

pytest.importorskip("transformers")


def test_nothing_but_the_answers_of_a_random_chat_is_learnt_and_all_of_them():
    outcomes = Counter(outcome(case, 1, number) for number, case in cases(1, 252, BUILT_IN))
    assert not outcomes[WRONG]
    assert outcomes[RIGHT] > 230
