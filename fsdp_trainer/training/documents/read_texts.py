"""Texts, given as tokens, that a model reads packed into rows: what its head gives each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.generation.prompt_media import PromptMedia, packed_media
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.rl.rewards.model import ROW_TOKENS
from fsdp_trainer.training.batches import Assembler, BatchOptions
from fsdp_trainer.training.documents.document_sums import document_numbers, document_vectors


@dataclass(frozen=True)
class TextWithMedia:
    """The tokens of a text, some of which stand for its media."""

    tokens: np.ndarray
    media: PromptMedia

    def __len__(self) -> int:
        return len(self.tokens)


Tokens = Sequence[Sequence[int] | np.ndarray | TextWithMedia]
"""The tokens of texts."""


@torch.no_grad()
def numbers_of_texts(model: Decoder, texts: Tokens, device: torch.device) -> Tensor:
    """Return what the head gives each text, its numbers or its embedding: [texts, numbers] float64.

    texts: of one token or more each. Raises RunFailed for one longer than the model's context.
    """
    context, pooling = model.config.max_position_embeddings, model.config.pooling
    longest = max(map(len, texts), default=0)
    if longest > context:
        kind = "an embedding model" if pooling else "a reward model or classifier"
        raise RunFailed(f"a text of {longest:,} tokens is longer than {kind} reads: {context:,}")
    parts, places = [], []
    for numbers, rows in packed_rows(texts, alone=not model.config.packs):
        length = rows.tokens.shape[1]
        assembler = Assembler(
            length,
            1,
            BatchOptions(1, 0, 1, device, number_documents=True, pooling=pooling or "last"),
        )
        batch = assembler.assemble(rows)
        own = [texts[number] for number in numbers]
        if any(isinstance(text, TextWithMedia) for text in own):
            media = [text.media if isinstance(text, TextWithMedia) else None for text in own]
            ids = [tuple(map(int, ids_of(text))) for text in own]
            batch = replace(batch, media=packed_media(model, ids, media, device, length))
        read = document_vectors if pooling else document_numbers
        parts.append(read(model(batch).scores, batch, None).cpu())
        places += numbers
    if not parts:
        width = model.config.scores or model.config.hidden_size
        return torch.zeros(0, width, dtype=torch.float64)
    return torch.cat(parts)[np.argsort(places)]


def ids_of(text: Sequence[int] | np.ndarray | TextWithMedia) -> Sequence[int] | np.ndarray:
    return text.tokens if isinstance(text, TextWithMedia) else text


def packed_rows(texts: Tokens, alone: bool = False) -> Iterator[tuple[list[int], Rows]]:
    """Pack texts into rows; yield for each row the indices of its texts, and the row.

    alone: a row has one text.
    """
    if not texts:
        return
    lengths = np.array([len(text) for text in texts])
    width = max(int(lengths.max()), min(ROW_TOKENS, int(lengths.sum())))
    packing = best_fit(lengths, width)
    each = np.split(packing.documents, packing.offsets[1:-1])
    for numbers in [[i] for i in range(len(texts))] if alone else each:
        rows, at = Rows.empty(1, width), 0
        rows.documents = [lengths[numbers].tolist()]
        rows.group_starts = [[True] * len(numbers)]
        for number in numbers:
            end = at + len(texts[number])
            rows.tokens[0, at:end] = ids_of(texts[number])
            rows.positions[0, at:end] = np.arange(end - at)
            at = end
        yield [*map(int, numbers)], rows
