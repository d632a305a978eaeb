"""Media of prompts, as the model takes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.folders import user_cache
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.data.media.kinds import processor_of, reader_of
from fsdp_trainer.data.media.media import MediaProcessor, MediaReader, SampleMedium, joined
from fsdp_trainer.data.store.findings import MediaWarnings
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import AXES, Decoder, MediaInputs

Arrays = dict[str, np.ndarray]
"""What a processor makes of media, by transformers' names."""


@dataclass(frozen=True)
class PromptMedia:
    """The media of a prompt.

    load: returns the processor's arrays, each time that it is called. tokens: number of the
    prompt's tokens that stand for them.
    """

    load: Callable[[], Arrays]
    tokens: int

    @classmethod
    def of_files(
        cls, processor: MediaProcessor, media: Sequence[SampleMedium]
    ) -> "PromptMedia | None":
        """Return media of files, which are not read yet; None without any.

        `load` raises UserError for one that has changed.
        """
        if not media:
            return None

        def load() -> Arrays:
            return joined([processor.load(one.file) for one in media])

        return cls(load, sum(one.tokens for one in media))


def reader_of_media(config: ModelConfig, source: str | Path) -> MediaReader | None:
    """Return what reads media for a model; None for one that reads only text.

    source: a run, a checkpoint or a folder.
    """
    if not config.reads_images:
        return None
    processor = processor_of(str(model_folder(source)))
    return reader_of(processor, user_cache(), MediaWarnings())


def media_inputs(
    model: Decoder, rows: Sequence[Any], texts: list[list[int]], width: int, device: torch.device
) -> tuple[MediaInputs | None, Tensor | None]:
    """Return the media of continuations, and what is added to the positions of later tokens.

    rows: Continuations. texts: their tokens so far, which are padded on the left to `width`. Both
    are None without media; the second also for a model whose media have no positions of their
    own.
    """
    inputs, own = loaded([row.media for row in rows], device)
    if inputs is None or model.media_positions is None:
        return inputs, None
    each = [positions_of(model, *one) for one in zip(own, texts, strict=True)]
    padded = [torch.nn.functional.pad(one, (width - one.shape[1], 0)) for one in each]
    shifts = [int(one.max()) + 1 - one.shape[1] for one in each]
    positions = to_device(torch.stack(padded, 1), device)
    return replace(inputs, positions=positions), to_device(np.array(shifts)[:, None], device)


def packed_media(
    model: Decoder,
    texts: Sequence[tuple[int, ...]],
    media: Sequence[PromptMedia | None],
    device: torch.device,
    length: int | None = None,
) -> MediaInputs | None:
    """Return the media of texts that share a row. length: of the row; None: that of the texts."""
    inputs, own = loaded(media, device)
    if inputs is None or model.media_positions is None:
        return inputs
    each = [positions_of(model, *one) for one in zip(own, map(list, texts), strict=True)]
    positions = torch.cat(each, 1)[:, None]
    padding = 0 if length is None else length - positions.shape[-1]
    positions = torch.nn.functional.pad(positions, (0, padding))
    return replace(inputs, positions=to_device(positions, device))


def loaded(
    media: Sequence[PromptMedia | None], device: torch.device
) -> tuple[MediaInputs | None, list[Arrays | None]]:
    own = [each.load() if each is not None else None for each in media]
    arrays = [each for each in own if each is not None]
    if not arrays:
        return None, own
    on_device = {name: to_device(values, device) for name, values in joined(arrays).items()}
    return MediaInputs(on_device, sum(each.tokens for each in media if each)), own


def positions_of(model: Decoder, arrays: Arrays | None, text: list[int]) -> Tensor:
    """Return the positions of a text, [axes, length] int64. arrays: of its media."""
    if arrays is None:
        return torch.arange(len(text)).expand(AXES, -1)
    return model.media_positions(torch.tensor(text), arrays)
