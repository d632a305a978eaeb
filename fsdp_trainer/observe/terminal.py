"""Output of tables and colour through rich. Imported only by verbs that print some."""

from typing import Any

from rich.console import Console


class Terminal(Console):
    """A rich console that prints text unchanged.

    It leaves BrokenPipeError to cli.main; rich would exit with code 1.
    """

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Re-raise the error."""
        raise
