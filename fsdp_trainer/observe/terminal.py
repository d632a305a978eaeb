"""Output of tables and colour through rich. Imported only by verbs that print some."""

import os
import sys
from typing import Any

from rich.console import Console

WIDTH_OF_A_FILE = 120
"""Columns of output that no terminal shows, such as a pipe's; rich takes 80 and folds overrides."""


class Terminal(Console):
    """A rich console that prints text unchanged.

    It leaves BrokenPipeError to cli.main; rich would exit with code 1.
    """

    def __init__(self, **options: Any):
        if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
            options.setdefault("width", WIDTH_OF_A_FILE)
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Re-raise the error."""
        raise
