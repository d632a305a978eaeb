"""A terminal for rich: tables and colour. Imported only by verbs that show something."""

from typing import Any

from rich.console import Console


class Terminal(Console):
    """Prints text as it is, and leaves BrokenPipeError to cli.main: rich would exit with code 1."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise
