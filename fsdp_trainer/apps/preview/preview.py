"""The command `preview`: statistics, faults and first rows of a data set as the model sees it."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_trainer.apps.preview import preview_html
from fsdp_trainer.apps.preview.environment_tools import hidden_tools
from fsdp_trainer.apps.preview.preview_images import ShownImages
from fsdp_trainer.apps.preview.preview_page import Page, ShownDocument, ShownRow, TextPiece
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import CONTROL
from fsdp_trainer.config.paths import is_hub_id
from fsdp_trainer.config.verbs import PreviewConfig
from fsdp_trainer.data.data_statistics import (
    all_findings,
    amounts,
    figures_by_source,
    left_out,
    warning_lines,
)
from fsdp_trainer.data.media.media import SampleMedium
from fsdp_trainer.data.order.mixture import OFTEN, REPEATED, Mixture, OrderMaker
from fsdp_trainer.data.order.row_order import RowData
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.prepared_data import build_data, new_rows, other_size
from fsdp_trainer.data.records.labelled_texts import LABELLED, NO_SCORE, TAGGED
from fsdp_trainer.data.records.preference_records import SIDES
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.store.findings import Finding
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.stream.row_stream import StreamedData, StreamedRow
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.samples import MISMATCHED
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.labels import FEW, counts_by_name, in_words
from fsdp_trainer.models.from_config.resolve import resolve_model, resolve_with_tokenizer
from fsdp_trainer.observe.console import Console
from fsdp_trainer.training.setup.run_length import RunLength

Placed = tuple[TokenStore, int]
"""A store and the number of a sample in it."""
LONGEST_CHARACTER = 4  # tokens, one per byte of UTF-8


def preview(cfg: PreviewConfig) -> int:
    """Print `preview.rows` rows in the order of training; return the exit code."""
    html = cfg.preview.html
    if html and not Path(html).expanduser().parent.is_dir():
        reason = "there is no such folder"
        raise UserError("the preview cannot be written", f"preview.html={html}", reason)
    console = Console(quiet=False, stream=sys.stderr)
    tokenizer, template, prepared = build_data(cfg, Reporter(console.paced(), console.say))
    rows = prepared.streamed or order_of(cfg, prepared)
    others = vocabulary(cfg, tokenizer)
    if isinstance(rows, Mixture):
        others += method_findings(cfg, prepared, rows)
        others += length_of(cfg, rows).findings()
        others += hidden_tools(cfg.objective, prepared.train, template)
    if cfg.preview.format == "json":
        for line in warning_lines(prepared, cfg.batch.seq_len, others):
            console.say(f"data   {line}")
        _print_json(cfg, rows)
        if not html:
            return 0
    if isinstance(rows, Mixture):
        page = build_page(cfg, tokenizer, template, prepared, rows, others)
    else:
        page = build_stream_page(cfg, tokenizer, prepared, rows, others)
    if html:  # before the text, whose reader may close the pipe
        preview_html.write(page, Path(html).expanduser())
        print(f"written to {html}", file=sys.stderr)
    if cfg.preview.format == "text":
        from fsdp_trainer.apps.preview.preview_text import show  # slow: imports rich

        show(page)
    return 0


def order_of(cfg: PreviewConfig, prepared: Prepared) -> Mixture:
    """Return the rows of training, in order.

    Each holds one document if the model would mix several.
    """
    named = cfg.model.init_from
    packs = not named or is_hub_id(named) or resolve_model(cfg.model).packs
    return OrderMaker.of(cfg, packs=packs).training(cfg.data, prepared)


def length_of(cfg: PreviewConfig, order: Mixture) -> RunLength:
    return RunLength(cfg.train, cfg.batch, cfg.optim, cfg.schedule, order.rows_per_epoch)


def _print_json(cfg: PreviewConfig, order: StreamedData | Mixture) -> None:
    """Print the first rows as JSON, one object per line."""
    rows: Iterable[RowData | StreamedRow]
    if isinstance(order, StreamedData):
        rows = order.first_rows(cfg.preview.rows)
    else:
        rows = map(order.read, range(cfg.preview.rows))
    for index, row in enumerate(rows):
        print(json.dumps(as_json(index, row)))


def as_json(index: int, row: RowData | StreamedRow) -> dict:
    """Return the row without padding; with `weights` if a supervised position's differs from 1."""
    n = sum(row.documents)
    labels, weights = row.labels[:n], row.weights[:n]
    shown = {
        "row": index,
        "tokens": row.tokens[:n].tolist(),
        "labels": labels.tolist(),
        "documents": row.documents,
    }
    return shown if np.all(weights[labels != -100] == 1) else shown | {"weights": weights.tolist()}


