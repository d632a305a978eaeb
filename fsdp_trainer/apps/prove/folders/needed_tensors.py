"""A folder has every tensor that its architecture needs, in its shape, and no others."""

from collections.abc import Iterator

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, counted_wrong
from fsdp_trainer.errors import UserError

NAME = "tensors"
ADVICE = "export the folder anew: a program gives what is missing random numbers, or refuses it"


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Compare names, shapes and formats with the architecture that config.json describes."""
    if proof.is_adapter:
        return
    try:
        assert proof.config
    except UserError as error:
        name = f"read by this program: {reasons(error)[0]}"
        yield NotProved(name, f"pip install -U transformers ; {proof.command}")
        return
    if proof.why_not_decoded:
        yield NotProved(f"{NAME}: {proof.why_not_decoded}", proof.command)
        return
    wrong = []
    try:
        assert proof.weights
    except UserError as error:
        wrong = reasons(error)
    right = "each that config.json needs is there in its shape, and no other"
    yield counted_wrong(NAME, wrong, right, ADVICE)
