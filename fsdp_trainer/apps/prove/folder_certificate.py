"""The certificate of a folder: its files are read with bounds, and nothing in them is run."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fsdp_trainer.apps.prove.folders import (
    beside_reference,
    kept_promises,
    moved_by_adapter,
    needed_tensors,
    same_logits,
    stored_files,
)
from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import (
    Certificate,
    Findings,
    NotProved,
    counted_wrong,
    raised,
)
from fsdp_trainer.config.verbs import ProveConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.observe.console import Console

OF_A_FOLDER: dict[str, Callable[[ProvedFolder], Findings]] = {
    "promises": kept_promises.check,
    "tensors": needed_tensors.check,
    "adapter": moved_by_adapter.check,
    "beside the reference": beside_reference.check,
    "logits": same_logits.check,
}
"""Functions of a folder whose files are whole, by what they compare."""
UNREADABLE = "a file of the folder has content that programs do not expect: save it anew"


def prove_folder(cfg: ProveConfig, words: list[str]) -> Certificate:
    """Return the certificate of a folder. Raises UserError if it is no folder of a model.

    words: of the command line.
    """
    console = Console(quiet=False, stream=sys.stderr)
    reference = Path(cfg.reference).expanduser() if cfg.reference else None
    source = Path(str(cfg.source)).expanduser()
    certificate = Certificate()
    with tempfile.TemporaryDirectory(prefix="prove-") as scratch:
        proof = ProvedFolder(
            source, reference, words, Path(scratch), lambda line: console.say(f"proof  {line}")
        )
        proof.require_model()
        kind = "an adapter" if proof.is_adapter else "a whole model"
        beside = f", beside {reference}" if reference else ""
        certificate.about = [f"{source}, {kind}{beside}"]
        certificate.add(stored_files.check(proof))
        are_whole = all(one.ok for one in certificate.checks if one.name == stored_files.NAME)
        if not are_whole:
            names = ", ".join(OF_A_FOLDER)
            certificate.add([NotProved(f"{names}: the files are not whole", proof.command)])
            return certificate
        for name, check in OF_A_FOLDER.items():
            certificate.add(results_of(name, check, proof))
    return certificate


def results_of(
    name: str, check: Callable[[ProvedFolder], Findings], proof: ProvedFolder
) -> Findings:
    """Yield the results of a check; what cannot be read is one that differs."""
    try:
        yield from check(proof)
    except UserError as error:
        yield counted_wrong(name, reasons(error), "", UNREADABLE)
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        yield counted_wrong(name, [raised(error)], "", UNREADABLE)
