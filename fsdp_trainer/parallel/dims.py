"""The dimensions of a run's ranks, and the sums over them."""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import replication_factor
from fsdp_trainer.base.torch_private import sequence_number, set_timeout
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.errors import UserError

BATCH = ("replicate", "shard")  # ranks that differ in one of these read different rows


class Dims:
    """This rank's position in the dimensions of all ranks, and the process groups along them.

    All code that depends on the number of ranks uses this class.
    layout: the arrangement of all ranks; sizes: its size of each dimension; coordinates: this
    rank's position in each. mesh: mesh for fully_shard: [shard], or [replicate, shard], where
    `shard` contains the ranks of `shard` and `context`. A replicate dimension of size 1 is left
    out, because fully_shard would all-reduce over it; a shard dimension of size 1 means plain
    replication (ddp).
    tensor_mesh: mesh of the ranks that divide each matrix; None: each rank has complete matrices.
    expert_sizes: size of each dimension of the separate mesh of experts, over the same ranks.
    batch_ranks: number of parts of each step's rows; batch_rank: the part that this rank reads.
    same_rows: number of (neighbouring) ranks of a stage that read the same part. Ranks of other
    pipeline stages read it too.
    """

    def __init__(self, layout: Layout, device_type: str, timeout: float):
        """Create the meshes and process groups. Collective.

        timeout: timeout of collectives in seconds. Raises UserError for sizes that do not fit.
        """
        self.layout, self.ranks = layout, layout.ranks
        self.timeout = timedelta(seconds=timeout)
        if layout.problem:
            raise UserError("the mesh does not divide", [layout.problem])
        self.sizes, self.expert_sizes = layout.sizes, layout.expert_sizes
        places = np.unravel_index(dist.get_rank(), tuple(self.sizes.values()))
        self.coordinates = dict(zip(self.sizes, map(int, places), strict=True))
        batch_sizes = tuple(self.sizes[name] for name in BATCH)
        batch_place = tuple(self.coordinates[name] for name in BATCH)
        self.batch_ranks, self.same_rows = layout.batch_ranks, layout.same_rows
        self.batch_rank = int(np.ravel_multi_index(batch_place, batch_sizes))

        self.device_type = device_type
        lengths = {
            "pipeline": self.sizes["pipeline"],
            "replicate": self.sizes["replicate"],
            "shard": layout.fsdp_ranks,
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
        """True if this rank has the first part of its rows, in the first stage."""
        return self.coordinates["context"] == self.coordinates["pipeline"] == 0

    @property
    def is_first_of_context(self) -> bool:
        """True for the first rank that has parts of this rank's rows; it alone counts them."""
        return self.coordinates["context"] == 0

    @property
    def place(self) -> str:
        """This rank's coordinates, such as `context 1, tensor 0`; "" if all ranks only shard."""
        sizes = {name: size for name, size in self.sizes.items() if size > 1}
        places = {name: self.coordinates[name] for name in sizes}
        if self.expert_sizes["expert"] > 1:
            places["expert"] = dist.get_rank() % self.expert_sizes["expert"]
        if set(places) <= {"shard"}:
            return ""
        return ", ".join(f"{name} {place}" for name, place in places.items())

    @property
    def separates_experts(self) -> bool:
        return self.expert_sizes["expert"] > 1 or self.sizes["tensor"] > 1

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """All ranks of this rank's pipeline stage; None: there is only one stage.

        The first access is collective.
        """
        if self.sizes["pipeline"] == 1:
            return None
        return dist.new_subgroups_by_enumeration(self.stages(), self.timeout)[0]

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Mesh of all ranks for experts: [pipeline, replicate, eshard, expert], without sizes of 1.

        `eshard` is always present: fully_shard shards over it the experts of a rank of `expert`.
        The first access is collective.
        """
        names = tuple(n for n, size in self.expert_sizes.items() if n == "eshard" or size > 1)
        shape = tuple(self.expert_sizes[name] for name in names)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        for name, group in zip(names, mesh.get_all_groups(), strict=True):
            set_timeout(group, self.timeout)
            self._groups[f"experts/{name}"] = group
        return mesh

    @cached_property
    def copy_mesh(self) -> DeviceMesh | None:
        """Mesh [groups, ranks among which a second copy of the blocks is divided]; None: no copy.

        The first access is collective.
        """
        size = self.layout.copy_ranks
        if not size:
            return None
        names = "copies", "copy"
        mesh = init_device_mesh(self.device_type, (self.ranks // size, size), mesh_dim_names=names)
        for group in mesh.get_all_groups():
            set_timeout(group, self.timeout)
        return mesh

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one only in dimension `name`.

        name: `pipeline`, `context` or `tensor`. None if the dimension has size 1.
        """
        return self._groups.get(name)

    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups of this rank that exist so far, by the dimension along which they lie.

        Those of the experts' mesh are `experts/eshard`, `experts/expert` and so on.
        """
        return dict(self._groups)

    def sum_over_batch(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that read different rows, for counts of rows. Collective.

        Ranks that read the same rows have equal numbers and contribute their mean, so that the sums
        are bitwise equal on every rank.
        """
        self.sum_over_all(tensor)
        readers = self.ranks // self.batch_ranks
        if readers > 1:
            tensor /= readers

    def sum_over_tokens(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that compute different tokens, for losses. Collective.

        Ranks of a tensor group have equal numbers and contribute their mean; ranks of a context
        group have different tokens of the same rows. In a pipeline the last stage has the numbers
        and the other stages have 0.
        """
        self.sum_over_all(tensor)
        if self.sizes["tensor"] > 1:
            tensor /= self.sizes["tensor"]

    def sum_over_context(self, tensor: Tensor) -> None:
        """Sum in place over the ranks that have parts of this rank's rows. Collective."""
        if self.sizes["context"] > 1:
            dist.all_reduce(tensor, group=self.group("context"))

    def sum_over_stages(self, tensor: Tensor) -> None:
        if self.sizes["pipeline"] > 1:
            dist.all_reduce(tensor, group=self.group("pipeline"))

    def sum_over_all(self, tensor: Tensor) -> None:
        if self.ranks > 1:
            dist.all_reduce(tensor)

    def replication_factor(self, parameter: Tensor) -> int:
        """Return the number of ranks of a stage that hold each number of a parameter.

        A sum over all ranks counts each number this many times.
        """
        return replication_factor(parameter, self.layout.stage_ranks)

    def holders(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the ranks of this rank's stage that hold the same part of a tensor, this included.

        A plain tensor is equal on all ranks of the stage.
        """
        if not isinstance(tensor, DTensor):
            return tuple(next(ranks for ranks in self.stages() if dist.get_rank() in ranks))
        mesh = tensor.device_mesh
        places = zip(tensor.placements, mesh.get_coordinate() or (), strict=True)
        index = [slice(None) if placement.is_replicate() else i for placement, i in places]
        return tuple(mesh.mesh[tuple(index)].flatten().tolist())

    def groups_along(self, name: str) -> list[list[int]]:
        return groups_along(name, self.sizes)

    def stages(self) -> list[list[int]]:
        stages: list[list[int]] = np.arange(self.ranks).reshape(self.sizes["pipeline"], -1).tolist()
        return stages

    def collective_counter(self) -> Callable[[], int]:
        """Return a function that counts the collectives started by this rank, in less than 1 µs.

        Ranks whose counts differ are in different collectives. Collectives within a pipeline stage
        are not counted, since stages differ in them.
        """
        own = () if self.sizes["pipeline"] > 1 else self._groups.values()
        groups = {group.group_name: group for group in (dist.group.WORLD, *own) if group}
        kinds = {"cpu", self.mesh.device_type}
        counts = [sequence_number(group, kind) for group in groups.values() for kind in kinds]
        return lambda: sum(count() for count in counts)


def groups_along(name: str, sizes: dict[str, int]) -> list[list[int]]:
    """Return all groups of ranks that differ only in dimension `name`.

    sizes: sizes of all dimensions by name, outermost first.
    """
    ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    return np.moveaxis(ranks, list(sizes).index(name), -1).reshape(-1, sizes[name]).tolist()
