"""Ten steps of a run by transformers and torch's AdamW alone: the twin that runs are held to."""

import copy
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.recordings import BIAS, GRADIENTS
from fsdp_trainer.apps.prove.proof.trajectories import Trajectory
from fsdp_trainer.apps.prove.twins.formulas import FORMULAS
from fsdp_trainer.apps.prove.twins.of_further_tokens import further_losses
from fsdp_trainer.apps.prove.twins.of_routers import RouterTwins
from fsdp_trainer.apps.prove.twins.twin_model import Twin, load, open_twin, stored_form
from fsdp_trainer.apps.prove.twins.twin_step import NoTwin, TwinData, TwinStep
from fsdp_trainer.config.schema import ObjectiveChoice, Optim
from fsdp_trainer.extensions import registered_by_user
from fsdp_trainer.models.hf.read_architecture import read_architecture


def formula_of(cfg: ObjectiveChoice) -> Callable[[TwinStep], Iterator[Tensor]]:
    """Return what yields the parts of a step's loss, by an independent formula. Raises NoTwin."""
    if registered_by_user(cfg) or cfg.name not in FORMULAS:
        raise NoTwin(f"an independent formula of objective={cfg.name}", "")
    return FORMULAS[cfg.name]


def train_twin(evidence: Evidence) -> tuple[Trajectory, Trajectory]:
    """Return what the plain run and its twin computed, under the same names. Raises NoTwin.

    With an optimizer that is not AdamW both are of the first step, without its update.
    """
    run, cfg = evidence.plain, evidence.small.plain
    losses = formula_of(cfg.objective)
    evidence.say("trains by transformers, one document at a time")
    twin = open_twin(run, evidence.config, evidence.scratch / "twin")
    ours = ours_as_stored(evidence, twin)
    trained = dict.fromkeys(ours.gradients[1], True)
    parameters = twin.trained(trained)
    for name, parameter in twin.model.named_parameters():
        parameter.requires_grad_(name in parameters)
    step_of = steps_of(evidence, twin)
    steps = len(ours.losses)
    routers = RouterTwins.of(twin.model, evidence.config, cfg.loss)
    optimizer = adamw(parameters, cfg.optim) if steps > 1 else None
    values, gradients = [], {}
    for step in range(1, steps + 1):
        total = 0.0
        documents = step_of(step)
        of_routers = routers.losses(documents) if routers else ()
        further = further_losses(documents) if cfg.objective.mtp else ()
        for part in chain(losses(documents), of_routers, further):
            part.backward()
            total += float(part.detach())
        values.append(total)
        if step in GRADIENTS:
            gradients[step] = only(trained, twin.as_stored(gradients_of(parameters)))
        if optimizer:
            update(optimizer, [*parameters.values()], cfg.optim, run.metrics[step - 1]["lr"])
        if routers:
            routers.move_biases()
    whole = {**dict(twin.model.named_parameters()), **dict(twin.model.named_buffers())}
    whole = {name: tensor.detach() for name, tensor in whole.items()}
    end = only(ours.end, twin.as_stored(whole))
    return ours, Trajectory(values, gradients, ours.start, end)


def steps_of(evidence: Evidence, twin: Twin) -> Callable[[int], TwinStep]:
    """Return a function that returns a step, counted from 1."""
    documents, second = TwinData(evidence), second_of(evidence, twin)
    exported = evidence.plain.checkpoints[-1] / "hf" / "config.json"
    described = json.loads(exported.read_text())
    pooling, stores = evidence.config.pooling, evidence.data[2].train

    def step_of(step: int) -> TwinStep:
        every = documents.of_step(step)
        cfg = evidence.small.plain
        return TwinStep(cfg, twin.model, second, every, described, pooling, stores)

    return step_of


def ours_as_stored(evidence: Evidence, twin: Twin) -> Trajectory:
    """Return the plain run under its twin's names; its first step alone for another optimizer."""
    own = Trajectory.of(evidence.plain)

    def form(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if twin.names is not None:
            return {name: tensors[name] for name in twin.names}
        return stored_form(evidence.config, tensors)

    moves = bool(evidence.small.plain.loss.bias_update_speed)
    trained = {
        name: tensor
        for name, tensor in own.end.items()
        if evidence.plain.trained[name] or (moves and name.endswith(BIAS))
    }
    if not evidence.small.plain.optim.spec.takes_states:  # it is not AdamW
        start = form({name: own.start[name] for name in trained})
        return Trajectory(own.losses[:1], {1: form(own.gradients[1])}, start, start)
    gradients = {step: form(tensors) for step, tensors in own.gradients.items()}
    start = form({name: own.start[name] for name in trained})
    return Trajectory(own.losses, gradients, start, form(trained), own.bias_speed)


def second_of(evidence: Evidence, twin: Twin) -> Any:
    """Return the frozen model beside the trained one: a teacher or a reference; None: no one."""
    second = evidence.small.plain.second_model
    if second is None:
        return None
    if second.is_start:
        return copy.deepcopy(twin.model).requires_grad_(False)
    folder = Path(second.source)
    return load(read_architecture(folder), folder).requires_grad_(False)


def adamw(parameters: dict[str, nn.Parameter], cfg: Optim) -> torch.optim.AdamW:
    """Return torch's AdamW, in which norms and biases do not decay."""
    matrices = [p for n, p in parameters.items() if p.ndim >= 2 and not n.endswith("bias")]
    known = {id(p) for p in matrices}
    vectors = [p for p in parameters.values() if id(p) not in known]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = cfg.betas[0], cfg.betas[1]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, eps=cfg.eps)


def update(
    optimizer: torch.optim.AdamW, parameters: list[nn.Parameter], cfg: Optim, rate: float
) -> None:
    """Clip the gradients, update the weights, and forget the gradients."""
    if cfg.grad_clip_value is not None:
        nn.utils.clip_grad_value_(parameters, cfg.grad_clip_value)
    if cfg.grad_clip is not None:
        nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def gradients_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).clone()
        for name, p in parameters.items()
    }


def only(names: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in names}
