"""The planned layout trains as one plain process does."""

from collections.abc import Iterator

from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.trajectories import Trajectory, verdict

ADVICE = (
    "the layout changes what is trained: leave out one of sharding.* , activation_checkpoint and"
    " optim.offload after another to see which, and report it"
)


def check(evidence: Evidence) -> Iterator[Checked]:
    """Compare ten steps of the planned layout with those of one process."""
    ours, expected = (Trajectory.of(run) for run in (evidence.planned, evidence.plain))
    for kind, difference in ours.differences(expected).items():
        rounding = evidence.rounding(kind, difference)
        what = "the planned layout and one process"
        yield verdict("layout", kind, difference, rounding, what, ADVICE)
    right = "ranks that hold the same numbers agree on all bits"
    yield counted_wrong("layout: copies", evidence.planned.unequal_copies, right, ADVICE)
