"""The meaning of names that do not exist here: other trainers' names, then misspellings."""

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from fsdp_trainer.config.yaml_text import table_beside

SAME_NODE = 0.75  # least similarity at which a key of the same node is suggested
ANYWHERE = 0.82  # and one of another node: `tensor_parallel` and `tensorboard` have 0.69
SURE = 0.85  # from this similarity on, it is a typing mistake


class KnownName(NamedTuple):
    """The meaning of a name: a key, a group or a complete override (`meant`), else a sentence.

    missing: True if the sentence is about a part that this version lacks or sets up in another way.
    by_hand: True if what the name sets is to be set anew here, or the run is another one.
    """

    meant: str = ""
    sentence: str = ""
    missing: bool = False
    by_hand: bool = False


class ForeignNames(NamedTuple):
    """The names of other trainers. patterns: names with a `*`, in the order of the file."""

    exact: dict[str, KnownName]
    patterns: list[tuple[str, KnownName]]
    entries: dict[str, str]
    """Parts of an entry of data.path, by their other names."""
    values: dict[str, str]
    """Values of keys that have choices."""
    options: dict[str, dict[str, str]]
    """Options, by group."""


@cache
def table() -> ForeignNames:
    """Return the names in names.yaml, which is read only when needed: after a mistake."""
    tree = table_beside(__file__, "names.yaml")
    exact: dict[str, KnownName] = {}
    patterns: list[tuple[str, KnownName]] = []
    for names, answer in _entries(tree):
        for name in names.split():
            if "*" in name:
                patterns.append((name, answer))
            else:
                exact[name] = answer
    options = {group: _by_name(names) for group, names in tree["options"].items()}
    return ForeignNames(
        exact, patterns, _by_name(tree["entries"]), _by_name(tree["values"]), options
    )


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {name: ours for ours, theirs in names.items() for name in theirs.split()}


def _entries(tree: dict[str, Any]) -> Iterator[tuple[str, KnownName]]:
    for kind in ("keys", "overrides"):
        for meant, names in tree[kind].items():
            yield names, KnownName(meant=meant)
    for entry in tree["instead"]:
        by_hand = entry.get("by_hand", False)
        yield entry["names"], KnownName(sentence=entry["say"], by_hand=by_hand)
    for entry in tree["missing"].values():
        yield entry["names"], KnownName(sentence=entry["say"], missing=True)


def known_elsewhere(name: str) -> KnownName | None:
    """Return the meaning of another trainer's name; None if no trainer has it."""
    return _by_path(_parts(name)) or _by_section_or_leaf(_parts(name))


def absent(name: str) -> str:
    """Return the sentence about a feature that this version lacks; "" for any other name."""
    answer = known_elsewhere(name) if name.isidentifier() else None
    return answer.sentence if answer and answer.missing else ""


def _parts(name: str) -> list[str]:
    return name.lower().replace("-", "_").replace("/", ".").split(".")


def _by_path(parts: list[str]) -> KnownName | None:
    exact = table().exact
    return exact.get(".".join(parts)) or exact.get("_".join(parts))


def _by_section_or_leaf(parts: list[str]) -> KnownName | None:
    sections = [(p, answer) for p, answer in table().patterns if "." in p]
    plain = [(p, answer) for p, answer in table().patterns if "." not in p]
    return (
        _first_match([".".join(parts)], sections)
        or table().exact.get(parts[-1])
        or _first_match([parts[-1], "_".join(parts)], plain)
    )


def _first_match(names: list[str], patterns: list[tuple[str, KnownName]]) -> KnownName | None:
    for pattern, answer in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            return answer
    return None


TWINS = {"form": "format", "format": "form"}
"""Last parts of keys that are taken for each other."""
SWITCHED_OFF = ("disabled", "none", "ignore", "never")


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of `names`, if its similarity is at least `cutoff`."""
    return next(iter(get_close_matches(name.lower(), list(names), 1, cutoff)), None)


def choice_meant(value: Any, choices: Collection[Any]) -> Any:
    """Return the choice of a key that was probably meant by `value`, or None.

    The value may be another program's name, a boolean such as on or off, or misspelt.
    """
    off = [choice for choice in SWITCHED_OFF if choice in choices]
    text = str(value).lower()
    if (synonym := table().values.get(text)) in choices:
        return synonym
    if off and text in ("true", "false", "on", "off", "yes", "no"):
        on = next(choice for choice in choices if choice not in off)
        return off[0] if text in ("false", "off", "no") else on
    return nearest(text, map(str, choices)) if isinstance(value, str) else None


def synonyms_of(key: str) -> list[str]:
    names = table().exact.items()
    return [name for name, answer in names if answer.meant.split("=")[0] == key and "." not in name]


def meant_by(key: str, keys: Collection[str], groups: Collection[str]) -> KnownName | None:
    """Return what was meant by `key`, another trainer's name or a misspelling; None if unknown."""
    for answer in _candidates(key, keys, groups):
        target = answer.meant.split("=")[0]
        if answer.sentence or target in keys or target in groups:
            return answer
    return None


def _candidates(key: str, keys: Collection[str], groups: Collection[str]) -> Iterator[KnownName]:
    """Yield possible meanings of `key`, the likeliest first. They may not exist for this verb."""
    parts = _parts(key)
    leaf = parts[-1]
    own_node = [k for k in keys if parts[:-1] and k.startswith(parts[0] + ".")]
    siblings = {k.split(".")[-1]: k for k in own_node}
    leaves = {k.split(".")[-1]: k for k in keys} | {group: group for group in groups}
    same_leaf = [k for k in keys if k.split(".")[-1] == leaf]

    def spelt(names: Iterable[str], cutoff: float) -> str:
        return nearest(leaf, names, cutoff) or ""

    def key_of(name: str, where: dict[str, str]) -> KnownName:
        return KnownName(meant=where.get(name, ""))

    yield _before_part(key, same_leaf)
    yield _by_path(parts) or KnownName()
    yield key_of(spelt(siblings, SURE), siblings)
    yield _by_section_or_leaf(parts) or KnownName()
    yield key_of(spelt(siblings, SAME_NODE), siblings)
    if same_leaf:
        yield KnownName(meant=nearest(key, same_leaf) or same_leaf[0])
    yield key_of(TWINS.get(leaf, ""), leaves)
    slip = spelt([*table().exact, *leaves], SURE)
    yield table().exact.get(slip, KnownName())
    yield key_of(slip, leaves)
    yield key_of(spelt(leaves, ANYWHERE), leaves)
    yield KnownName(meant=nearest(key, keys, ANYWHERE) or "")


def _before_part(key: str, same_leaf: list[str]) -> KnownName:
    known = known_elsewhere(key) or KnownName()
    is_meant = known.missing and same_leaf and "." not in key
    return KnownName(meant=same_leaf[0] if is_meant else "")
