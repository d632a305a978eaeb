"""Groups of ranks that meet at a lighthouse."""

import pytest
from replica_groups import GroupPools, lighthouse


@pytest.fixture(scope="module")
def groups(world):
    """Return the pools of groups, see replica_groups.py."""
    with lighthouse() as address:
        pools = GroupPools(world, address)
        yield pools
        pools.close()
