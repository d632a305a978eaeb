"""The repository, the folder of its tests, wherever a test lies, and tables and rows in it."""

from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent


def copy_rows(path, name="", count=None):
    """Write the first rows of a file in inputs/rows, by default that of this name; return path."""
    rows = (TESTS / "inputs/rows" / (name or path.name)).read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:count]))
    return path


def table(name):
    """Return the content of a YAML file in the folder of tests."""
    return yaml.safe_load((TESTS / name).read_text())
