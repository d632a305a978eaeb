"""The certificate of a run: a small copy of it is trained, and all checks are asked."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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
from fsdp_trainer.apps.prove.proof import forked_ranks
from fsdp_trainer.apps.prove.proof.certificate import Certificate, Findings
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.narrowing import Narrowing
from fsdp_trainer.config.verbs import ProveConfig
from fsdp_trainer.observe.console import Console

OF_A_RUN: list[Callable[[Evidence], Findings]] = [
    layout.check, other_program.check, packing.check, trained.check, mask.check, prompts.check,
    resume.check, exports.check,
]  # fmt: skip
"""Functions of the evidence of a run."""


def prove_run(cfg: ProveConfig, words: list[str]) -> Certificate:
    """Return the certificate of a run. Raises UserError and RunFailed.

    words: of the command line.
    """
    console = Console(quiet=False, stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        scratch = Path(folder)
        narrowing = Narrowing(cfg, scratch)
        forked_ranks.begin(narrowing.config.by_transformers)
        small = narrowing.small_run()
        certificate = Certificate(about=small.about)
        evidence = Evidence(small, words, scratch, lambda line: console.say(f"proof  {line}"))
        for check in OF_A_RUN:
            certificate.add(check(evidence))
        certificate.not_proved += small.not_proved
    return certificate
