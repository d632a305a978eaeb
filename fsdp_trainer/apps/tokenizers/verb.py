"""The verb `tokenizer`: train one on data, save it with a chat template, and measure it."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fsdp_trainer.apps.tokenizers.measure import Measured, measure, table
from fsdp_trainer.apps.tokenizers.texts import Corpus, CorpusPart
from fsdp_trainer.apps.tokenizers.train import (
    AddedTokens,
    added_tokens,
    smallest_vocabulary,
    train_byte_pairs,
    train_sentencepiece,
)
from fsdp_trainer.base.counted import counted
from fsdp_trainer.checkpoint.atomic_files import complete_folder
from fsdp_trainer.config.data_files import entries, is_mixture
from fsdp_trainer.config.verbs import TokenizerConfig
from fsdp_trainer.data.files.sources import Source, find_sources
from fsdp_trainer.data.prepared_data import cache_root
from fsdp_trainer.data.store.cache_folders import removed_if_refused
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.templates.chat_template import BUILT_IN
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.observe.console import Console

USUAL_TEMPLATE = "chatml"
MIB = 1 << 20


def tokenizer(cfg: TokenizerConfig) -> int:
    """Train a tokenizer and print its figures next to others'. Returns the exit code."""
    template = cfg.data.template or USUAL_TEMPLATE
    added = added_tokens(template, cfg.tokenizer.add_tokens)
    others = check(cfg, template, added)
    console = Console(quiet=False, stream=sys.stderr if cfg.format == "json" else None)
    with removed_if_refused(cache_root(cfg.data, cfg.run)):
        corpus = train(cfg, template, added, console)
        measured = compare(cfg, corpus, others)
    if cfg.format == "json":
        text = {"bytes": corpus.bytes, "rows": corpus.rows, "held_out": corpus.held_out.bytes}
        values = [one.as_json() for one in measured]
        print(json.dumps({"out": cfg.out, "text": text, "tokenizers": values}))
        return 0
    if not measured:
        console.say("no row was held out to measure on. Use  data.validation=0.1  or a file")
        return 0
    console.say(f"measured on {corpus.held_out.bytes:,} bytes of text that was held out\n")
    console.say("\n".join(table(measured)))
    return 0


def check(
    cfg: TokenizerConfig, template: str, added: AddedTokens
) -> list[tuple[str, TextTokenizer]]:
    """Return the tokenizers to compare with. Raises UserError with all problems."""
    problems = []
    if template not in BUILT_IN:
        reason = f"a new tokenizer gets one of the built-in templates:  {'  '.join(BUILT_IN)}"
        problems.append(Problem(f"data.template={template}", reason))
    smallest = smallest_vocabulary(cfg.kind, added)
    if cfg.vocab_size < smallest:
        reason = (
            f"is too small: 256 bytes and the {added.count} tokens of {template} and of"
            f" tokenizer.add_tokens leave nothing to learn.\nUse  vocab_size={smallest}  or more"
        )
        problems.append(Problem(f"vocab_size={cfg.vocab_size}", reason))
    out = Path(str(cfg.out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problems.append(Problem(f"out={cfg.out}", "exists; choose another folder or delete it"))
    others = []
    for path in cfg.compare:
        try:
            others.append((path, load_tokenizer(path)))
        except UserError as error:
            problems.append(Problem(f"compare=[{path}]", error.problems[0].reason))
    if problems:
        raise UserError("the tokenizer cannot be trained", problems)
    return others


def train(cfg: TokenizerConfig, template: str, added: AddedTokens, console: Console) -> Corpus:
    """Train the tokenizer and write its folder; return the text that was read.

    Raises UserError for data that cannot be used, and RunFailed if the folder cannot be written.
    """
    share = cfg.data.validation if isinstance(cfg.data.validation, float) else 0.0
    corpus = Corpus(cfg.data, share, cfg.run.seed)
    parts = parts_of(cfg, console)
    pieces = with_progress(corpus, parts, cfg, console)
    began = time.monotonic()
    out = Path(str(cfg.out))
    try:
        with complete_folder(out) as folder:
            if cfg.kind == "bpe":
                trained = train_byte_pairs(pieces, cfg.vocab_size, added)
            else:
                trained = train_sentencepiece(pieces, cfg.vocab_size, added, folder)
            trained.save(folder, BUILT_IN[template])
            # check the files on disk, which later runs load
            load_template(None, load_tokenizer(str(folder)))
    except OSError as error:
        raise RunFailed(f"cannot write the tokenizer {out}: {error}") from None
    if isinstance(cfg.data.validation, str | list):
        corpus.read_held_out(sources_of(cfg, "data.validation", console))
    seconds = time.monotonic() - began
    read = f"{corpus.bytes / MIB:,.1f} MiB of text in {counted(corpus.rows, 'row')}"
    console.say(f"read     {read}, {seconds:.1f} s")
    if corpus.problems.count:
        console.say(f"skipped  {counted(corpus.problems.count, 'row')} that cannot be read")
    if trained.vocab_size < cfg.vocab_size:
        lacking = f"the text gives no more than {trained.vocab_size:,} of {cfg.vocab_size:,} tokens"
        console.say(f"warning: {lacking}: use a smaller  vocab_size  or more text")
    names = ", ".join(added.named.values())
    console.say(f"saved    {out}: {trained.vocab_size:,} tokens, template {template}, {names}")
    return corpus


def with_progress(
    corpus: Corpus, parts: list[CorpusPart], cfg: TokenizerConfig, console: Console
) -> Iterator[str]:
    """Yield the corpus's pieces while reporting the bytes and rows read. Raises UserError."""
    progress = console.paced()
    for piece in corpus.pieces(parts, int(cfg.max_gib * (1 << 30))):
        progress(f"reading  {corpus.bytes / MIB:,.1f} MiB, {corpus.rows:,} rows")
        yield piece
    corpus.problems.raise_if_failing()
    if not corpus.bytes:
        reason = f"there is no text in it: {corpus.rows:,} rows"
        if corpus.held_out.bytes:
            reason = "all of its text is held out: use a smaller  data.validation"
        raise UserError("the tokenizer cannot be trained", f"data.path={cfg.data.path}", reason)
    progress("training")


def parts_of(cfg: TokenizerConfig, console: Console) -> list[CorpusPart]:
    sources = sources_of(cfg, "data.path", console)
    named = entries(cfg.data.path)
    if not is_mixture(cfg.data.path) or len(named) == 1:
        return [CorpusPart(sources, repeat=1.0)]
    return [
        CorpusPart([source], entry.weight, 1.0 if entry.repeat is None else entry.repeat)
        for source, entry in zip(sources, named, strict=True)
    ]


def sources_of(cfg: TokenizerConfig, key: str, console: Console) -> list[Source]:
    """Return the sources of a key. Remote files are copied to the cache unless data.streaming."""
    reporter = Reporter(console.paced(), console.say)
    value = cfg.data.path if key == "data.path" else cfg.data.validation
    cache = None if cfg.data.streaming else cache_root(cfg.data, cfg.run)
    return find_sources(value, key, cache, reporter.say, reporter.progress)


def compare(
    cfg: TokenizerConfig, corpus: Corpus, others: list[tuple[str, TextTokenizer]]
) -> list[Measured]:
    """Return the figures of the new tokenizer, then of the others; [] without held-out text."""
    texts = corpus.held_out.texts
    if not texts:
        return []
    new = (str(cfg.out), load_tokenizer(str(cfg.out)))
    return [measure(name, one, texts) for name, one in (new, *others)]
