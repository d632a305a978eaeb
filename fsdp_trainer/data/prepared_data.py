"""Tokenizer, template and prepared data of a configuration."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.paths import model_folder, tokenizer_folder
from fsdp_trainer.config.schema import Data, Model, Run, Tokenizer, TrainConfig
from fsdp_trainer.config.verbs import PrepareConfig, PreviewConfig
from fsdp_trainer.data.data_statistics import left_out, length_for_most, lost_share
from fsdp_trainer.data.files.sources import lines_on_folders
from fsdp_trainer.data.media.kinds import processor_of, reader_of
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.data.prepared import Prepared, prepare
from fsdp_trainer.data.records import preference_records
from fsdp_trainer.data.store.cache_folders import removed_if_refused
from fsdp_trainer.data.store.findings import Finding, MediaWarnings
from fsdp_trainer.data.store.token_cache import Reporter
from fsdp_trainer.data.stream.row_stream import stream_data
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import reads_images


def tokenizer_path(choice: Tokenizer, init_from: str | None) -> str:
    if choice.path:
        return choice.path
    if not init_from:
        reason = (
            "random weights need one: a SentencePiece .model, a tokenizer.json, or a folder with"
            " either.\nTo try the trainer out:  "
        )
        raise UserError(
            "there is no tokenizer", "tokenizer.path=null", reason + "tokenizer.path=demo:bytes"
        )
    return str(tokenizer_folder(fetch(init_from, weights=False)))


def build_tokenizer(choice: Tokenizer, init_from: str | None) -> TextTokenizer:
    return load_tokenizer(tokenizer_path(choice, init_from), choice.add_tokens)


def renumbered(
    choice: Tokenizer, tokenizer: TextTokenizer, named: str | None, init_from: Path | None
) -> list[str]:
    """Return a note if ids mean other tokens in `tokenizer.path` than in the weights' tokenizer.

    named: model.init_from. init_from: its local folder.
    """
    if not choice.path or init_from is None:
        return []
    try:
        known = load_tokenizer(str(tokenizer_folder(init_from))).backend.get_vocab()
    except UserError:  # the weights come without a tokenizer
        return []
    own, given = (
        {id: text for text, id in vocabulary.items()}
        for vocabulary in (known, tokenizer.backend.get_vocab())
    )
    others = sum(own.get(id, text) != text for id, text in given.items())
    reason = (
        f"{others:,} of {len(given):,} ids are other tokens than in {named}, whose"
        " weights know those. Leave  tokenizer.path  out"
    )
    return [reason] if others else []


def new_rows(tokenizer: TextTokenizer, rows: int) -> list[str]:
    id_of = tokenizer.backend.get_vocab()
    texts = [repr(text) for text in tokenizer.new if id_of[text] >= rows]
    some = ", ".join([*texts[:5], *(["…"] if texts[5:] else [])])
    note = f"{counted(len(texts), 'token')} with no row in the model's weights, added there: {some}"
    return [note] if texts else []


PADDING = 0.1, 512
"""The share, and the number, of a model's tokens up to which its vocabulary may be padded."""


def other_size(tokenizer: TextTokenizer, rows: int) -> list[Finding]:
    """Return a finding if a model has more tokens than the tokenizer. rows: number of the model's.

    It warns if they are more than a vocabulary is padded by.
    """
    if rows <= tokenizer.vocab_size:
        return []
    is_other = rows - tokenizer.vocab_size > max(rows * PADDING[0], PADDING[1])
    fix = "as it should be where the model's vocabulary is padded"
    if is_other:
        fix = (
            "the weights learnt their tokens with another one: put the model's tokenizer beside"
            " them, or name it with  tokenizer.path"
        )
    text = f"the model has {rows:,} tokens, the tokenizer {tokenizer.vocab_size:,}"
    return [Finding(text, fix, is_other)]


ROUND_TRIP = "Natalia sold 48 clips to her friends in April,\nand half as many in May (24)."


