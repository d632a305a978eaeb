"""Refusals: errors and messages of functions that refuse what they are given."""

import pytest

from fsdp_trainer.errors import UserError


def refused(work, *given, **options):
    """Return the error with which a function refuses what it is given."""
    with pytest.raises(UserError) as raised:
        work(*given, **options)
    return raised.value


def refusal(work, *given, **options):
    """Return the message with which a function refuses what it is given."""
    return str(refused(work, *given, **options))
