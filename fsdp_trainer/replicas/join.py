"""Joining the groups that share a run: the table of methods, and what is sent to a group."""

import re
from collections.abc import Callable
from functools import partial

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.launch.facts import changed_keys
from fsdp_trainer.launch.group_secret import secret_of_groups
from fsdp_trainer.parallel.convert import precompute_float8_scales
from fsdp_trainer.replicas.connections import Settings
from fsdp_trainer.replicas.diloco import DilocoGroups
from fsdp_trainer.replicas.membership import Membership
from fsdp_trainer.replicas.roll_call import RollCall
from fsdp_trainer.replicas.state_transfer import State
from fsdp_trainer.replicas.sync import SyncGroups
from fsdp_trainer.training.after_step.train_state import TrainState
from fsdp_trainer.training.groups import ReplicaGroups
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_setup import RunSetup

OF_ONE_GROUP = re.compile(r"launch\.|run\.root$|replicas\.(id|lighthouse)$")
"""Keys that may differ between groups: how each is started, and how it spells addresses."""


def join_groups(
    setup: RunSetup, state: TrainState, progress: Progress, others: Callable[[], bool]
) -> ReplicaGroups:
    """Return this group's membership in those at replicas.lighthouse. Collective.

    others: see RollCall.
    """
    cfg = setup.cfg.replicas
    membership = Membership(
        cfg,
        setup.world,
        setup.model_device,
        setup.timeout,
        common_settings(setup),
        secret_of_groups(setup.folder),
        partial(state_to_send, state, progress),
        partial(take_over, setup, state, progress),
    )
    roll_call = RollCall(membership, cfg, setup.observer, others)
    if state.outer is None:
        return SyncGroups(membership, roll_call)
    return DilocoGroups(membership, roll_call, cfg, state.outer)


def common_settings(setup: RunSetup) -> Settings:
    """Return the settings that all groups must have in common, and their number of ranks."""
    changed = changed_keys(setup.cfg).items()
    common = {key: value for key, value in changed if not OF_ONE_GROUP.match(key)}
    return common | {"ranks": str(setup.world.size)}


def state_to_send(state: TrainState, progress: Progress) -> State:
    """Return this rank's state for the rank of another group with the same number."""
    parts = {name: local_part(tensor) for name, tensor in state.tensors().items()}
    return {"parts": parts, "record": state.record(progress)}


def take_over(setup: RunSetup, state: TrainState, progress: Progress, other: State) -> None:
    """Become equal to the rank of another group with the same number."""
    state.take_over(other["parts"], other["record"], progress)
    precompute_float8_scales(state.model, setup.cfg.precision)
