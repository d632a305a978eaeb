"""A preview as a single HTML file, which needs no network and no other program.

The data is untrusted text: it is escaped, and scripts in it cannot run.
"""

from pathlib import Path

import jinja2

from fsdp_trainer.apps.preview.preview_page import SOURCE_COLUMNS, Page, TextPiece
from fsdp_trainer.base.checksum import policy_hash
from fsdp_trainer.errors import UserError

HERE = Path(__file__).parent


def write(page: Page, file: Path) -> None:
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    style, script = (loader.get_source(environment, f"preview.{kind}")[0] for kind in ("css", "js"))
    html = environment.get_template("preview.html.jinja").render(
        page=page,
        columns=SOURCE_COLUMNS,
        style=style,
        script=script,
        hashes=[policy_hash(style), policy_hash(script)],
        classes=_classes,
    )
    try:
        file.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            "the preview cannot be written", f"preview.html={file}", str(error)
        ) from None


def _classes(piece: TextPiece) -> str:
    return " ".join(
        name for name, holds in (("s", piece.special), ("w", piece.weight not in (0, 1))) if holds
    )
