"""Conversations and documents to tokens, each with the weight with which it is learnt.

What is learnt is found by construction: a turn is what the template renders with it and does not render without it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.conversations import Conversation, Document, Message
from fsdp_trainer.data.sources import RowError
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import Encoding, TextTokenizer

Span = tuple[int, int, float]
"""Characters [start, end) of a text and the weight with which their tokens are learnt."""


@dataclass
class Rendered:
    """A text before tokenisation. A document is framed by bos and eos, a conversation has what its template wrote."""

    text: str
    spans: list[Span]
    is_document: bool = False


@dataclass
class Sample:
    """What is stored: `weights[i]` is the weight with which `tokens[i]` is learnt, as a target."""

    tokens: np.ndarray  # [length] int32
    weights: np.ndarray  # [length] float32


class SampleBuilder:
    """Renders and tokenises, and counts what it leaves out."""

    def __init__(self, data: Data, seq_len: int, tokenizer: TextTokenizer, template: Template):
        self.data, self.seq_len, self.tokenizer, self.template = data, seq_len, tokenizer, template
        self.counts: Counter[str] = Counter()
        """How often what happened: sentences for the report, with a place for the number."""
        self._ends = tuple(tokenizer.special_tokens)

    def render(self, row: Conversation | Document) -> list[Rendered]:
        """One text, or one for each assistant turn if the template rewrites earlier turns. RowError if it refuses the conversation."""
        texts = self._document(row) if isinstance(row, Document) else self._conversation(row)
        try:
            for text in texts:
                text.text.encode()
        except UnicodeEncodeError as e:
            raise RowError(f"holds half a character: \\u{ord(e.object[e.start]):04x} without its other half") from None
        return texts

    def _document(self, row: Document) -> list[Rendered]:
        if not row.text.strip():
            return self._left_out("empty documents")
        return [Rendered(row.text, [(0, len(row.text), 1.0)], is_document=True)]

    def _conversation(self, row: Conversation) -> list[Rendered]:
        messages = self.template.adapt(row.messages, row.tools)
        whole = self.template.render(messages, row.tools)
        if self.data.loss_on == "all":
            return [Rendered(whole, [(0, len(whole), 1.0), *self._weighted_turns(messages, row.tools, whole)])]
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [k for k in (turns[-1:] if self.data.loss_on == "last" else turns) if messages[k].get("weight", 1.0) > 0]
        rendered = [self._turn(messages, k, row.tools) for k in learnt]
        if all(whole.startswith(turn.text) for turn in rendered):
            return [Rendered(whole, [span for turn in rendered for span in turn.spans])]
        self.counts["{:,} conversations became one sample per assistant turn: the template rewrites earlier turns"] += 1
        return rendered

    def _turn(self, messages: list[Message], k: int, tools: list[dict] | None) -> Rendered:
        """The conversation up to assistant turn k, as it stands when the model has just written it."""
        full = self.template.render(messages[: k + 1], tools)
        start = self._answer_start(messages, k, tools, full)
        weight = messages[k].get("weight", 1.0)
        # what closes a conversation is no part of the turn, unless nothing else ends it
        for text in (full.removesuffix(self.template.closing), full):
            stripped = text.rstrip()
            if stripped.endswith(self._ends) and len(stripped) >= start:
                return Rendered(full if k == len(messages) - 1 else text, [(start, len(stripped), weight)])
        self.counts["warning: {:,} assistant turns end without a special token: the model does not learn to stop"] += 1
        return Rendered(full, [(start, len(full), weight)])

    def _answer_start(self, messages: list[Message], k: int, tools: list[dict] | None, full: str) -> int:
        """Where the text begins that the model writes: after the generation prompt.

        Some prompts hold what the finished turn does not (an opened <think>, say). Then it begins where two different answers part.
        """
        try:
            prompt = self.template.render(messages[:k], tools, add_generation_prompt=True)
            if full.startswith(prompt):
                return len(prompt)
        except RowError:  # e.g. no turn before it
            pass
        one, other = (self.template.render([*messages[:k], {"role": "assistant", "content": answer}], tools) for answer in ("1", "A"))
        start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if start is None or not full.startswith(one[:start]):
            name = self.template.name
            raise RowError(f"the chat template ({name}) rewrites what comes before turn {k + 1}: what is learnt cannot be told")
        self.counts["warning: {:,} assistant turns do not start with the generation prompt that inference uses (an opened <think>?)"] += 1
        return start

    def _weighted_turns(self, messages: list[Message], tools: list[dict] | None, whole: str) -> list[Span]:
        """Turns with a weight of their own, when everything is learnt."""
        spans = []
        for k in (k for k, message in enumerate(messages) if "weight" in message):
            before, after = (self.template.render(messages[:n], tools).removesuffix(self.template.closing) if n else "" for n in (k, k + 1))
            if not (whole.startswith(after) and after.startswith(before)):
                raise RowError("weights of turns with data.loss_on=all need a template that does not rewrite earlier turns")
            spans.append((len(before), len(after), messages[k]["weight"]))
        return spans

    def tokenize(self, texts: list[Rendered]) -> Iterator[list[Sample]]:
        """For every text its sample, or none where it is left out."""
        for text, encoding in zip(texts, self.tokenizer.encode_batch([text.text for text in texts]), strict=True):
            sample = self._frame(encoding) if text.is_document else Sample(encoding.ids, token_weights(encoding, text))
            yield [kept for piece in self._fit(sample, text.is_document) for kept in self._keep(piece)]

    def _frame(self, encoding: Encoding) -> Sample:
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        ids = encoding.ids
        front = [bos] if bos is not None and ids[:1] != bos else []
        tokens = np.concatenate([front, ids, [eos] if eos is not None else []]).astype(np.int32)
        return Sample(tokens, np.ones(len(tokens), np.float32))

    def _fit(self, sample: Sample, is_document: bool) -> list[Sample]:
        length, seq_len = len(sample.tokens), self.seq_len
        if length <= seq_len:
            return [sample]
        if self.data.too_long == "split" and is_document:
            self.counts[f"{{:,}} documents longer than batch.seq_len={seq_len} were cut into pieces"] += 1
            return [sample]  # the order of rows cuts it
        if self.data.too_long == "truncate":
            self.counts[f"{{:,}} samples longer than batch.seq_len={seq_len} were cut at the end"] += 1
            return [Sample(sample.tokens[:seq_len], sample.weights[:seq_len])]
        kept_by = "data.too_long=split would keep them" if is_document else "data.too_long=truncate would keep their start"
        return self._left_out(f"samples longer than batch.seq_len={seq_len} ({kept_by})")

    def _keep(self, sample: Sample) -> list[Sample]:
        sample.weights[:1] = 0  # nothing comes before the first token to predict it from
        if len(sample.tokens) >= 2 and sample.weights.any():
            return [sample]
        return self._left_out("samples with nothing to learn")

    def _left_out(self, why: str) -> list:
        self.counts["dropped {:,} " + why] += 1
        return []


def token_weights(encoding: Encoding, text: Rendered) -> np.ndarray:
    """[tokens] float32: the weight of the span that holds the token; across an edge, the smaller one of both sides."""
    characters = np.zeros(len(text.text) + 1, np.float32)
    for start, end, weight in text.spans:
        characters[start:end] = weight
    last = np.maximum(encoding.ends - 1, encoding.starts)
    return np.minimum(characters[encoding.starts], characters[last])
