"""Entries of a list or key that name a thing with its settings, as {name: length, max: 512}."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from fsdp_trainer.config.check import as_text, convert, wrong_type, wrong_with
from fsdp_trainer.config.names import nearest


def wrong_part(part: str, value: Any, known: Mapping[str, Field | None], what: str) -> str | None:
    """Return the error message for one setting of an entry; None if it is valid.

    known: fields of all settings, None for one without a type. what: the thing that has them.
    """
    if part not in known:
        close = nearest(part, known)
        meant = f". Did you mean  {close} ?" if close else "."
        has = f"It has: {' '.join(known)}" if known else "It has none"
        return f"{part}: {as_text(value)}  is no {what}{meant}\n{has}"
    about = known[part]
    if about is None:
        return None
    try:
        converted = convert(value, about.type)
    except (ValueError, OverflowError):
        return f"{part}: {as_text(value)}  {wrong_type(part, value, about)}"
    problem = wrong_with(converted, about)
    return f"{part}: {as_text(value)}  {problem}" if problem else None


def values_for(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the types of the fields of a class. Raises ValueError."""
    types = {about.name: about.type for about in fields(cls)}
    return {part: convert(value, types[part]) for part, value in given.items()}