def build_page(
    cfg: PreviewConfig,
    tokenizer: TextTokenizer,
    template: Template,
    prepared: Prepared,
    order: Mixture,
    others: Sequence[Finding],
) -> Page:
    """Gather the content of the preview. others: findings that are not about the samples."""
    lengths = np.concatenate([store.lengths for store in prepared.train])
    store, pieces = prepared.train[0], TokenTexts(tokenizer)
    known = [*others, *all_findings(prepared, order.seq_len)]
    shown_images = ShownImages.of(cfg.model.init_from, prepared.train)
    has_prompts = store.questions is not None
    has_context = amounts(prepared.train)[2] < lengths.sum() - len(lengths)
    is_read = not has_prompts and store.labels is None
    if "generation %}" not in template.source and has_context and is_read:
        known.append(Finding(*NO_MARKERS, is_warning=False))
    rows = range(min(cfg.preview.rows, order.rows_per_epoch))
    are_tagged = cfg.objective.method.reads == TAGGED

    def texts_of(samples: Sequence[Placed]) -> "TokenTexts | MarkedTexts | TaggedTexts":
        marked: TokenTexts | MarkedTexts = pieces
        if shown_images is not None:
            media = [store.media(one) for store, one in samples]
            marked = MarkedTexts(pieces, shown_images, media)
        return TaggedTexts(marked, samples) if are_tagged else marked

    return Page(
        str(cfg.run.name),
        [*prepared.report, *prepared.unused],
        template,
        [
            shown_row(
                index,
                order.read(index),
                [title_of(store, sample) for store, sample in order.samples_of(index)],
                order.source_names,
                order.seq_len,
                texts_of(order.samples_of(index)),
                [
                    None if are_tagged else reference_of(store, sample)
                    for store, sample in order.samples_of(index)
                ],
            )
            for index in rows
        ],
        ShownDocument(
            title_of(store, 0),
            store.source_names[store.sources[0]],
            texts_of([(store, 0)]).of(*store.read(0, 0, order.seq_len)),
        ),
        figures(cfg, prepared, order),
        [(name, int(np.percentile(lengths, share))) for name, share in QUANTILES],
        histogram(lengths),
        sources(cfg, prepared, order),
        sorted(known, key=lambda finding: not finding.is_warning),
    )


def title_of(store: TokenStore, sample: int) -> str:
    """Return FILE:LINE of a sample, with its kind, side or number if its line has several."""
    if store.kinds is not None:
        names = KIND_NAMES if store.labels is None else TEXT_NAMES
        return f"{store.where(sample)} ({names[store.kinds[sample]]})"
    if store.group_starts is not None:
        return f"{store.where(sample)} ({SIDES[not store.group_starts[sample]]})"
    number, count = store.number_in_line(sample)
    return store.where(sample) + (f" (sample {number} of {count})" if count > 1 else "")


def reference_of(store: TokenStore, sample: int) -> str | None:
    """Return a line on a prompt's reference answer or a text's label; None without either.

    Control characters are made visible.
    """
    if store.labels is not None:
        label = store.labels.text(sample)
        return None if label == NO_SCORE else CONTROL.sub(_visible, f"label: {label}")
    answer = None if store.questions is None else store.question(sample)["reference"]
    return None if answer is None else CONTROL.sub(_visible, f"reference answer: {answer}")


