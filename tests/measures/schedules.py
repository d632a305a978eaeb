"""Simulation of the order in which torch's pipeline schedules compute."""

from types import SimpleNamespace

from torch import nn
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from fsdp_trainer.config.pipeline_schedules import SCHEDULES
from fsdp_trainer.parallel import pipeline_runtime

SECONDS = {
    Kind.FORWARD: 1, Kind.FULL_BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1,
}  # fmt: skip
"""Simulated duration of each computation of a stage."""


def actions(name, ranks, count):
    """Return each rank's computations, in order. count: number of micro-batches."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * SCHEDULES[name].stages, group_size=ranks, group_rank=0,
            stage_index=i, submod=nn.Identity(),
        )
        for i in range(SCHEDULES[name].stages)
    ]  # fmt: skip
    schedule = pipeline_runtime.SCHEDULES[name](
        stages[0] if len(stages) == 1 else stages, count, loss_fn=lambda output, target: output
    )
    flat = {
        rank: [part for action in order if action for part in action.sub_actions or [action]]
        for rank, order in schedule.pipeline_order.items()
    }
    return {
        rank: [a for a in order if a.computation_type in SECONDS] for rank, order in flat.items()
    }


def followed(name, ranks, count):
    """Return the share of a step in which ranks wait, and each rank's most forwards held at once.

    A forward is held from its computation until that of its backward.
    """
    orders = actions(name, ranks, count)
    last = ranks * SCHEDULES[name].stages - 1
    ready, clock, held, largest = {}, dict.fromkeys(orders, 0), dict.fromkeys(orders, 0), {}
    todo = {rank: list(order) for rank, order in orders.items()}
    while any(todo.values()):
        for rank, order in todo.items():
            while order:
                stage, kind, number = order[0].stage_index, *order[0][1:3]
                forward = kind == Kind.FORWARD
                needs = [("F", stage - 1, number)] if forward and stage else []
                if kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
                    needs = [("B", stage + 1, number)] if stage < last else [("F", stage, number)]
                if any(need not in ready for need in needs):
                    break
                order.pop(0)
                clock[rank] = max([clock[rank], *(ready[n] for n in needs)]) + SECONDS[kind]
                if kind != Kind.BACKWARD_WEIGHT:
                    ready["F" if forward else "B", stage, number] = clock[rank]
                held[rank] += forward - (kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT))
                largest[rank] = max(largest.get(rank, 0), held[rank])
    busy = 3 * count * SCHEDULES[name].stages
    return 1 - busy / max(clock.values()), [largest[rank] for rank in range(ranks)]
