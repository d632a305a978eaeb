"""The one mesh of a run, with named dimensions, outermost first."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.errors import Problem, UserError


def build_mesh(sharding: Sharding, device_type: str) -> DeviceMesh:
    """`fsdp`: [shard]; `hsdp`: [replicate, shard]; `ddp`: [replicate, shard=1], which fully_shard turns into replication.

    A replicate dimension of size 1 is left out: fully_shard would all-reduce over it.
    """
    world = dist.get_world_size()
    replicas = {"fsdp": 1, "hsdp": sharding.replicas, "ddp": world}[sharding.strategy]
    if world % replicas:
        raise UserError(
            "the mesh does not divide",
            [
                Problem(
                    f"sharding.replicas={replicas}",
                    f"must divide the number of ranks, which is {world}",
                )
            ],
        )
    if replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )


def collectives_begun(mesh: DeviceMesh) -> Callable[[], int]:
    """Counts what this rank has begun on the host's and the device's process groups, in less than 1 µs: ranks that differ wait for each other."""
    groups = {
        group.group_name: group for group in (dist.group.WORLD, *mesh.get_all_groups()) if group
    }
    backends = [
        group._get_backend(torch.device(device))
        for group in groups.values()
        for device in {"cpu", mesh.device_type}
    ]
    numbers = [backend._get_sequence_number_for_group for backend in backends]  # type: ignore[attr-defined]
    return lambda: sum(number() for number in numbers)