def build_stream_page(
    cfg: PreviewConfig,
    tokenizer: TextTokenizer,
    prepared: Prepared,
    streamed: StreamedData,
    others: Sequence[Finding],
) -> Page:
    """Gather the content of a stream's preview from its first rows. others: as in `build_page`."""
    pieces, names, seq_len = TokenTexts(tokenizer), streamed.source_names, streamed.seq_len
    return Page(
        str(cfg.run.name),
        [*prepared.report, *prepared.unused],
        streamed.options.template,
        [
            shown_row(i, row, row.places, names, seq_len, pieces)
            for i, row in enumerate(streamed.first_rows(cfg.preview.rows))
        ],
        lengths=[(name, int(np.percentile(streamed.lengths, share))) for name, share in QUANTILES],
        histogram=histogram(streamed.lengths),
        findings=sorted(
            [*others, *all_findings(prepared, seq_len)],
            key=lambda finding: not finding.is_warning,
        ),
    )


KIND_NAMES = ("good", "bad", "mismatched")
"""Names of the kinds of samples.py."""
TEXT_NAMES = ("query", "positive", "negative")
"""Names of the kinds of labelled_texts.py."""
QUANTILES = (("shortest", 0), ("median", 50), ("90%", 90), ("99%", 99), ("longest", 100))
NO_MARKERS = (
    "the chat template does not mark what the assistant says by {% generation %}",
    "nothing to do here: the mask is found by rendering. Tools that ask transformers for an"
    " assistant mask need the marks",
)


def figures(cfg: PreviewConfig, prepared: Prepared, order: Mixture) -> list[tuple[str, str]]:
    """Return (name, value) of each statistic in the table."""
    samples, tokens, supervised = amounts(prepared.train)
    length = length_of(cfg, order)
    passes = length.rows / order.rows_per_epoch
    documents = sum(
        share * len(one.epoch(0).samples) / one.rows_per_epoch
        for share, one in zip(order.shares, order.orders, strict=True)
    )
    return [
        ("samples", f"{samples:,}"),
        *pair_figures(prepared.train),
        *([("labels", labels[0])] if (labels := labels_of(cfg, prepared)) else []),
        ("tokens", f"{tokens:,}"),
        ("supervised", f"{supervised:,}, {supervised / tokens:.1%} of them"),
        ("left out", left_out(prepared.train)),
        (
            "rows an epoch",
            f"{order.rows_per_epoch:,} of {order.seq_len:,} tokens, {order.fill:.1%} filled"
            f" ({cfg.data.packing})",
        ),
        ("steps", f"{length.steps:,} of {counted(cfg.batch.rows, 'row')}, {passes:.2f} epochs"),
        ("documents a row", f"{documents:.1f}"),
        *(
            [("validation", counted(len(prepared.validation), "sample"))]
            if prepared.validation
            else []
        ),
    ]


def labels_of(cfg: PreviewConfig, prepared: Prepared) -> tuple[str, str] | None:
    is_labelled = cfg.objective.method.reads in (LABELLED, TAGGED)
    counts = counts_by_name(prepared.train) if is_labelled else {}
    return in_words(counts) if counts else None


def pair_figures(stores: list[TokenStore]) -> list[tuple[str, str]]:
    """Return (name, value) of statistics about preference pairs; empty if there are no pairs."""
    stores = [store for store in stores if store.labels is None]
    unpaired = [store for store in stores if store.kinds is not None]
    paired = [store for store in stores if store.group_starts is not None]
    if unpaired:
        return unpaired_figures(unpaired)
    if not paired:
        return []
    lengths = [np.asarray(store.supervised) for store in paired]
    # models that learn from pairs easily learn to write long answers
    chosen, rejected = (
        np.concatenate([each[place::2] for each in lengths]).mean() for place in range(len(SIDES))
    )
    return [
        ("pairs", f"{sum(store.groups for store in paired):,}"),
        ("answers", f"chosen {chosen:,.1f} tokens on average, rejected {rejected:,.1f}"),
    ]


