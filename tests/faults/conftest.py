"""What the fault suite shares."""

import pytest
from bench import Bench


@pytest.fixture(scope="session")
def bench():
    return Bench()
