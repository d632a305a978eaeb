"""The documented keys of the configuration, as fields of dataclasses."""

from dataclasses import MISSING, field
from typing import Any


def key(
    default: Any,
    text: str,
    *,
    choices: tuple = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    used_by: tuple[str, ...] = (),
    part: str | None = None,
) -> Any:
    """Return the dataclass field of a documented key.

    `minimum` and `maximum` are inclusive, `above` is not. For a list, bounds and choices hold for
    each element. used_by: the options of the key's group, such as methods of training, that the key
    counts for; empty: all of them. part: the kind of parts of the user's own that the key takes
    beside its choices (config/parts/own_parts.py).
    """
    metadata = {
        "text": text,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "used_by": used_by,
        "part": part,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(f: Any) -> Any:
    return f.default if f.default is not MISSING else f.default_factory()