def unpaired_figures(stores: list[TokenStore]) -> list[tuple[str, str]]:
    """Return (name, value) of statistics about answers labelled good or bad."""
    kinds = np.concatenate([np.asarray(store.kinds) for store in stores])
    lengths = np.concatenate([np.asarray(store.supervised) for store in stores])
    return [
        (
            f"{name} answers",
            f"{np.count_nonzero(kinds == kind):,} of {lengths[kinds == kind].mean():,.1f} tokens on"
            " average",
        )
        for kind, name in enumerate(KIND_NAMES[:MISMATCHED])
        if (kinds == kind).any()
    ]


def sources(cfg: PreviewConfig, prepared: Prepared, order: Mixture) -> list[tuple[str, ...]]:
    """Return a table row for each source, if there are several."""
    parts = [
        (source, n)
        for store, n in zip(prepared.train, epochs(cfg, order), strict=True)
        for source in figures_by_source(store)
    ]
    tokens = sum(source.tokens * n for source, n in parts) or 1
    return [
        (
            s.name,
            f"{s.samples:,}",
            f"{s.tokens:,}",
            f"{s.tokens * n / tokens:.1%}",
            f"{s.supervised / max(1, s.tokens):.1%}",
            f"{n:.2f}",
        )
        for s, n in (parts if len(parts) > 1 else [])
    ]


def epochs(cfg: PreviewConfig, order: Mixture) -> list[float]:
    counts = zip(order.taken(length_of(cfg, order).rows), order.orders, strict=True)
    return [count / one.rows_per_epoch for count, one in counts]


def method_findings(cfg: PreviewConfig, prepared: Prepared, order: Mixture) -> list[Finding]:
    """Return findings about components that a mixture repeats too often, and about the method."""
    repeats = zip(order.components, epochs(cfg, order), strict=True)
    known = [
        Finding(f"{c.name} is seen {n:.1f} times in this run", OFTEN)
        for c, n in repeats
        if n > REPEATED and len(order.components) > 1
    ]
    if labels := labels_of(cfg, prepared):
        few = f"labels with fewer than {FEW} rows or words are hardly learnt: {labels[1]}"
        return [*known, *([Finding(few, "add some, or leave those labels out")] * bool(labels[1]))]
    if cfg.objective.method.compares_answers or not pair_figures(prepared.train):
        return known
    text = "the method does not train on answers that are compared"
    use = "use  objective=dpo  for pairs,  objective=kto  for labelled answers"
    return [*known, Finding(text, use)]


def histogram(lengths: np.ndarray) -> list[tuple[str, int]]:
    """Count samples by length, in ranges with edges 1, 2, 3, 4, 6, 8 … tokens.

    If that gives more than 13 bars, only powers of two are edges.
    """
    edges = sorted({*(2**n for n in range(40)), *(3 * 2**n for n in range(40))})
    low, high = np.searchsorted(edges, [lengths.min(), lengths.max()], side="right")
    edges = edges[low - 1 : high + 1]
    if len(edges) > 14:
        edges = [edge for edge in edges if edge & (edge - 1) == 0 or edge in (edges[0], edges[-1])]
    counts, _ = np.histogram(lengths, edges)
    return [
        (f"{first:,}–{end - 1:,}", int(n))
        for first, end, n in zip(edges, edges[1:], counts, strict=False)
    ]


def vocabulary(cfg: PreviewConfig, tokenizer: TextTokenizer) -> list[Finding]:
    """Compare the vocabularies of model and tokenizer. UserError if the model's is smaller."""
    if cfg.model.init_from and is_hub_id(cfg.model.init_from):
        return []  # not downloaded just for this
    adds, new = bool(cfg.tokenizer.add_tokens), tokenizer.new
    config = resolve_with_tokenizer(cfg.model, tokenizer.vocab_size, adds, len(new))
    notes = [Finding(note) for note in tokenizer.notes]
    if cfg.model.init_from:
        rows = resolve_model(cfg.model).vocab_size
        notes += [Finding(note, is_warning=False) for note in new_rows(tokenizer, rows)]
    return [*notes, *other_size(tokenizer, config.vocab_size)]


