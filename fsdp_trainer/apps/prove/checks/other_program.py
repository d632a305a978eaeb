"""The plain run trains as transformers does, with torch's AdamW and the papers' formulas."""

from collections.abc import Iterator

from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.trajectories import verdict
from fsdp_trainer.apps.prove.twins.twin import train_twin
from fsdp_trainer.apps.prove.twins.twin_step import NoTwin

TEXTBOOKS = "python -m pytest tests/methods"
"""In a checkout: the methods' losses beside those of textbooks."""
ADVICE = (
    "this program and transformers disagree on the model: compare config.json's keys with the"
    " published folder, upgrade transformers, or train with  model.implementation=transformers ;"
    " and report it"
)


def check(evidence: Evidence) -> Iterator[Checked | NotProved]:
    try:
        ours, expected = train_twin(evidence)
    except NoTwin as missing:
        name, words = missing.args
        is_package = words.startswith("pip ")
        again = words + evidence.command("") if is_package else evidence.command(words)
        command = again if words else TEXTBOOKS
        yield NotProved(f"one process = {name}", command)
        return
    by = "transformers" if evidence.small.plain.adapter.name == "none" else "PEFT"
    for kind, difference in ours.differences(expected).items():
        if kind == "weights" and len(ours.losses) == 1:
            name = f"an independent optim={evidence.small.plain.optim.name}"
            yield NotProved(f"weights after ten steps = {name}", evidence.command("optim=adamw"))
            continue
        rounding = evidence.rounding(kind, difference)
        what = f"packed rows in one process and {by}, one document at a time"
        yield verdict(by, kind, difference, rounding, what, ADVICE)
