"""JSON files that may come from anyone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import UserError

Json = dict[str, Any]
"""An object of JSON, or values by name that are like one, such as a row of data."""
DEEPEST = 100
"""Levels of lists and objects in each other. Python's own limit depends on who calls."""
TOO_DEEP = f"has more than {DEEPEST} lists and objects within each other"


def read_object(path: Path, title: str) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("is not a JSON object")
        if is_deeper(content, DEEPEST):
            raise ValueError(TOO_DEEP)
    except RecursionError:
        raise UserError(title, str(path), TOO_DEEP) from None
    except (OSError, ValueError) as error:
        raise UserError(title, str(path), str(error)) from None
    return content


def is_deeper(content: Any, levels: int) -> bool:
    level = [content]
    for _ in range(levels + 1):
        inner = [each for each in level if isinstance(each, dict | list)]
        if not inner:
            return False
        level = [
            value for each in inner for value in (each.values() if isinstance(each, dict) else each)
        ]
    return True


def strings_in(value: Any) -> Iterator[str]:
    """Yield the texts in JSON, at any depth; keys are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)
