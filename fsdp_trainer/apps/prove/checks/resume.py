"""A run that was stopped goes on as if it had not been, also on another number of ranks."""

from collections.abc import Iterator

import torch

from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.trajectories import Trajectory, verdict

ADVICE = "do not stop this run, or keep every checkpoint, and report it"


def check(evidence: Evidence) -> Iterator[Checked]:
    whole, again = evidence.planned, evidence.resumed
    lines = zip(whole.metrics, again.metrics, strict=False)
    wrong = [
        f"step {line['step']} has loss {other['loss']!r}, not {line['loss']!r}"
        for line, other in lines
        if (line["step"], line["loss"], line["tokens"])
        != (other["step"], other["loss"], other["tokens"])
    ]
    wrong += [n for n, weight in whole.end.items() if not torch.equal(weight, again.end[n])]
    if len(whole.metrics) != len(again.metrics):
        wrong.append(f"{len(again.metrics)} steps in place of {len(whole.metrics)}")
    right = f"losses and all {len(whole.end)} tensors have the same bits as without a stop"
    yield counted_wrong("resume, as many ranks", wrong, right, ADVICE)
    elsewhere = Trajectory.of(evidence.resumed_elsewhere).differences(Trajectory.of(whole))
    for kind, difference in elsewhere.items():
        rounding = evidence.rounding(kind, difference)
        what = f"stopped on {evidence.small.ranks} ranks, resumed on one, and undisturbed"
        yield verdict("resume, other ranks", kind, difference, rounding, what, ADVICE)