def lossy(tokenizer: TextTokenizer) -> list[str]:
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP))
    if back.strip() == ROUND_TRIP:
        return []
    return [f"warning: this tokenizer loses text: {ROUND_TRIP!r} comes back as {back.strip()!r}"]


def require_most_tokens(data: Data, prepared: Prepared) -> None:
    """Raise UserError if a larger share of the training tokens is lost than data.max_lost."""
    share = lost_share(prepared)
    if share > data.max_lost:
        text = (
            f"{share:.1%} of the tokens would be lost: {left_out(prepared.train)}.\n"
            f"Use  batch.seq_len={length_for_most(prepared)} , or"
            f"  data.max_lost={math.ceil(share * 100) / 100:g}  to accept it"
        )
        raise UserError(
            "too much of the data would be lost", f"data.max_lost={data.max_lost:g}", text
        )


def build_template(data: Data, tokenizer: TextTokenizer) -> Template:
    return load_template(data.template, tokenizer, data.template_args, data.template_date)


def cache_root(data: Data, run: Run) -> Path:
    return Path(data.cache or Path(run.root) / ".data").expanduser()


def media_reader(model: Model, cache: Path) -> MediaReader | None:
    """Return what reads the media of a model's data; None if the model reads only text.

    cache: folder of data.cache.
    """
    if model.init_from is None:
        return None
    folder = model_folder(fetch(model.init_from, weights=False))
    if not reads_images(folder, model.implementation):
        return None
    return reader_of(processor_of(str(folder)), cache, MediaWarnings())


def build_data(
    cfg: TrainConfig,
    reporter: Reporter | None = None,
    check: Callable[[TextTokenizer], None] | None = None,
) -> tuple[TextTokenizer, Template, Prepared]:
    """Return tokenizer, template and data.

    The data is tokenized or found in `data.cache`; with data.streaming, its first samples are read.
    check: raises UserError for a tokenizer that cannot be used, before any data is tokenized.
    """
    root = cache_root(cfg.data, cfg.run)
    with removed_if_refused(root):
        tokenizer = build_tokenizer(cfg.tokenizer, cfg.model.init_from)
        if check:
            check(tokenizer)
        template = build_template(cfg.data, tokenizer)
        kind = kind_of_data(cfg.objective, isinstance(cfg, PreviewConfig | PrepareConfig))
        common = cfg.batch, tokenizer, template, root, reporter, kind
        if not cfg.data.streaming:
            more = media_and_answer(cfg.objective, cfg.model, root)
            return tokenizer, template, prepare(cfg.data, *common, *more)
        streamed = stream_data(cfg.data, cfg.batch, cfg.run.seed, tokenizer, template)
        report, validation, unused = streamed.report, None, lines_on_folders(cfg.data.path)
        if cfg.data.validation is not None and not isinstance(cfg.data.validation, float):
            data = replace(cfg.data, path=cfg.data.validation, validation=None, streaming=False)
            prepared = prepare(data, *common)
            validation, unused = prepared.train[0], [*unused, *prepared.unused]
            report = [*report, f"validation on {counted(len(validation), 'sample')}"]
        return tokenizer, template, Prepared([], [], validation, report, streamed, unused=unused)


def kind_of_data(choice: ObjectiveChoice, is_early: bool) -> str | None:
    """Return the kind of data that a command reads, one of those in preference_records.py.

    None for any kind. is_early: True for `preview` and `prepare`, which are also used before a
    method is chosen.
    """
    method = choice.method
    is_default = method.reads == preference_records.SINGLE and not method.second
    return None if is_default and is_early else method.reads


def media_and_answer(
    choice: ObjectiveChoice, model: Model, root: Path
) -> tuple[MediaReader | None, int]:
    """Return what reads media, and the tokens of a row that are left for the answer to a prompt.

    root: folder of data.cache.
    """
    prompts = choice.method.samples
    media = None if prompts else media_reader(model, root)
    return media, choice.max_new_tokens if prompts else 0
