"""Hooks of mkdocs: what the site needs beyond the pages as GitHub shows them."""

import re

OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_) -> str:
    """Return the page with links out of docs/ as paths: the site holds the pages alone."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)


def on_post_page(output: str, page, config) -> str:
    """Return the page with its own language in `<html lang>`, by which browsers choose fonts."""
    if ".zh-CN." in page.file.src_uri:
        return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output
