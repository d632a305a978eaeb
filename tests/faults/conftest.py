"""Fixtures of the fault suite."""

import pytest
from bench import Bench


@pytest.fixture(scope="session")
def bench():
    return Bench()
