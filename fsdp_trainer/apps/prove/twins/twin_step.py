"""A step as the twin of a run reads it: documents, one at a time, with what the data says of each.

Nothing of the trainer's own batches or objectives is used.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.config.schema import ObjectiveChoice, TrainConfig
from fsdp_trainer.data.media.kinds import processor_of
from fsdp_trainer.data.media.media import MediaProcessor, joined
from fsdp_trainer.data.store.token_store import TokenStore

IGNORED = -100


class NoTwin(Exception):
    """No other program computes this. args: what it is; the words with which one would, or how to
    install it; "" if nothing would.
    """


@dataclass(frozen=True)
class TwinDocument:
    """A document of a row: its tokens, what each predicts, and how much that counts.

    kind, starts: as in the data: kind of an answer or a text, and whether it begins a group.
    label: what the data says of the text, or the rollout of an answer. own: weights of its own
    tokens. inputs: what the model reads beside the tokens.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    kind: int = 0
    starts: bool = True
    label: Any = None
    own: Tensor | None = None
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def learnt(self) -> Tensor:
        return self.labels != IGNORED


@dataclass(frozen=True)
class TwinStep:
    """The documents of a step, and the models that read them. second: a teacher or a reference.

    described: config.json of the export. stores: all of the training data.
    """

    cfg: TrainConfig
    model: Any
    second: Any
    documents: list[TwinDocument]
    described: dict[str, Any]
    pooling: str
    stores: list[TokenStore]

    @property
    def choice(self) -> ObjectiveChoice:
        return self.cfg.objective

    def output(self, document: TwinDocument, model: Any = None) -> Any:
        model = model or self.model
        return model(document.tokens[None], **taken(model, {**document.inputs, "use_cache": False}))

    def logits(self, document: TwinDocument, model: Any = None) -> Tensor:
        """Return the logits of a document's learnt targets, [learnt, vocabulary] float32."""
        return self.output(document, model).logits[0, document.learnt].float()

    def log_probabilities(self, document: TwinDocument, model: Any = None) -> Tensor:
        """Return the log-probability of each learnt target, [learnt] float64."""
        logits = self.logits(document, model).double() / self.temperature
        targets = document.labels[document.learnt]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    @property
    def temperature(self) -> float:
        return self.choice.temperature if self.choice.method.samples else 1.0

    def before(self, document: TwinDocument) -> Tensor:
        """Return the reference's log-probability of each learnt target; zeros without one."""
        if self.second is None:
            return torch.zeros(int(document.learnt.sum()), dtype=torch.float64)
        with torch.no_grad():
            return self.log_probabilities(document, self.second)


@dataclass
class TwinData:
    """The documents of a run's steps."""

    evidence: Evidence

    @cached_property
    def processor(self) -> MediaProcessor:
        return processor_of(str(self.evidence.small.plain.model.init_from))

    def of_step(self, step: int) -> list[TwinDocument]:
        """Return those of a step, counted from 1."""
        if self.evidence.small.plain.objective.method.samples:
            return [*of_answers(self.evidence.plain.folder / f"rollouts-{step}.json")]
        return [*self.of_rows(step)]

    def of_rows(self, step: int) -> Iterator[TwinDocument]:
        order, rows = self.evidence.order, self.evidence.rows_of_step(step)
        indices = self.evidence.indices_of_step(step) if order else ()
        stored = (
            [sample for index in indices for sample in order.samples_of(index)] if order else []
        )
        places = iter(stored)
        for row, lengths in enumerate(rows.documents):
            ends = np.cumsum(lengths).tolist()
            for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
                part = slice(end - length, end)
                one = TwinDocument(
                    torch.tensor(rows.tokens[row, part]),
                    torch.tensor(rows.labels[row, part]),
                    torch.tensor(rows.weights[row, part]),
                    rows.kinds[row][number] if rows.kinds else 0,
                    rows.group_starts[row][number],
                )
                place = next(places, None)
                yield self.described(one, *place) if place else one

    def described(self, one: TwinDocument, store: TokenStore, sample: int) -> TwinDocument:
        """Return a document with its label and what the model reads beside it."""
        inputs = self.inputs(one.tokens, store, sample)
        if not store.labels:
            return replace(one, inputs=inputs)
        label, own = json.loads(store.labels.text(sample)), torch.tensor(store.read(sample)[1])
        return replace(one, label=label, own=own, inputs=inputs)

    def inputs(self, tokens: Tensor, store: TokenStore, sample: int) -> dict[str, Any]:
        """Return what a model reads beside a document's tokens: types of texts, and images."""
        config, tokenizer = self.evidence.config, self.evidence.data[0]
        if config.encoder and config.source.get("type_vocab_size", 1) > 1:
            ends = (tokens == tokenizer.ends_first_of_two).long()
            return {"token_type_ids": (ends.cumsum(0) - ends).clamp_max(1)[None]}
        if not store.samples_with_media:
            return {}
        is_image = (tokens == self.processor.token).long()[None]
        media = store.media(sample)
        arrays = joined([self.processor.load(one.file) for one in media]) if media else {}
        own = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return own | {"mm_token_type_ids": is_image, "token_type_ids": is_image}


def taken(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a model has arguments for, or hands on to the one inside it."""
    whole = base_of(model)
    known = dict(inspect.signature(whole.forward).parameters)
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        known |= inspect.signature(whole.base_model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


def base_of(model: Any) -> Any:
    """Return transformers' model, of PEFT's too."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def of_answers(file: Path) -> Iterator[TwinDocument]:
    """Yield the answers that a step of the run was trained on, as its recorder wrote them."""
    for answer in json.loads(file.read_text()):
        before = len(answer["prompt"])
        tokens = torch.tensor([*answer["prompt"], *answer["tokens"]])
        labels = torch.full_like(tokens, IGNORED)
        for start, stop in answer["own_turns"]:
            own = slice(before + start, before + stop)
            labels[before + start - 1 : before + stop - 1] = tokens[own]
        yield TwinDocument(tokens, labels, (labels != IGNORED).float(), label=answer)
