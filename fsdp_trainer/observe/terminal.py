"""What rich prints on: tables and colour for people. Imported only by what shows something."""

from typing import Any

from rich.console import Console


class Terminal(Console):
    """Prints text as it is. A reader that has seen enough, such as `head`, is the front door's matter: rich would end with exit code 1."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise what was raised."""
        raise
