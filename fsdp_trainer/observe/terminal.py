"""Output of tables and colour through rich. Imported only by verbs that print some."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from fsdp_trainer.base.safe_text import safe, visible

WIDTH_OF_A_FILE = 120
"""Columns of output that no terminal shows, such as a pipe's; rich takes 80 and folds overrides."""


DATA = Style(meta={"data": True})
"""Style of a text that is shown whole, also its addresses: what a model sees."""


class Terminal(Console):
    """A rich console that prints text unchanged, but for control characters and secrets.

    It leaves BrokenPipeError to cli.main; rich would exit with code 1.
    """

    def __init__(self, **options: Any):
        if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
            options.setdefault("width", WIDTH_OF_A_FILE)
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise

    def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
        """Yield the pieces of what is printed; those of our own colours are apart from texts."""
        for piece in super().render(*arguments, **options):
            is_data = piece.style is not None and piece.style.meta.get("data")
            shown = visible(piece.text) if is_data else safe(piece.text)
            yield piece if piece.control else Segment(shown, piece.style)
