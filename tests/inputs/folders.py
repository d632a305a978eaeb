"""The repository and the folder of its tests, wherever a test lies."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent
