"""What the program says of what it refuses."""

import pytest

from fsdp_trainer.errors import UserError


def refusal(work, *given, **options):
    """Return the message with which a function refuses what it is given."""
    with pytest.raises(UserError) as raised:
        work(*given, **options)
    return str(raised.value)
