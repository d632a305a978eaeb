"""The command `prepare`: tokenizes data before training.

The result is in the folder where `train` with the same keys looks for it.
"""

import re
from pathlib import Path

from fsdp_trainer.config.verbs import PrepareConfig
from fsdp_trainer.data.data_statistics import summary_lines
from fsdp_trainer.data.prepared import Prepared, prepare
from fsdp_trainer.data.prepared_data import (
    build_template,
    build_tokenizer,
    cache_root,
    kind_of_data,
    media_and_answer,
)
from fsdp_trainer.data.store.cache_folders import removed_if_refused
from fsdp_trainer.data.store.token_cache import Reporter, component_stores
from fsdp_trainer.errors import UserError
from fsdp_trainer.observe.console import Console
from fsdp_trainer.run.write_prepared import require_form, write_prepared


def tokenize_ahead(cfg: PrepareConfig) -> int:
    shard = parse_shard(cfg.prepare.shard)
    require_form(cfg)
    root = cache_root(cfg.data, cfg.run)
    with removed_if_refused(root):
        return _prepare(cfg, root, shard)


def _prepare(cfg: PrepareConfig, root: Path, shard: tuple[int, int] | None) -> int:
    console = Console(quiet=False)
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.model.init_from)
    data = (
        cfg.data,
        cfg.batch,
        tokenizer,
        build_template(cfg.data, tokenizer),
        root,
        Reporter(console.paced(), console.say),
        kind_of_data(cfg.objective, is_early=True),
        *media_and_answer(cfg.objective, cfg.model, root),
    )
    if shard:
        index, count = shard
        missing = sorted({i for one in component_stores(*data) for i in one.shard(index, count)})
        if missing:
            others = " ".join(f"prepare.shard={i}/{count}" for i in missing)
            console.say(
                f"done: {index}/{count}. The last of these, or train, puts the parts together:"
                f" {others}"
            )
            return 0
    prepared = prepare(*data)
    report(prepared, cfg, console)
    if cfg.out:
        for line in write_prepared(prepared, tokenizer, str(cfg.form), cfg.out):
            console.say(f"wrote  {line}")
    return 0


def report(prepared: Prepared, cfg: PrepareConfig, console: Console) -> None:
    for line in [*prepared.report, *summary_lines(prepared, cfg.batch.seq_len)]:
        console.say(f"data   {line}")
    for store in [*prepared.train, *([prepared.validation] if prepared.validation else [])]:
        console.say(f"in     {store.folder}")


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """Return a shard such as `0/8` as two numbers; None for None. Raises UserError."""
    if shard is None:
        return None
    numbers = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not numbers or not int(numbers[1]) < int(numbers[2]):
        reason = (
            "is not one of the machines, counted from 0, and their number: with eight of them"
            "  prepare.shard=0/8  to  prepare.shard=7/8"
        )
        raise UserError("the configuration cannot be used", f"prepare.shard={shard}", reason)
    return int(numbers[1]), int(numbers[2])
