"""Prepared data: tokenized into stores, or found there, or streamed."""

from dataclasses import dataclass, field
from pathlib import Path

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.sources import lines_on_folders
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.data.records.preference_records import PAIRS, SINGLE
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.store.token_cache import component_stores, merge_held_out, require_kind
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.store.tokenize_tasks import TRAIN, VALIDATION
from fsdp_trainer.data.stream.row_stream import StreamedData
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError


@dataclass
class Prepared:
    """The prepared data, newly made or from the cache."""

    train: list[TokenStore]
    """One store per component: each entry of a mixture, otherwise all data together."""
    names: list[str]
    """The names of the components."""
    validation: TokenStore | None
    report: list[str]
    """Short lines for people."""
    streamed: StreamedData | None = None
    """The streams that replace `train` with data.streaming."""
    digests: dict[str, str] = field(default_factory=dict)
    """Content hashes of the files of `train`, by path."""
    unused: list[str] = field(default_factory=list)
    """Lines that name the unused columns of each file, and the unread files of each folder."""
    answer: int = 0
    """Tokens of a row that are left for the answer to a prompt; 0 if the samples are no prompts."""

    @property
    def fingerprint(self) -> str:
        """A hash of all samples, including held-out ones."""
        stores = [
            *([self.streamed] if self.streamed else self.train),
            *([self.validation] if self.validation else []),
        ]
        return "-".join(store.fingerprint for store in stores)


def prepare(
    data: Data,
    batch: Batch,
    tokenizer: TextTokenizer,
    template: Template,
    root: Path,
    reporter: Reporter | None = None,
    kind: str | None = None,
    media: MediaReader | None = None,
    answer: int = 0,
) -> Prepared:
    """Tokenize the data into folders of `root`, unless it is already there.

    kind: passed to `make_reader`. media, answer: see TokenizeOptions. Raises UserError if the data
    cannot be used.
    """
    reporter = reporter or Reporter()
    preparing = component_stores(
        data, batch, tokenizer, template, Path(root), reporter, kind, media, answer
    )
    opened = [one.stores() for one in preparing]
    if kind in (SINGLE, PAIRS):
        for one, stores in zip(preparing, opened, strict=True):
            require_kind(one, stores, kind)
    report, validation = [line for one in preparing for line in one.report], None
    unused = [line for one in preparing for line in one.unused]
    unused += [line for path in (data.path, data.validation) for line in lines_on_folders(path)]
    if preparing[-1].component.key == "data.validation":
        validation = opened.pop()[TRAIN]
        preparing.pop()
    elif preparing[0].component.share:
        validation = merge_held_out(preparing, [stores[VALIDATION] for stores in opened], root)
        if not len(validation):
            share = preparing[0].component.share
            count = sum(len(stores[TRAIN]) for stores in opened)
            most = 0.5 if share < 0.5 else (1 + share) / 2
            larger = min(most, max(10 / max(1, count), 3 * share))
            reason = f"is so small a share that none of {count:,} samples is in it"
            use = f"Use a larger one:  data.validation={larger:.2g}"
            what = f"data.validation={share:g}"
            raise UserError("the data cannot be used", what, f"{reason}. {use}")
    return Prepared(
        [stores[TRAIN] for stores in opened],
        [one.component.name for one in preparing],
        validation,
        report,
        digests={file: digest for one in preparing for file, digest in one.digests.items()},
        unused=unused,
        answer=answer,
    )
