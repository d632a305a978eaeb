"""Checks of the dimensions of a layout on the nodes of a cluster, for `doctor`."""

from collections.abc import Sequence

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.launch.facts import Check, RankFacts, parted_tensor_groups
from fsdp_trainer.parallel.dims import groups_along


def check_layout(layout: Layout, everyone: Sequence[RankFacts]) -> list[Check]:
    """Report the sizes of the dimensions, or a problem if the ranks do not fit the layout."""
    sharding, problem = layout.sharding, layout.problem
    if problem is not None:
        reason, _, advice = problem.reason.partition("\n")
        return [Check("problem", problem.what, reason, advice.strip())]
    sizes = {name: size for name, size in layout.sizes.items() if size > 1}
    if sharding.expert > 1:
        sizes["expert"] = sharding.expert
    if set(sizes) <= {"shard"}:
        return []
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return [Check("ok", "layout", named), *parted_tensor_groups(sharding, everyone)]


def dimension_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Return, by name of each dimension, the groups of ranks that differ only in this dimension.

    Dimensions of size 1 and those of all ranks are left out. Returns {} if the ranks do not fit
    the layout.
    """
    if layout.problem is not None:
        return {}
    sizes, ranks = layout.sizes, layout.ranks
    groups = {name: groups_along(name, sizes) for name, n in sizes.items() if 1 < n < ranks}
    if 1 < layout.sharding.expert < ranks:
        groups["expert"] = groups_along("expert", layout.expert_sizes)
    return groups
