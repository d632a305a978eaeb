"""The dimensions in which the ranks of a run are arranged. No torch."""

from fsdp_trainer.config.schema import Sharding


def dimension_sizes(sharding: Sharding, ranks: int) -> dict[str, int]:
    """Return the size of each dimension by name, outermost first.

    Neighbouring ranks differ in the last. Ranks that differ in `replicate` hold the same part of
    the model's states, those that differ in `shard` another. Where the replicas do not divide the
    ranks the sizes multiply to fewer.
    """
    replicas = {"fsdp": 1, "hsdp": sharding.replicas, "ddp": ranks}[sharding.strategy]
    return {"replicate": replicas, "shard": max(1, ranks // replicas)}
