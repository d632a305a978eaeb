"""The checks of a certificate, in its order: each is a file in checks/."""

from collections.abc import Callable

from fsdp_trainer.apps.prove.checks import (
    exports,
    layout,
    mask,
    other_program,
    packing,
    prompts,
    resume,
    trained,
)
from fsdp_trainer.apps.prove.proof.certificate import Findings
from fsdp_trainer.apps.prove.proof.evidence import Evidence

OF_A_RUN: list[Callable[[Evidence], Findings]] = [
    layout.check, other_program.check, packing.check, trained.check, mask.check, prompts.check,
    resume.check, exports.check,
]  # fmt: skip
"""Functions of the evidence of a run."""
