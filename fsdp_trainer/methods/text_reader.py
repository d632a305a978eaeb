"""Reading of texts by a model whose head gives them numbers: classes, scores, or embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.load import load_reader
from fsdp_trainer.checkpoint.sentence_files import SETTINGS
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.methods.labels import MULTI, REGRESSION
from fsdp_trainer.models.config import AUTO, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.documents.read_texts import Tokens, numbers_of_texts

Text = str | tuple[str, str]
"""A text, or two that are read together."""


@dataclass(frozen=True)
class TextReader:
    """A model that reads texts and writes none. Not collective: each process has all weights.

    prompts: texts that stand before those of a kind, by its name.
    """

    model: Decoder
    tokenizer: TextTokenizer
    device: torch.device
    prompts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        implementation: str = AUTO,
    ) -> "TextReader":
        """Load from a run, a checkpoint or a Hugging Face folder. Raises UserError."""
        model = load_reader(source, device, dtype, implementation)
        folder = tokenizer_folder(source)
        tokenizer = load_tokenizer(str(folder))
        model.describe_as(with_types(model.config, tokenizer))
        return cls(model, tokenizer, torch.device(device), stored_prompts(folder))

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def encode(
        self, texts: Sequence[Text], prompt: str = "", limit: int | None = None
    ) -> list[np.ndarray]:
        """Return the tokens of texts as training encodes them. prompt: stands before each.

        limit: tokens of each, at most; None: all.
        """
        prompted = [prompt + one if isinstance(one, str) else one for one in texts]
        return self.tokenizer.encode_published(prompted, limit)

    def vectors(self, tokens: Tokens, width: int | None = None) -> Tensor:
        """Return the embeddings of texts, [texts, width] float64, each of length 1.

        width: so many first numbers; None: all.
        """
        return F.normalize(numbers_of_texts(self.model, tokens, self.device)[:, :width], dim=1)

    def probabilities(self, tokens: Tokens) -> Tensor:
        """Return the probabilities of a classifier's labels, [texts, labels] float64.

        Of numbers that are no labels, they are the numbers themselves.
        """
        numbers, config = numbers_of_texts(self.model, tokens, self.device), self.model.config
        if config.problem == REGRESSION:
            return numbers
        return numbers.sigmoid() if config.problem == MULTI else numbers.softmax(1)

    def encode_ranked(
        self, query: str, documents: Sequence[str], limit: int | None = None
    ) -> list[np.ndarray]:
        """Return the tokens that `relevance` reads. limit: see encode.

        They are those of the query with each document; of an embedding model of each text alone.
        """
        if not self.model.config.pooling:
            return self.encode([(query, document) for document in documents], limit=limit)
        own = self.encode([query], self.prompts.get("query", ""), limit)
        return own + self.encode(documents, self.prompts.get("document", ""), limit)

    def relevance(self, tokens: Tokens) -> Tensor:
        """Return how well documents answer a query, [documents] float64.

        It is a probability by a reranker, and a cosine by an embedding model.
        """
        if self.model.config.pooling:
            vectors = self.vectors(tokens)
            return vectors[1:] @ vectors[0]
        return numbers_of_texts(self.model, tokens, self.device)[:, 0].sigmoid()


def with_types(config: ModelConfig, tokenizer: TextTokenizer) -> ModelConfig:
    if not config.encoder or config.source.get("type_vocab_size", 1) < 2:
        return config
    return replace(config, second_after=tokenizer.ends_first_of_two)


def stored_prompts(folder: Path) -> dict[str, str]:
    if not (folder / SETTINGS).is_file():
        return {}
    prompts = read_object(folder / SETTINGS, "cannot read the prompts").get("prompts")
    return {name: str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}
