"""Hooks of mkdocs: what the site needs beyond the pages as GitHub shows them."""

import re
from pathlib import Path

OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)\s]+)\)")
COMMANDS = re.compile(
    r"^```\n(?=(?:#[^\n]*\n)*(?:\w+=\S+ )*(?:fsdp-trainer|torchrun|make|pip|hf|python|export) )",
    re.MULTILINE,
)
"""The beginning of a block of commands that names no language."""
MOVED = {"what-works.html": "reference/support.html"}
"""New address of each page that is gone."""
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>Moved</title>'
    '<meta http-equiv="refresh" content="0; url={0}"><a href="{0}">This page has moved</a>\n'
)


def is_chinese(page) -> bool:
    return ".zh-CN." in page.file.src_uri


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page for the site, which holds the pages alone.

    Links out of docs/ become paths. Blocks of commands are coloured, and wrapped by site.css.
    """
    if is_chinese(page):  # a query that both languages know finds the English page first
        page.meta["search"] = {"boost": 0.1}
    return COMMANDS.sub("```bash\n", OUTSIDE.sub(r"\1 (`\2`)", markdown))


def on_post_page(output: str, page, config) -> str:
    """Return the page with its own language in `<html lang>`, by which browsers choose fonts."""
    if is_chinese(page):
        return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output


def on_post_build(config) -> None:
    """Let old addresses lead to the new ones."""
    for old, new in MOVED.items():
        path = Path(config["site_dir"]) / old
        if not path.exists():
            path.write_text(REDIRECT.format(new))
