"""Reading of text files with a value a line."""

from pathlib import Path


def text_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, without their ends.

    `str.splitlines` also ends a line at U+2028 and others, which JSON's strings may hold.
    """
    with path.open(encoding="utf-8") as file:
        return [line.removesuffix("\n") for line in file]
