"""The repository, the folder of its tests, wherever a test lies, and tables of cases in it."""

from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent


def table(name: str) -> Any:
    """Return the content of a YAML file in the folder of tests."""
    return yaml.safe_load((TESTS / name).read_text())
