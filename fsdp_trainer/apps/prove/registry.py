"""The checks of a certificate, in its order: each is a file in checks/."""

from collections.abc import Callable

from fsdp_trainer.apps.prove.certificate import Findings
from fsdp_trainer.apps.prove.checks import layout
from fsdp_trainer.apps.prove.evidence import Evidence

OF_A_RUN: list[Callable[[Evidence], Findings]] = [layout.check]
"""Functions of the evidence of a run."""
