"""A certificate as a page, and as the record in the folder of its run."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2

from fsdp_trainer.apps.prove.certificate_text import amount
from fsdp_trainer.apps.prove.proof.certificate import Certificate
from fsdp_trainer.base.recorded import flat, recorded
from fsdp_trainer.config.paths import CERTIFICATE, run_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import ProveConfig
from fsdp_trainer.errors import UserError


def write_page(certificate: Certificate, title: str, file: Path) -> None:
    """Write the page to a file. Raises UserError if that fails."""
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    text = page.get_template("certificate.html.jinja").render(
        title=title, certificate=certificate, amount=amount
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(file, str(error)) from None


def cannot_write(file: Path, reason: str) -> UserError:
    return UserError("the page cannot be written", f"html={file}", reason)


def keep_in_run(certificate: Certificate, cfg: ProveConfig) -> Path:
    """Write a certificate and the keys of its run into the run's folder; return the file.

    `report` shows it, and which keys the run had otherwise. Raises OSError.
    """
    folder = run_folder(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    tree = recorded(cfg)
    keys: dict[str, Any] = {f.name: tree[f.name] for f in fields(TrainConfig)}
    content = certificate.as_json() | {"about": certificate.about, "keys": dict(flat(keys))}
    file = folder / CERTIFICATE
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return file
