"""Every trained weight moves, and no frozen one does."""

from collections.abc import Iterator
from fnmatch import fnmatch

import torch

from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.runs import ProofRun
from fsdp_trainer.models.hf.new_model import meta_decoder

MOVES = (
    "such a weight costs memory and learns nothing: take it out of the training with "
    " train.freeze , or see why the loss does not depend on it"
)
STAYS = "report it, with the names of the weights"
PARTS_OF_IMAGES = {"vision", "projector", "language"}


def check(evidence: Evidence) -> Iterator[Checked]:
    for run, where in ((evidence.plain, "one process"), (evidence.planned, "the planned layout")):
        still = [name for name in run.end if run.trained[name] and not has_moved(run, name)]
        trained = sum(run.trained.values())
        right = f"all {trained} tensors that are trained have changed after ten steps, in {where}"
        yield counted_wrong(f"trained weights move, {where}", still, right, MOVES)
    run = evidence.planned
    balanced = bool(run.cfg.loss.bias_update_speed)
    moved = [
        name
        for name, trained in run.trained.items()
        if not trained and has_moved(run, name) and not (balanced and name.endswith("_bias"))
    ]
    wrong = [f"{name} is frozen and moved" for name in moved]
    head = meta_decoder(evidence.config).head_names
    wrong += [f"{name} is to be frozen and is trained" for name in wrongly_trained(run, head)]
    frozen = sum(not trained for trained in run.trained.values())
    right = (
        f"all {frozen} frozen tensors have the same bits as before" if frozen else "none is frozen"
    )
    yield counted_wrong("frozen weights stay", wrong, right, STAYS)


def has_moved(run: ProofRun, name: str) -> bool:
    return not torch.equal(run.start[name], run.end[name])


def wrongly_trained(run: ProofRun, head: set[str]) -> list[str]:
    """Return the weights that are trained although the configuration says that they are not.

    head: names of its weights, which are trained beside adapters.
    """
    cfg = run.cfg
    patterns = [pattern for pattern in cfg.train.freeze if pattern not in PARTS_OF_IMAGES]
    trained = [name for name, is_trained in run.trained.items() if is_trained]
    wrong = [n for n in trained if any(fnmatch(n, pattern) for pattern in patterns)]
    if cfg.adapter.name != "none" and not cfg.adapter.also:
        wrong += [name for name in trained if "lora_" not in name and name not in head]
    return wrong
