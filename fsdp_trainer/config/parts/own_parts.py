"""Parts by kind and name: the program's, and the user's own.

Those are FILE.py:NAME, registered from Python, or an installed package's. A key with `part=KIND`
takes them beside its own choices. Imports no torch.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fsdp_trainer.base.own_code import import_file, names_in, place_of
from fsdp_trainer.errors import UserError

GROUP = "fsdp_trainer.parts"
"""Group of entry points by which installed packages offer parts, each named KIND.NAME."""
KINDS: dict[str, dict[str, Any]] = {
    kind: {}
    for kind in (
        *("callback", "metric", "objective", "reward", "tracker"),
        *("optimizer", "schedule", "format", "form", "environment"),
        *("token_file", "token_form", "template", "family", "activation", "verb"),
    )
}
"""Registered parts by kind and name."""
FAMILY = "family"
"""The kind whose names stand in folders of models, so that none is in a file."""
BUILT_IN: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("built_in.json").read_text(encoding="utf-8")
)
"""The program's own parts that are classes or functions: by kind and name, their MODULE:NAME.

The readers of head_format are of methods whose head gives a text numbers; data.format does not name
them. In JSON, since the watchdog imports this with the standard library alone.
"""


def built_in(kind: str) -> dict[str, Any]:
    """Return the program's own parts of a kind by name. They are imported now."""
    return {name: code_at(place) for name, place in BUILT_IN[kind].items()}


def part_named(kind: str, name: str, wanted: Any = Callable) -> Any:
    """Return a part of the program, or one of the user's own as `usable_part` does."""
    place = BUILT_IN[kind].get(name)
    return code_at(place) if place else usable_part(kind, name, wanted)


def own_part(kind: str, name: str) -> Any:
    """Return the part that `why_no_part` has no problem with. Raises what its code raises."""
    file, _, attribute = name.rpartition(":")
    if file:
        return getattr(import_file(Path(file)), attribute)
    return KINDS[kind].get(name) or _loaded(kind, name)


@cache
def _loaded(kind: str, name: str) -> Any:
    return offered(kind)[name].load()


def usable_part(kind: str, name: str, wanted: Any = Callable) -> Any:
    """Return an own part. Raises UserError if it is not of the wanted type, or its code fails."""
    try:
        part = own_part(kind, name)
    except Exception as error:
        reason = f"{error.__class__.__name__}: {error}{place_of(error)}"
        raise UserError(f"your own {kind} cannot be used", name, reason) from error
    if not isinstance(part, wanted):
        raise UserError(f"your own {kind} cannot be used", name, f"is no {wanted.__name__}")
    return part


def why_no_part(kind: str, name: str) -> str | None:
    """Return an error message if no code is named so; None if there is some. Runs none of it.

    name: a registered name, FILE.py:NAME, or NAME of an entry point KIND.NAME.
    """
    file, _, attribute = name.rpartition(":")
    if not file:
        known = own_names(kind)
        if name in known:
            return None
        there = f"There are: {' '.join(known)}" if known else "None is registered or installed"
        return f"there is no {kind} {name}. {there}.\nOne in a file is  FILE.py:NAME"
    if kind == FAMILY:
        return "a family's name stands in folders of models: register it, or let a package offer it"
    if not Path(file).is_file():
        return f"{file} is no file"
    try:
        names = names_in(Path(file))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file} cannot be read: {error}"
    own = f"{file} has no {attribute}. It has: {' '.join(names) or 'nothing'}"
    return None if attribute in names else own


def own_names(kind: str) -> list[str]:
    return [*KINDS[kind], *offered(kind)]


def offered(kind: str) -> dict[str, EntryPoint]:
    parts = [part for part in _installed(tuple(sys.path)) if part.name.startswith(f"{kind}.")]
    return {part.name.removeprefix(f"{kind}."): part for part in parts}


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the parts of installed packages. path: where Python looks for them."""
    return tuple(entry_points(group=GROUP))


def identity_of(kind: str, name: str) -> Any:
    """Return what changes with the code of an own part; for a part of this program its name."""
    file = name.rpartition(":")[0]
    if file:
        return [name.removeprefix(file), hashlib.blake2b(Path(file).read_bytes()).hexdigest()]
    part = offered(kind).get(name)
    return [name, part.dist.version] if part and part.dist else name


def code_at(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function at MODULE:NAME, which is imported now; a function unchanged."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    part: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return part
