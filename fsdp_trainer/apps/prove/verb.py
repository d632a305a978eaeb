"""The verb `prove`: a certificate that a run, or a folder, computes what it should."""

import json
import os
import sys
from pathlib import Path

from fsdp_trainer.apps.prove.certificate_page import cannot_write, keep_in_run, write_page
from fsdp_trainer.apps.prove.certificate_text import certificate_lines
from fsdp_trainer.apps.prove.proof.certificate import Certificate
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.config.verbs import ProveConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.start import launcher

NOT_EQUAL = 3
OF_FOLDERS = {"source", "reference", "format", "plan.format", "html", "model.trust_remote_code"}
"""The keys that count for a folder."""


def prove(cfg: ProveConfig, words: list[str]) -> int:
    """Print the certificate. Returns 0 if all is equal, else 3. Raises UserError and RunFailed.

    words: of the command line.
    """
    if name := launcher(os.environ):
        reason = "prove starts ranks of its own: type  fsdp-trainer prove …"
        raise UserError("this proof would run once for each rank", name, reason)
    if problems := of_no_use(cfg, words):
        raise UserError("a run is proved, or a folder, and these are of the other", problems)
    page = Path(cfg.html).expanduser() if cfg.html else None
    if page and not page.parent.is_dir():
        raise cannot_write(page, "there is no such folder")
    certificate = certificate_of(cfg, words)
    if page:
        write_page(certificate, cfg.source or str(cfg.run.name), page)
    if "json" in (cfg.format, cfg.plan.format):
        print(json.dumps(certificate.as_json(), allow_nan=False))
    else:
        print(*map(safe, certificate_lines(certificate)), sep="\n")
    return 0 if certificate.ok else NOT_EQUAL


def of_no_use(cfg: ProveConfig, words: list[str]) -> list[Problem]:
    """Return the words of a run beside a folder, or a reference beside a run."""
    if cfg.source:
        keys = {word: word.lstrip("+").partition("=")[0] for word in words if "=" in word}
        own = [word for word, key in keys.items() if key not in OF_FOLDERS]
        return [Problem(word, f"leave it out, or  source={cfg.source}") for word in own]
    reason = "is of a folder: name that first, as  fsdp-trainer prove FOLDER reference=…"
    return [Problem(f"reference={cfg.reference}", reason)] if cfg.reference else []


def certificate_of(cfg: ProveConfig, words: list[str]) -> Certificate:
    # they import torch, which mistakes in the configuration need not wait for
    if cfg.source:
        from fsdp_trainer.apps.prove.folder_certificate import prove_folder

        return prove_folder(cfg, words)
    from fsdp_trainer.apps.prove.run_certificate import prove_run

    certificate = prove_run(cfg, words)
    try:
        print(f"kept in {keep_in_run(certificate, cfg)}", file=sys.stderr)
    except OSError as error:
        print(f"not kept in the run's folder: {error}", file=sys.stderr)
    return certificate
