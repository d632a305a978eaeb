"""The one mesh of a run, with named dimensions, outermost first."""

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
            "the mesh does not divide", [Problem(f"sharding.replicas={replicas}", f"must divide the number of ranks, which is {world}")]
        )
    if replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
