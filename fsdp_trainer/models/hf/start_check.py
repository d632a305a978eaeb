"""A check of the real model of transformers before the first step, on a few tokens."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import MediaInputs
from fsdp_trainer.models.hf.probe import LENGTHS, Trial, difference, positions_of

Picture = tuple[dict[str, np.ndarray], int]
"""The processor's arrays of an image, and the number of tokens for it."""
LARGEST = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest relative difference between equal results, in each number format."""


@torch.no_grad()
def check_model(
    model: Any, device: torch.device, dtype: str, picture: Picture | None = None
) -> None:
    """Compare with transformers' own logits, and packed documents with the same ones alone.

    dtype: of the computation. picture: None for data without images. Collective. Raises UserError.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    tokens = torch.randint(size, (1, sum(LENGTHS)), generator=generator).to(device)
    with sizes_that_fit(model):
        problems = head_problems(model, tokens, dtype)
    problems += packing_problems(model, tokens, dtype)
    if picture is not None:
        problems += image_problems(model, picture, tokens, dtype)
    if problems:
        raise UserError("the model is not computed as transformers does", problems)


@contextmanager
def sizes_that_fit(model: Any) -> Iterator[None]:
    """Raise UserError if transformers' class computes neither the model nor a small copy of it."""
    try:
        yield
    except Exception as error:  # whatever the class raises
        if math.isfinite(model.config.mixing):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = (
            f"{model.config.architecture} computes no tokens with the sizes of this config.json:\n"
            f"{lines[0]}\nCompare its numbers of heads, widths and experts with the published file"
        )
        problem = Problem(f"model_type={model.config.family}", reason)
        title = "transformers' class cannot compute the model"
        raise UserError(title, [problem]) from error


def head_problems(model: Any, tokens: Tensor, dtype: str) -> list[Problem]:
    if not model.config.predicts:
        return []
    first = tokens[:, : LENGTHS[0]]
    both = model.both_logits(first, positions_of(first))
    about = "logits from the last states", "changes them", "docs/any-model.md says what is tried"
    return logits_problems(model, both, dtype, *about)


def image_problems(model: Any, picture: Picture, tokens: Tensor, dtype: str) -> list[Problem]:
    both = model.both_image_logits(*with_image(model, picture, tokens))
    page = "docs/images.md has the models that are tried"
    return logits_problems(
        model, both, dtype, "logits of a text with an image", "computes images", page
    )


def with_image(model: Any, picture: Picture, tokens: Tensor) -> tuple[Tensor, Tensor, MediaInputs]:
    """Return a document with an image among these tokens, [1, length], its positions, and it."""
    arrays, count = picture
    token = model.tower.token
    image = torch.full((1, count), token, device=tokens.device)
    text = torch.where(tokens == token, 0, tokens)
    document = torch.cat([text[:, : LENGTHS[0]], image, text[:, LENGTHS[0] :]], 1)
    positions = None
    if model.media_positions is not None:
        positions = model.media_positions(document[0].cpu(), arrays)[:, None].to(tokens.device)
    on_device = {name: to_device(values, tokens.device) for name, values in arrays.items()}
    return document, positions_of(document), MediaInputs(on_device, count, positions)


def logits_problems(
    model: Any, both: tuple[Tensor, Tensor], dtype: str, what: str, does: str, page: str
) -> list[Problem]:
    """Return the problem of logits, of which `both` are ours and transformers' own.

    what: the logits; does: what the class does differently; page: where to read about it.
    """
    change = difference(both[0].float(), both[1].float())
    if change <= LARGEST[dtype]:
        return []
    kind = model.config.family
    reason = (
        f"{what} differ from transformers' own by {show(change)} of the\n"
        f"largest: the class of {kind} {does} in a way that is not known here.\n"
        f"Please report it; {page}"
    )
    return [Problem(f"model_type={kind}", reason)]


def packing_problems(model: Any, tokens: Tensor, dtype: str) -> list[Problem]:
    if not model.config.packs:
        return []
    trial = Trial(tokens)
    packed = model.all_states(tokens, trial.positions, trial.layout)
    change = difference(packed.float(), trial.alone(model.all_states).float())
    if change <= LARGEST[dtype]:
        return []
    reason = (
        f"packed documents change each other by {show(change)} of the largest number, although a\n"
        "small copy of the model kept them apart.\nUse  data.packing=none"
    )
    return [Problem("data.packing=best_fit", reason)]


def show(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "an infinite part"