def shown_row(
    index: int,
    row: RowData | StreamedRow,
    where: list[str],
    names: list[str],
    seq_len: int,
    pieces: "TokenTexts | MarkedTexts | TaggedTexts",
    references: list[str | None] | None = None,
) -> ShownRow:
    """Return a row for display, document by document.

    where: FILE:LINE of each document. names: names of the sources. references: reference answer of
    each document that is a prompt.
    """
    documents, start = [], 0
    references = references or [None] * len(where)
    about = zip(row.documents, row.sources, where, references, strict=True)
    for length, source, place, reference in about:
        here = slice(start, start + length)
        # a token is supervised if the position before it has a label
        weights = np.concatenate(
            [[0], np.where(row.labels[here] != -100, row.weights[here], 0)[:-1]]
        )
        documents.append(
            ShownDocument(
                place,
                names[source],
                pieces.of(row.tokens[here], weights),
                int(row.labels[here.stop - 1]),
                reference,
            )
        )
        start += length
    return ShownRow(index, documents, seq_len - start)


class TokenTexts:
    """Decodes single tokens to text.

    Decoders depend on neighbouring tokens (for a leading space, or the bytes of one character), so
    each token is decoded after a fixed one.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.special = set(tokenizer.special_tokens.values())
        self.anchor = tokenizer.encode("a")[-1:]
        self.before = len(tokenizer.decode(self.anchor, skip_special=False))
        self.known: dict[tuple[int, ...], str] = {}

    def of(self, tokens: np.ndarray, weights: np.ndarray) -> list[TextPiece]:
        """Return tokens as pieces of text. tokens, weights: [length]."""
        return list(self._cut(tokens.tolist(), weights.tolist()))

    def _cut(self, tokens: list[int], weights: list[float]) -> Iterator[TextPiece]:
        start = 0
        while start < len(tokens):
            alike = 1
            while alike < LONGEST_CHARACTER and weights[start + alike : start + alike + 1] == [
                weights[start]
            ]:
                alike += 1
            n = next(
                (
                    n
                    for n in range(1, alike + 1)
                    if "\ufffd" not in self.text(tokens[start : start + n])
                ),
                1,
            )
            text = self.text(tokens[start : start + n])
            if "\ufffd" in text:
                text = self.tokenizer.backend.id_to_token(tokens[start]) or text
            yield TextPiece(
                text, tokens[start : start + n], weights[start], tokens[start] in self.special
            )
            start += n

    def text(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self.known:
            text = self.tokenizer.decode([*self.anchor, *ids], skip_special=False)[self.before :]
            self.known[key] = CONTROL.sub(_visible, text)
        return self.known[key]


class MarkedTexts:
    """Texts of documents whose media are marked. of_documents: media of each, in order."""

    def __init__(
        self, texts: TokenTexts, shown: ShownImages, of_documents: list[list[SampleMedium]]
    ):
        self.texts, self.shown, self.waiting = texts, shown, iter(of_documents)

    def of(self, tokens: np.ndarray, weights: np.ndarray) -> list[TextPiece]:
        return self.shown.marked(self.texts.of(tokens, weights), next(self.waiting))


class TaggedTexts:
    """Texts of documents whose words or steps have labels. samples: those of the documents."""

    def __init__(self, texts: TokenTexts | MarkedTexts, samples: Sequence[Placed]):
        self.texts, self.waiting = texts, iter(samples)

    def of(self, tokens: np.ndarray, weights: np.ndarray) -> list[TextPiece]:
        store, sample = next(self.waiting)
        assert store.labels is not None
        pieces = self.texts.of(tokens, store.read(sample)[1])
        labels = iter(json.loads(store.labels.text(sample)))
        return [
            replace(one, label=CONTROL.sub(_visible, str(next(labels)))) if one.weight else one
            for one in pieces
        ]


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"
