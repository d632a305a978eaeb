"""The dimensions in which the ranks of a run are arranged, and over which ranks each sum runs."""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_trainer.config.dimensions import (
    dimension_sizes,
    expert_sizes,
    fsdp_ranks,
    layout_problem,
)
from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.distributed import replication_factor
from fsdp_trainer.errors import UserError
from fsdp_trainer.torch_private import sequence_number, set_timeout

BATCH = ("replicate", "shard")  # ranks that differ in one of these read different rows


class Dims:
    """This rank's place among all ranks. Whatever depends on the number of ranks asks here.

    sizes: of each dimension by name, outermost first; coordinates: this rank's place in each.
    mesh: what fully_shard gets: [shard], or [replicate, shard], where `shard` holds the ranks of
    `shard` and `context`. A replicate dimension of size 1 is left out, because fully_shard would
    all-reduce over it; a shard dimension of size 1 turns it into plain replication (ddp).
    tensor_mesh: the ranks that share each matrix; None: each rank computes with whole ones.
    expert_sizes: of each dimension of the view that experts have of the same ranks.
    batch_rank, batch_ranks: which part of each step's rows this rank reads, of how many parts;
    same_rows: how many ranks of a stage, which are neighbours, read the same part. Ranks of other
    stages of the pipeline read it too.
    """

    def __init__(self, sharding: Sharding, device_type: str, timeout: float):
        """timeout: of collectives, in seconds. Collective. Raises UserError for wrong sizes."""
        self.ranks = dist.get_world_size()
        self.timeout = timedelta(seconds=timeout)
        self.sizes = dimension_sizes(sharding, self.ranks)
        if problem := layout_problem(sharding, self.ranks):
            raise UserError("the mesh does not divide", [problem])
        self.expert_sizes = expert_sizes(sharding, self.ranks)
        places = np.unravel_index(dist.get_rank(), tuple(self.sizes.values()))
        self.coordinates = dict(zip(self.sizes, map(int, places), strict=True))
        batch_sizes = tuple(self.sizes[name] for name in BATCH)
        batch_place = tuple(self.coordinates[name] for name in BATCH)
        self.batch_ranks = math.prod(batch_sizes)
        self.batch_rank = int(np.ravel_multi_index(batch_place, batch_sizes))
        self.same_rows = self.sizes["context"] * self.sizes["tensor"]

        self.device_type = device_type
        lengths = {
            "pipeline": self.sizes["pipeline"],
            "replicate": self.sizes["replicate"],
            "shard": fsdp_ranks(self.sizes),
            "tensor": self.sizes["tensor"],
        }
        names = tuple(name for name, size in lengths.items() if name == "shard" or size > 1)
        shape = tuple(lengths[name] for name in names)
        dense = init_device_mesh(device_type, shape, mesh_dim_names=names)
        self.mesh: DeviceMesh = dense
        self.tensor_mesh: DeviceMesh | None = None
        self._groups = dict(zip(names, dense.get_all_groups(), strict=True))
        if "tensor" in names:
            self.tensor_mesh = dense["tensor"]
        if names[-1] == "tensor" or names[0] == "pipeline":
            self.mesh = dense[tuple(n for n in names if n in ("replicate", "shard"))]
        if self.sizes["context"] > 1:
            members = self.groups_along("context")
            self._groups["context"] = dist.new_subgroups_by_enumeration(members, self.timeout)[0]
        for group in self._groups.values():
            set_timeout(group, self.timeout)

    @property
    def reads_first(self) -> bool:
        """Return whether this rank has the first part of its rows, in the first stage."""
        return self.coordinates["context"] == self.coordinates["pipeline"] == 0

    @property
    def is_first_of_context(self) -> bool:
        """Return True for the first of the ranks that share its rows, by whom they are counted."""
        return self.coordinates["context"] == 0

    @property
    def place(self) -> str:
        """Return this rank's coordinates, as `context 1, tensor 0`; "" where all ranks shard."""
        sizes = {name: size for name, size in self.sizes.items() if size > 1}
        places = {name: self.coordinates[name] for name in sizes}
        if self.expert_sizes["expert"] > 1:
            places["expert"] = dist.get_rank() % self.expert_sizes["expert"]
        if set(places) <= {"shard"}:
            return ""
        return ", ".join(f"{name} {place}" for name, place in places.items())

    @property
    def parts_experts(self) -> bool:
        """True if experts are on another mesh than the rest of a block."""
        return self.expert_sizes["expert"] > 1 or self.sizes["tensor"] > 1

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """All ranks of this rank's stage of the pipeline; None: there is one stage, all ranks.

        The first time it is read is collective.
        """
        if self.sizes["pipeline"] == 1:
            return None
        return dist.new_subgroups_by_enumeration(self.stages(), self.timeout)[0]

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """All ranks as experts see them: [pipeline, replicate, eshard, expert], without sizes of 1.

        `eshard` always remains: fully_shard divides over it what a rank of `expert` holds. The
        first time it is read is collective.
        """
        names = tuple(n for n, size in self.expert_sizes.items() if n == "eshard" or size > 1)
        shape = tuple(self.expert_sizes[name] for name in names)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        for name, group in zip(names, mesh.get_all_groups(), strict=True):
            set_timeout(group, self.timeout)
            self._groups[f"experts/{name}"] = group
        return mesh

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one in dimension `name` alone.

        name: `pipeline`, `context` or `tensor`; None where the dimension has one rank.
        """
        return self._groups.get(name)

    def sum_over_batch(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that read different rows: counts of rows. Collective.

        Ranks that read the same rows have the same numbers: of these their mean is taken, so that
        the sums are the same on every rank to the last bit.
        """
        self.sum_over_all(tensor)
        readers = self.ranks // self.batch_ranks
        if readers > 1:
            tensor /= readers

    def sum_over_tokens(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that compute different tokens: losses. Collective.

        Ranks of a tensor group have the same numbers, of which the mean is taken; those of a
        context group have other tokens of the same rows. In a pipeline the last stage has the
        numbers and the others have 0.
        """
        self.sum_over_all(tensor)
        if self.sizes["tensor"] > 1:
            tensor /= self.sizes["tensor"]

    def sum_over_context(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that have other tokens of this rank's rows. Collective."""
        if self.sizes["context"] > 1:
            dist.all_reduce(tensor, group=self.group("context"))

    def sum_over_stages(self, tensor: Tensor) -> None:
        """Sum in place over the ranks of this rank's pipeline. Collective."""
        if self.sizes["pipeline"] > 1:
            dist.all_reduce(tensor, group=self.group("pipeline"))

    def sum_over_all(self, tensor: Tensor) -> None:
        """Sum in place over all ranks. Collective."""
        if self.ranks > 1:
            dist.all_reduce(tensor)

    def replication_factor(self, parameter: Tensor) -> int:
        """Return how many ranks of a stage hold each number of a parameter.

        Sums over all ranks count it so.
        """
        return replication_factor(parameter, self.ranks // self.sizes["pipeline"])

    def holders(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the ranks of this rank's stage that hold the same part of a tensor, with this one.

        A plain tensor is the same on all of them.
        """
        if not isinstance(tensor, DTensor):
            return tuple(next(ranks for ranks in self.stages() if dist.get_rank() in ranks))
        mesh = tensor.device_mesh
        places = zip(tensor.placements, mesh.get_coordinate() or (), strict=True)
        index = [slice(None) if placement.is_replicate() else i for placement, i in places]
        return tuple(mesh.mesh[tuple(index)].flatten().tolist())

    def groups_along(self, name: str) -> list[list[int]]:
        """Return groups of ranks, each of which differ in dimension `name` alone."""
        return groups_along(name, self.sizes)

    def stages(self) -> list[list[int]]:
        """Return the ranks of each stage of the pipeline: they do the same work."""
        return torch.arange(self.ranks).view(self.sizes["pipeline"], -1).tolist()

    def collective_counter(self) -> Callable[[], int]:
        """Return a function that counts the collectives this rank has begun, in less than 1 µs.

        Ranks whose counts differ are in different collectives. The stages of a pipeline differ in
        those within a stage: of these none counts.
        """
        own = () if self.sizes["pipeline"] > 1 else self._groups.values()
        groups = {group.group_name: group for group in (dist.group.WORLD, *own) if group}
        kinds = {"cpu", self.mesh.device_type}
        counts = [sequence_number(group, kind) for group in groups.values() for kind in kinds]
        return lambda: sum(count() for count in counts)


def groups_along(name: str, sizes: dict[str, int]) -> list[list[int]]:
    """Return groups of ranks, each of which differ in dimension `name` alone.

    sizes: of all dimensions, outermost first.
    """
    ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    return np.moveaxis(ranks, list(sizes).index(name), -1).reshape(-1, sizes[name]).tolist()
