"""Kinds of ranks: those that do the same in a step, up to their place in the groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor

from fsdp_trainer.config.layout import Layout

Classes = dict[str, list[int]]
"""For each dimension of a mesh the class of each position: ranks of a class hold equal shapes."""


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold parts of the same shapes.

    rank: the first of them; count: their number; place: its coordinates, in words; runs: True if it
    is rehearsed; False for kinds between others, which are only counted.
    """

    rank: int
    count: int
    place: str
    runs: bool


def kinds_of(layout: Layout, stages: Sequence[int], classes: Sequence[Classes]) -> list[RankKind]:
    """Return the kinds of a layout's ranks, by their first rank.

    stages: for each rank of a pipeline the index of its stage's class; classes: those of the
    positions, by class of stage. Run are the first and the last position in each dimension, with
    all others at their first, and the last rank.
    """
    places = np.stack(np.unravel_index(range(layout.ranks), tuple(layout.sizes.values())), 1)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        own = dict(zip(layout.sizes, map(int, place), strict=True))
        key = _key(layout, rank, own, stages[own["pipeline"]], classes)
        members.setdefault(key, []).append(rank)
    run = set(representatives(layout, stages))
    return [
        RankKind(min(ranks), len(ranks), place_of(layout, min(ranks)), bool(run & {*ranks}))
        for ranks in sorted(members.values())
    ]


def _key(
    layout: Layout, rank: int, own: dict[str, int], stage: int, classes: Sequence[Classes]
) -> tuple[int, ...]:
    """Return what decides the kind of a rank. own: its coordinates."""
    positions = positions_of(layout, rank)
    of_stage = classes[stage]
    own_classes = [of_stage[name][i] for name, i in positions.items() if name in of_stage]
    last = layout.sizes["context"] - 1
    # ranks of a context group have other documents: only the ends are told apart
    return stage, *own_classes, (own["context"] > 0) + (own["context"] == last)


def positions_of(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's position in each dimension of the meshes of parameters."""
    sizes, size = layout.sizes, layout.expert_sizes["expert"]
    place = np.unravel_index(rank, tuple(sizes.values()))
    own = dict(zip(sizes, map(int, place), strict=True))
    return {
        "replicate": own["replicate"],
        "shard": own["shard"] * sizes["context"] + own["context"],
        "tensor": own["tensor"],
        "eshard": rank // size % layout.expert_sizes["eshard"],
        "expert": rank % size,
    }


def representatives(layout: Layout, stages: Sequence[int]) -> Iterator[int]:
    sizes = layout.sizes
    for stage in sorted({stages.index(kind) for kind in stages}):
        yield _rank(sizes, pipeline=stage)
        for name, size in sizes.items():
            if name not in ("pipeline", "replicate") and size > 1:
                yield _rank(sizes, **{"pipeline": stage, name: size - 1})
        yield _rank(sizes, pipeline=stage) + layout.expert_sizes["expert"] - 1
    yield layout.ranks - 1


def _rank(sizes: dict[str, int], **coordinates: int) -> int:
    """Return the rank with these coordinates, 0 in all other dimensions."""
    place = tuple(coordinates.get(name, 0) for name in sizes)
    return int(np.ravel_multi_index(place, tuple(sizes.values())))


def place_of(layout: Layout, rank: int) -> str:
    """Return a rank's coordinates in words, such as `pipeline 1, tensor 0`."""
    sizes = layout.sizes
    place = np.unravel_index(rank, tuple(sizes.values()))
    own = {name: int(i) for name, i in zip(sizes, place, strict=True) if sizes[name] > 1}
    if layout.expert_sizes["expert"] > 1:
        own["expert"] = rank % layout.expert_sizes["expert"]
    return ", ".join(f"{name} {i}" for name, i in own.items())


def classes_of(parameters: Sequence[Any]) -> Classes:
    """Return the classes of positions in each dimension of the meshes of some parameters.

    In one of two positions of different classes some parameter's part is smaller.
    """
    sizes: dict[str, dict[tuple[int, int], np.ndarray]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            for name, ranks, rows in divided(parameter):
                chunk = -(-rows // ranks)
                part = np.clip(rows - chunk * np.arange(ranks), 0, chunk)
                sizes.setdefault(name, {})[rows, ranks] = part
    classes: Classes = {}
    for name, parts in sizes.items():
        columns = np.stack(list(parts.values()), 1)
        classes[name] = np.unique(-columns, axis=0, return_inverse=True)[1].reshape(-1).tolist()
    return classes


def divided(parameter: DTensor) -> Iterator[tuple[str, int, int]]:
    """Yield name and size of each dimension of a mesh that divides a parameter, and its rows.

    rows: size of the divided dimension of the tensor on a rank of the other dimensions of the mesh.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ()
    dims = [getattr(placement, "dim", None) for placement in placements]
    for i, (name, dim) in enumerate(zip(names, dims, strict=True)):
        if dim is None:
            continue
        others = [mesh.shape[j] for j, other in enumerate(dims) if j != i and other == dim]
        yield name, mesh.shape[i], parameter.shape[dim] // int(np.prod(others, dtype=np.int64))
