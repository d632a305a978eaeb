"""Reading of texts by a model whose head gives them numbers: classes, scores, or embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.load import load_reader
from fsdp_trainer.checkpoint.sentence_files import SETTINGS
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.media.media import Arrays, MediaReader, joined
from fsdp_trainer.data.records.labelled_texts import LabelledText
from fsdp_trainer.data.records.media import MARK
from fsdp_trainer.data.records.texts_with_media import MarkedText
from fsdp_trainer.data.tokens.shown_media import with_shown_media
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.prompt_media import PromptMedia, reader_of_media
from fsdp_trainer.methods.labels import MULTI, REGRESSION
from fsdp_trainer.models.config import AUTO, ONLY_TEXT, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.documents.read_texts import TextWithMedia, Tokens, numbers_of_texts

Text = str | MarkedText
"""A text, perhaps with media."""
Texts = Text | tuple[Text, Text]
"""A text, or two that are read together."""


UNREADABLE = "a text cannot be read"
Named = tuple[Any, str]
"""A medium as a row or a request names it, and the file in which it does."""


def _files(reader: MediaReader, items: Sequence[Named]) -> list[Any]:
    return [reader.files.opened(*one)[0] for one in items]


def _arrays(reader: MediaReader, items: Sequence[Named]) -> Arrays:
    """Return what the model takes of media. They are read again: those of all texts may be many."""
    opened = [reader.files.opened(*one) for one in items]
    return joined([reader.processor.numbers_of(item, file.name) for file, item in opened])


@dataclass(frozen=True)
class TextReader:
    """A model that reads texts and writes none. Not collective: each process has all weights.

    prompts: texts that stand before those of a kind, by its name. media: reads those of texts; None
    for a model that reads only text.
    """

    model: Decoder
    tokenizer: TextTokenizer
    device: torch.device
    prompts: dict[str, str] = field(default_factory=dict)
    media: MediaReader | None = None

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        implementation: str = AUTO,
    ) -> "TextReader":
        model = load_reader(source, device, dtype, implementation)
        folder = tokenizer_folder(source)
        tokenizer = load_tokenizer(str(folder))
        model.describe_as(with_types(model.config, tokenizer))
        media = reader_of_media(model.config, source)
        return cls(model, tokenizer, torch.device(device), stored_prompts(folder), media)

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def encode(
        self, texts: Sequence[Texts], prompt: str = "", limit: int | None = None
    ) -> list[np.ndarray | TextWithMedia]:
        """Return the tokens of texts as training encodes them. prompt: stands before each.

        limit: tokens of each, at most; None: all. Raises UserError for media that cannot be read.
        """
        read = [self._read(one, prompt) for one in texts]
        tokens = self.tokenizer.encode_published([one.pair for one, _ in read], limit)
        return [self._checked(ids, media) for ids, (_, media) in zip(tokens, read, strict=True)]

    def _checked(self, ids: np.ndarray, media: PromptMedia | None) -> np.ndarray | TextWithMedia:
        """Return the tokens of a text with its media, unless some of theirs are cut off."""
        if media is None or self.media is None:
            return ids
        kept = np.count_nonzero(ids == self.media.processor.token)
        if kept < media.tokens:
            reason = f"has {media.tokens:,} tokens of media, of which only {kept:,} would be read"
            raise UserError(UNREADABLE, f"a text of {len(ids):,} tokens", reason)
        return TextWithMedia(ids, media)

    def _read(self, texts: Texts, prompt: str) -> tuple[LabelledText, PromptMedia | None]:
        """Return texts with the tokens of their media, and those."""
        alone = not isinstance(texts, tuple)
        given = texts if isinstance(texts, tuple) else (texts,)
        marked = [one if isinstance(one, MarkedText) else MarkedText(one) for one in given]
        first, second, *_ = [*(one.text for one in marked), None]
        items = tuple((item, one.file) for one in marked for item in one.media)
        text = LabelledText(f"{prompt if alone else ''}{first}", second, "", media=items)
        what = str(first)[:60].replace(MARK, "…")
        if self.media is None:
            if items:
                raise UserError(UNREADABLE, what, f"holds {READ.name}s, {ONLY_TEXT}")
            return text, None
        reader = self.media
        try:
            shown = with_shown_media(text, reader, self.tokenizer, partial(_files, reader))
        except RecordError as error:
            raise UserError(UNREADABLE, what, str(error)) from None
        count = sum(one.tokens for one in shown.media)
        return shown, PromptMedia(partial(_arrays, reader, items), count) if count else None

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
        self, query: Text, documents: Sequence[Text], limit: int | None = None
    ) -> list[np.ndarray | TextWithMedia]:
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
