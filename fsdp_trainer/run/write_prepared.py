"""Prepared data as token files of other tools, for `prepare out=`."""

from collections.abc import Iterator

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.checkpoint.atomic_files import complete_folder
from fsdp_trainer.config.data_files import TOKEN_FORMS
from fsdp_trainer.config.new_folder import new_folder
from fsdp_trainer.config.parts.own_parts import part_named
from fsdp_trainer.config.verbs import PrepareConfig
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.store.tokenize_tasks import TRAIN
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, RunFailed, UserError

PART = "token_form"


def require_form(cfg: PrepareConfig) -> None:
    """Raise UserError unless `out` and `form` are both given or neither, and `out` is new."""
    if bool(cfg.out) != bool(cfg.form):
        forms = "  ".join(f"form={form}" for form in TOKEN_FORMS)
        given, missing = (
            (f"out={cfg.out}", forms) if cfg.out else (f"form={cfg.form}", "out=FOLDER")
        )
        raise UserError("token files have a folder and a format", given, f"needs  {missing}")
    if cfg.out and cfg.prepare.shard:
        reason = f"needs the whole data; prepare it without  prepare.shard={cfg.prepare.shard}"
        raise UserError("the configuration cannot be used", f"out={cfg.out}", reason)
    if cfg.out:
        new_folder(cfg.out)


def write_prepared(
    prepared: Prepared, tokenizer: TextTokenizer, form: str, given: str
) -> list[str]:
    """Write all documents into a folder; return a line for each part. Raises UserError.

    given: the folder, which appears once it is complete.
    """
    parts = dict(zip(prepared.names, prepared.train, strict=True))
    if len(parts) == 1:
        parts = {TRAIN: prepared.train[0]}
    parts |= {"val": prepared.validation} if prepared.validation else {}
    _require_plain_tokens(parts, tokenizer, form, given)
    out, lines = new_folder(given), []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with complete_folder(out) as partial:
            for name, store in parts.items():
                writer = part_named(PART, form)(
                    partial, name, tokenizer.vocab_size, tokenizer.eos_id
                )
                writer.write(_documents(store))
                lines.append(
                    f"{counted(len(store), 'document')} of {name}, {store.token_count:,} tokens"
                )
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error}. Use  out=FOLDER") from None
    return [*lines, f"in {out}"]


def _documents(store: TokenStore) -> Iterator[np.ndarray]:
    for sample in range(len(store)):
        yield store.read(sample)[0]


def _require_plain_tokens(
    parts: dict[str, TokenStore], tokenizer: TextTokenizer, form: str, given: str
) -> None:
    """Raise UserError for data that files of nothing but tokens cannot hold."""
    problems = []
    masked = sum(
        int(np.count_nonzero(np.asarray(store.supervised) < np.asarray(store.lengths) - 1))
        for store in parts.values()
    )
    if masked:
        reason = (
            f"{counted(masked, 'sample')} with tokens that are not learnt, and such files cannot"
            " say which.\nTo learn all of them:  data.loss_on=all"
        )
        problems.append(Problem(f"out={given}", reason))
    if form == "nanogpt" and tokenizer.vocab_size > 1 << 16:
        others = "  ".join(f"form={other}" for other in TOKEN_FORMS if other != form)
        reason = (
            f"two bytes do not hold the tokenizer's {tokenizer.vocab_size:,} tokens.\nUse  {others}"
        )
        problems.append(Problem(f"form={form}", reason))
    if problems:
        raise UserError("the data cannot be written as token files", problems)
