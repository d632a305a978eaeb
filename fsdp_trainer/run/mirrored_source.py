"""Runs that a verb reads at the address of their mirror: copied before it begins."""

import re
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsdp_trainer.base.folders import short_name, user_cache
from fsdp_trainer.checkpoint.bucket import RECORDS, Bucket, Torn
from fsdp_trainer.config.data_files import is_url, place
from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.config.verbs import (
    ChatConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    VerifyConfig,
)
from fsdp_trainer.data.files.remote_files import shown
from fsdp_trainer.errors import UserError
from fsdp_trainer.run.mirrored import MIRROR_LOCK, opened
from fsdp_trainer.run.run_lock import lock_folder

READERS = (ChatConfig, EvaluateConfig, ExportConfig, GenerateConfig, VerifyConfig)
"""Configurations of verbs that read a run or a checkpoint."""
ADDRESS = re.compile(r"([^:/]+://[^/]*(?:/.+?)??)/([^/]+?)(?:/checkpoints(?:/(step-\d+))?)?/*")
LONGEST_FETCH = 86_400.0
"""Seconds that a process waits for another one that fetches the same run."""
SECONDS = 10
"""Between two lines that say how much has arrived."""


def with_local_source(cfg: Any) -> Any:
    """Return a verb's configuration with a local copy in place of an address as `source`.

    Raises UserError if there is no run at the address, and RunFailed if it cannot be reached.
    """
    if isinstance(cfg, READERS) and cfg.source and is_url(cfg.source):
        return replace(cfg, source=local_copy(cfg, cfg.source))
    return cfg


def local_copy(cfg: Any, url: str) -> str:
    """Return the folder of a copy of a checkpoint, beside copies of its run's records."""
    match = ADDRESS.fullmatch(url)
    if not match:
        reason = "is no run in a mirror, such as  s3://bucket/runs/NAME  , or checkpoint of one"
        raise UserError("there is nothing to read", f"source={shown(url)}", reason)
    root, name, step = match.groups()
    parts = [urlsplit(url).scheme, *place(f"{root}/{name}").split("/")]
    run = user_cache().joinpath("mirrors", *(short_name(part) for part in parts if part.strip(".")))
    try:
        lock = lock_folder(run, MIRROR_LOCK, LONGEST_FETCH)
    except OSError as error:
        reason = f"cannot be kept in {run}: {error}.\nUse another folder:  XDG_CACHE_HOME=FOLDER"
        raise UserError("there is no copy", f"source={shown(url)}", reason) from None
    with lock, opened(root, name, "source") as bucket:
        for file in (path for pattern in RECORDS for path in run.glob(pattern)):
            file.unlink()
        bucket.get_records(run)
        try:
            return str(fetched(bucket, run, step))
        except Torn as error:
            failure = UserError("the checkpoint is damaged", bucket.address, str(error))
            failure.exit_code = 3 if isinstance(cfg, VerifyConfig) else failure.exit_code
            raise failure from None


def fetched(bucket: Bucket, run: Path, step: str | None) -> Path:
    """Return the copy of a checkpoint in `run`, verified as it arrived; None: of the newest whole.

    Raises Torn, and UserError if there is no such checkpoint.
    """
    whole = [name for name, files in bucket.checkpoints().items() if MANIFEST in files]
    name = step or (whole or [""])[-1]
    if name not in whole:
        what = f"there is no {step}; there are:  {'  '.join(whole)}" if whole else "there is none"
        raise UserError(
            "there is no checkpoint", bucket.address, f"{what}, or its upload has not ended"
        )
    copy, calls = run / "checkpoints" / name, count(1)

    def tell(line: str) -> None:
        if next(calls) % SECONDS == 0:
            print(line, file=sys.stderr, flush=True)

    if not bucket.has(copy):
        print(f"mirror  fetching {bucket.address}/checkpoints/{name}", file=sys.stderr, flush=True)
        bucket.fetch(name, run, tell)
        print(f"mirror  its copy is  {copy}", file=sys.stderr, flush=True)
    return copy
