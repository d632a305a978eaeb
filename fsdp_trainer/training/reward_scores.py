"""Scores of texts by a reward model: an export, or a run with objective=reward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.data.order import Rows
from fsdp_trainer.data.packing import best_fit
from fsdp_trainer.data.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.batches import Assembler

ROW_TOKENS = 4096
"""Tokens of a packed row, unless a text is longer."""


@dataclass(frozen=True)
class RewardModel:
    """A model that gives a text one number. Not collective: each process has a whole one."""

    model: Decoder
    tokenizer: TextTokenizer
    device: torch.device

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Return the score of each text, whose special tokens are read as such.

        texts: prompt and answer as the chat template writes them, the end of the turn included.
        """
        return self.scores_of_tokens([self.tokenizer.encode(text) for text in texts])

    @torch.no_grad()
    def scores_of_tokens(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text of at least one token."""
        scores = torch.zeros(len(texts))
        for numbers, rows in packed_rows(texts):
            length = rows.tokens.shape[1]
            assembler = Assembler(
                length, 1, 1, 0, 1, self.device, number_documents=True, last_tokens=True
            )
            batch = assembler.assemble(rows)
            by_text = self.model(batch).scores.log_probability[: len(numbers)]
            scores[numbers] = by_text.float().cpu()
        return scores.tolist()


def open_reward_model(
    source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> RewardModel:
    """Return the reward model of a run, a checkpoint or a Hugging Face folder.

    Raises UserError for a language model, and what `load_model` raises.
    """
    path = Path(source).expanduser()
    model = load_model(path, device, dtype, scores=True)
    tokenizer = load_tokenizer(str(tokenizer_folder(path)))
    return RewardModel(model, tokenizer, torch.device(device))


def packed_rows(texts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Rows]]:
    """Yield rows of texts side by side, and the places of these among all."""
    if not texts:
        return
    lengths = np.array([len(text) for text in texts])
    width = max(int(lengths.max()), min(ROW_TOKENS, int(lengths.sum())))
    packing = best_fit(lengths, width)
    for numbers in np.split(packing.documents, packing.offsets[1:-1]):
        rows, at = Rows.empty(1, width), 0
        rows.documents = [lengths[numbers].tolist()]
        rows.group_starts = [[True] * len(numbers)]
        for number in numbers:
            end = at + len(texts[number])
            rows.tokens[0, at:end] = texts[number]
            rows.positions[0, at:end] = np.arange(end - at)
            at = end
        yield numbers.tolist(), rows
