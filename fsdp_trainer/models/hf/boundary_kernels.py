"""Kernels that are told where documents end, for layers that mix the tokens of a row.

flash-linear-attention, causal-conv1d and mamba-ssm have them, and transformers' classes call them
where they are installed. Which arguments such a class hands on is tried, on a small copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.hf_decoder import TransformersDecoder
from fsdp_trainer.models.hf.probe import (
    LENGTHS,
    VOCABULARY,
    Trial,
    difference,
    small_copy,
    small_model,
)
from fsdp_trainer.models.hf.start_check import LARGEST, show

ARGUMENTS = (("cu_seq_lens_q", "seq_idx"), ("cu_seqlens", "seq_idx"))
"""Names of the boundaries, and of each token's number of its document, in transformers' classes."""
INSTALL = "pip install 'fsdp_trainer[fla]' has them (docs/any-model.md)"


class Boundaries(NamedTuple):
    """The way in which a model's layers compute packed documents on a device.

    arguments: one of ARGUMENTS; empty: document by document. reason: why, for people.
    """

    arguments: tuple[str, ...]
    reason: str


def try_boundaries(config: ModelConfig, device: torch.device, dtype: str) -> Boundaries:
    """Return how a device computes the layers of a model that mix documents.

    dtype: of the computation. Kernels are used if a small copy's states and gradients are those of
    the documents alone.
    """
    reasons = []
    for narrow in (True, False):
        try:
            model = small_model(small_copy(config, narrow)).to(device, getattr(torch, dtype))
            break
        except Exception as error:  # whatever an architecture raises for sizes that it lacks
            reasons.append(first_line(error))
    else:
        return Boundaries((), f"no small copy could be tried: {reasons[-1]}")
    model.requires_grad_(True)
    alone = results(model, packed=False)
    for arguments in ARGUMENTS:
        model.use_boundaries(arguments)
        try:
            packed = results(model, packed=True)
        except Exception as error:  # whatever a class raises for an argument that it lacks
            reasons.append(first_line(error))
            continue
        change = max(difference(a, b) for a, b in zip(packed, alone, strict=True))
        if change <= LARGEST[dtype]:
            return Boundaries(arguments, f"kernels that get boundaries ({', '.join(arguments)})")
        reasons.append(f"with {arguments[0]} documents change each other by {show(change)}")
    return Boundaries((), f"no kernel for packed documents ({reasons[0]}); {INSTALL}")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def results(model: TransformersDecoder, packed: bool) -> tuple[Tensor, Tensor]:
    weight = model.embedding.weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=generator)
    trial = Trial(tokens.to(weight.device))
    if packed:
        states = model.states(trial.tokens, trial.positions, trial.layout)
    else:
        states = trial.alone(model.states)
    channels = torch.arange(states.shape[-1], device=states.device).sin()
    (gradient,) = torch.autograd.grad((states.float() * channels).sum(), [weight])
    return states.detach().float(), gradient.float()
