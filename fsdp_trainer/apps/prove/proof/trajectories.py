"""Losses, gradients and weights of two trainings, and by how much they differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.proof.certificate import Checked, compared
from fsdp_trainer.apps.prove.proof.recordings import BIAS, GRADIENTS, STEPS
from fsdp_trainer.apps.prove.proof.runs import ProofRun

SMALL = 1e-2
"""Tensors whose largest number is a smaller share of the largest of all are compared as if it were
this: the gradient of a key's bias is 0 but for rounding, as is that of a bias of scores."""
BIASES = "routers' biases"
LIMITS = {
    "losses": 1e-5, "gradients": 1e-4, "last gradients": 1e-3, "weights": 1e-3, BIASES: 0.1,
}  # fmt: skip
"""Largest relative differences of float32, of weights relative to how far they moved. Gradients of
the last step are of weights that differ by the rounding of all steps before. A router's bias moves
by the sign of a count, which one token turns if it is near the mean: few of all steps may differ.
"""
AMPLIFIED = 4.0
"""How many times the difference may be that weights at the start cause which differ by rounding."""
LARGEST = 0.1
"""The largest limit, where rounding has a router choose another expert for a token. Faults are
beyond it, or are seen in the gradients of the first steps."""
UNITS = {
    "losses": "of the loss",
    "gradients": "of the tensor's largest number",
    "last gradients": "of the tensor's largest number",
    "weights": "of how far the tensor moved",
    BIASES: "of the moves of all steps",
}


class Difference(NamedTuple):
    """The largest difference, and where it is."""

    value: float
    where: str


@dataclass(frozen=True)
class Trajectory:
    """The course of a training.

    losses: of each step, what is minimised; gradients: by step and name, of some steps; start, end:
    weights by name. bias_speed: by how much a step moves a router's bias; 0: not at all.
    """

    losses: list[float]
    gradients: dict[int, dict[str, Tensor]]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    bias_speed: float = 0.0

    @classmethod
    def of(cls, run: ProofRun) -> "Trajectory":
        losses = [line.get("objective", line["loss"]) for line in run.metrics]
        gradients = {step: run.gradients(step) for step in GRADIENTS}
        there = {step: tensors for step, tensors in gradients.items() if tensors}
        return cls(losses, there, run.start, run.end, run.cfg.loss.bias_update_speed)

    def differences(self, other: "Trajectory") -> dict[str, Difference]:
        """Return the largest differences from another training, by the names of LIMITS."""
        steps = sorted(self.gradients.keys() & other.gradients.keys())
        first = [self.of_step(other, step) for step in steps if step < STEPS]
        last = [self.of_step(other, step) for step in steps if step == STEPS]
        biases = [name for name in other.end if self.bias_speed and name.endswith(BIAS)]
        ours, expected = (
            {name: weight for name, weight in one.end.items() if name not in biases}
            for one in (self, other)
        )
        moved = {name: (w.float() - other.start[name].float()) for name, w in expected.items()}
        return {
            "losses": of_losses(self.losses, other.losses),
            **({"gradients": max(first)} if first else {}),
            **({"last gradients": max(last)} if last else {}),
            "weights": largest(ours, expected, moved),
            **({BIASES: max(self.of_bias(other, name) for name in biases)} if biases else {}),
        }

    def of_bias(self, other: "Trajectory", name: str) -> Difference:
        """Return the share of a bias's moves that have another sign."""
        if name not in self.end:
            return Difference(math.inf, f"only one has {name}")
        error = (self.end[name] - other.end[name]).double().abs().mean()
        return Difference(finite(float(error) / (2 * self.bias_speed * STEPS)), name)

    def of_step(self, other: "Trajectory", step: int) -> Difference:
        difference = largest(self.gradients[step], other.gradients[step])
        return Difference(difference.value, f"step {step}, {difference.where}")


def of_losses(ours: list[float], expected: list[float]) -> Difference:
    if len(ours) != len(expected):
        return Difference(math.inf, f"{len(ours)} steps in place of {len(expected)}")
    each = [
        Difference(
            finite(abs(a - b) / max(abs(b), 1e-2)), f"step {step}: {a:.6f}, expected {b:.6f}"
        )
        for step, (a, b) in enumerate(zip(ours, expected, strict=True), 1)
    ]
    return max(each)


def largest(
    ours: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None = None,
) -> Difference:
    """Return the largest difference relative to the largest number of its tensor.

    scales: tensors whose largest numbers count in place of those of `expected`. Further rows of
    `ours` are padding, which must be 0.
    """
    if lacking := expected.keys() ^ ours.keys():
        return Difference(math.inf, f"only one has {', '.join(sorted(lacking)[:3])}")
    tops = {name: top(tensor) for name, tensor in (scales or expected).items()}
    floor = SMALL * max(tops.values(), default=0.0)
    each = [Difference(0.0, "")]
    for name, tensor in expected.items():
        own = ours[name]
        if own.ndim and len(own) > len(tensor):
            if own[len(tensor) :].any():
                each.append(Difference(math.inf, f"padding of {name}"))
            own = own[: len(tensor)]
        if own.shape != tensor.shape:
            each.append(Difference(math.inf, f"{name} is {list(own.shape)}"))
        elif tensor.is_floating_point():
            error, scale = top(own.float() - tensor.float()), max(tops[name], floor)
            each.append(Difference(finite(error / scale) if error else 0.0, name))
        elif not torch.equal(own, tensor):
            each.append(Difference(math.inf, name))
    return max(each)


def top(tensor: Tensor) -> float:
    """Return the largest absolute number; 0 for an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def verdict(
    name: str, kind: str, difference: Difference, rounding: float, what: str, advice: str
) -> Checked:
    """Return the comparison of one kind of LIMITS.

    rounding: by how much weights at the start that differ by rounding change this kind.
    """
    limit = max(LIMITS[kind], min(AMPLIFIED * rounding, LARGEST))
    where = f"; largest {UNITS[kind]}: {difference.where}" if difference.value else ""
    return compared(f"{name}: {kind}", difference.value, limit, f"{what}{where}", advice)
