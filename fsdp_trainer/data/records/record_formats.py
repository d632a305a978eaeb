"""Formats of rows: which column of a file has which meaning.

`FORMATS` defines each meaning: the usual names of its columns, and a check of the value in the
first row, so that an unrelated column of the same name is not used. `conversations.py` reads the
values.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fsdp_trainer.config.parts.own_parts import BUILT_IN
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.files.turns_and_rows import CHATS, ROLE_KEYS, ROLES, role_key
from fsdp_trainer.data.records.flags import parsed, whole_numbers
from fsdp_trainer.data.records.row_kinds import ROW_KINDS

TABLE = table_beside(__file__)
LISTS = TABLE["lists"] | {"CHATS": CHATS}
LABELS = LISTS["LABELS"]
"""Columns that say that an answer is good or bad."""
PAIRS = ("PROMPTS", "COMPLETIONS"), ("ASK_ROLES", "REPLY_ROLES")
"""Columns, or keys of a pair of turns, that are named after what they hold, or after roles."""
MEDIA = {"video": "videos", "audio": "sound"}
for _kind in ROW_KINDS.values():
    MEDIA |= _kind.words
"""Column names without a plural s, and what such columns hold."""
VARIANT = re.compile(r"(_?[0-9]+|_[A-Za-z])$")
"""Suffix of a column name that distinguishes one of several answers."""
MEDIA_ENDS = ("_path", "_url", "_file", "_byte")


def column_value(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column's value, or a nested one for a dotted name: conversation.messages."""
    if name in columns or "." not in name:
        return columns.get(name)
    outer, _, inner = name.partition(".")
    value = parsed(columns.get(outer))
    return column_value(value, inner) if isinstance(value, dict) else None


def pair_keys(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of a question and its answer in one object; None if either is missing."""
    for asks, replies in PAIRS:
        ask = next((key for key in LISTS[asks] if key in turn), None)
        reply = next((key for key in LISTS[replies] if key in turn), None)
        if ask and reply:
            return ask, reply
    return None


def only_role_key(turn: Mapping[str, Any]) -> str | None:
    """Return the only key of a turn like {"user": "…"} if it is a known role."""
    key = str(next(iter(turn), ""))
    return key if len(turn) == 1 and key.strip().lower() in ROLES else None


# --- checks of values ---------------------------------------------------------------------------


def is_anything(value: Any) -> bool:
    """Return True for any value, so that the column name alone decides."""
    return True


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_text_or_parts(value: Any) -> bool:
    return isinstance(value, str | dict) or _every(value, (str, dict))


def is_text_or_texts(value: Any) -> bool:
    return isinstance(value, str) or _every(value, (str,))


def turn_list(value: Any) -> Any:
    """Return a list of turns, also from an object of lists: {"from": […], "value": […]}."""
    value = parsed(value)
    if not isinstance(value, dict) or not _every([*value.values()], (list,)):
        return value
    keys, lists = [*value], [*value.values()]
    if not set(keys) & {*ROLE_KEYS} or len({*map(len, lists)}) > 1:
        return value
    return [dict(zip(keys, turn, strict=True)) for turn in zip(*lists, strict=True)]


def is_turns(value: Any) -> bool:
    value = turn_list(value)
    if isinstance(value, dict):
        return _is_turn(value) and not pair_keys(value)
    if not isinstance(value, list) or not value:
        return False
    return all(map(_is_turn, value)) or (len(value) > 1 and _every(value, (str,)))


def is_chat(value: Any) -> bool:
    value = turn_list(value)
    if not _every(value, (dict,)):
        return False
    roles = {ROLES.get(str(turn.get(role_key(turn) or "")).strip().lower()) for turn in value}
    return None not in roles and "assistant" in roles


def is_text_or_turns(value: Any) -> bool:
    return isinstance(value, str) or is_turns(value)


def is_calls(value: Any) -> bool:
    value = parsed(value)
    return bool(_every(value, (dict,))) and all("name" in call for call in value)


def is_answer(value: Any) -> bool:
    return is_text_or_turns(value) or is_calls(value)


def is_list(value: Any) -> bool:
    return isinstance(parsed(value), list)


def is_column(value: Any) -> bool:
    """Return True for a column as pandas writes it: an object with the numbers of its rows."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdigit() for key in value)


def is_tools(value: Any) -> bool:
    return isinstance(parsed(value), list | dict)


def is_numbers(value: Any) -> bool:
    return whole_numbers(value) is not None


def is_label(value: Any) -> bool:
    """Return True for a label that an answer is good or bad: 0 and 1 may also be classes."""
    is_word = isinstance(value, str) and value.strip().lower() in ("true", "false")
    return is_word or isinstance(value, bool)


def is_segments(value: Any) -> bool:
    value = parsed(value)
    return bool(_every(value, (dict,))) and all("text" in s and "label" in s for s in value)


def is_texts(value: Any) -> bool:
    """Return True for a text or a list of them, each of which may be in parts."""
    return isinstance(value, str | dict) or value == [] or _every(value, (str, dict, list))


def _every(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, types) for v in value)


def _is_turn(turn: Any) -> bool:
    if isinstance(turn, list):
        return len(turn) == 2 and _every(turn, (str,))
    turn = parsed(turn)
    return isinstance(turn, dict) and bool(role_key(turn) or pair_keys(turn) or only_role_key(turn))


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meaning:
    """A kind of value that a row may hold. record_formats.yaml says what its fields are."""

    names: tuple[str, ...]
    fits: Callable[[Any], bool] = is_text
    required: bool = False
    certain: tuple[str, ...] | None = None


MEDIA_MEANINGS = {f"{kind.kind}s": kind for kind in ROW_KINDS.values() if kind.columns}
"""The meaning of a column with a row's media of one kind, in any format with turns."""
MEDIA_COLUMNS = {
    meaning: Meaning(kind.columns, is_anything) for meaning, kind in MEDIA_MEANINGS.items()
}


def _meaning(about: dict[str, Any]) -> Meaning:
    about = {"fits": "is_text", **about}
    for key in ("names", "certain"):
        if key in about:
            about[key] = tuple(chain.from_iterable(LISTS.get(n, [n]) for n in about[key]))
    return Meaning(**about | {"fits": globals()[about["fits"]]})


FORMATS: dict[str, dict[str, Meaning]] = {
    name: {key: _meaning(about) for key, about in meanings.items()}
    | (MEDIA_COLUMNS if name in TABLE["with media"] else {})
    for name, meanings in TABLE["formats"].items()
}
"""Meanings of each format; a file's columns are compared with the formats in this order."""
OF_HEADS = tuple(BUILT_IN["head_format"])
"""Formats of methods whose head gives a text numbers, which no other method reads."""
FIELDS = {name: tuple(meanings) for name, meanings in FORMATS.items()}
REQUIRED = {
    name: tuple(key for key, meaning in meanings.items() if meaning.required)
    for name, meanings in FORMATS.items()
}


# --- columns of a row ---------------------------------------------------------------------------


def usual_name(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def columns_by_name(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns by their usual names, and columns of nested objects by dotted names."""
    names: dict[str, str] = {}
    for column, value in columns.items():
        names.setdefault(usual_name(column), column)
        value = parsed(value) if isinstance(value, str) and value[:1] == "{" else value
        for inner in value if isinstance(value, dict) else ():
            names.setdefault(f"{usual_name(column)}.{usual_name(str(inner))}", f"{column}.{inner}")
    return names | {column: column for column in columns}


def match(
    format: str, columns: Mapping[str, Any], fields: Mapping[str, str], by_value: bool = True
) -> dict[str, str]:
    """Return the column of each meaning of the format that the row has.

    fields: columns that are set by the user, not checked. by_value: if True, the values of other
    columns must fit the meaning; if False, the name of a required column is sufficient.
    """
    matched = {key: column for key, column in fields.items() if key in FORMATS[format]}
    names = columns_by_name(columns)
    for key, meaning in FORMATS[format].items():
        if key in matched:
            continue
        for column in _fitting(meaning, columns, names, by_value):
            if not any(_overlap(column, other) for other in matched.values()):
                matched[key] = column
                break
    return matched


def _fitting(
    meaning: Meaning, columns: Mapping[str, Any], names: Mapping[str, str], by_value: bool
) -> Iterator[str]:
    """Yield the columns that may have a meaning, best first. names: see columns_by_name."""
    any_value = meaning.required and not by_value
    candidates = (any_value and meaning.certain) or meaning.names
    for name in _with_inner(candidates, names):
        certain = any_value or (name in (meaning.certain or ()) and not meaning.required)
        value = column_value(columns, names[name])
        if certain or value is None or meaning.fits(value):
            yield names[name]


def is_complete(format: str, matched: Mapping[str, str]) -> bool:
    return all(key in matched for key in REQUIRED[format])


def _with_inner(candidates: tuple[str, ...], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the candidates that exist, then chats that are nested in another column."""
    yield from (name for name in candidates if name in names)
    if candidates and candidates[0] in CHATS:
        yield from (name for name in names if "." in name and name.partition(".")[2] in candidates)


def _overlap(column: str, other: str) -> bool:
    return column == other or column.startswith(f"{other}.") or other.startswith(f"{column}.")


def find_format(
    columns: Mapping[str, Any], fields: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """Return the format of a row and the columns of its meanings; None if no format matches.

    fields: columns that are set by the user. Values decide first, column names alone second.
    """
    for by_value in (True, False):
        for format in (name for name in FORMATS if name not in OF_HEADS):
            chat = only_chat(columns) if format == "text" and not fields else None
            if chat:
                return find_format(columns, {"messages": chat})
            if _can_be(format, columns, fields, by_value):
                format = _by_turns(format, columns, fields)
                return format, match(format, columns, fields, by_value)
    return None


def _can_be(
    format: str, columns: Mapping[str, Any], fields: Mapping[str, str], by_value: bool
) -> bool:
    def has_value(column: str) -> bool:
        return column_value(columns, column) is not None

    if not set(fields) <= set(FORMATS[format]):
        return False
    matched = match(format, columns, fields, by_value)
    if not is_complete(format, matched):
        return False
    if format == "unpaired":
        # many columns are called a label: this one is named by the user, or has a value
        is_label = "label" in fields if fields else has_value(matched["label"])
        if not (by_value and is_label):
            return False
    required = [matched[key] for key in REQUIRED[format] if key not in fields]
    # null fits any format, so that it decides nothing
    return not by_value or not required or any(map(has_value, required))


def _by_turns(format: str, columns: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    if format not in ("messages", "sharegpt") or set(fields) & {"messages", "conversations"}:
        return format
    matched = match(format, columns, fields) or match(format, columns, fields, by_value=False)
    column = next(iter(matched.values()), "")
    turns = turn_list(column_value(columns, column))
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        return "sharegpt" if "from" in turns[0] else "messages"
    return "sharegpt" if usual_name(column) == "conversations" else "messages"


def only_chat(columns: Mapping[str, Any]) -> str | None:
    """Return the only column, of any name, that is a list of turns with known roles.

    None if it may be the prompt of several answers in other columns.
    """
    if _variants([column for column, value in columns.items() if isinstance(value, str)]):
        return None
    chats = [column for column, value in columns.items() if is_chat(value)]
    return chats[0] if len(chats) == 1 else None


def later_columns(
    format: str, columns: Mapping[str, Any], matched: Mapping[str, str], first: frozenset[str]
) -> dict[str, str]:
    """Return `matched` plus columns, found by name alone, that the file's first row lacked.

    first: columns of the first row; their meaning, or lack of one, stays the same.
    """
    names = columns_by_name({c: value for c, value in columns.items() if c not in first})
    later = dict(matched)
    for key, meaning in FORMATS[format].items():
        named = [names[name] for name in meaning.names if name in names]
        if key not in later and named:
            later[key] = named[0]
    return later


def unused_columns(columns: Mapping[str, Any], used: Iterable[str]) -> Iterator[str]:
    """Yield the columns that are not used, with dotted names within objects."""
    used = list(used)
    for column, value in columns.items():
        if column in used:
            continue
        inner = [name.partition(".")[2] for name in used if name.startswith(f"{column}.")]
        value = parsed(value) if inner else value
        if inner and isinstance(value, dict):
            yield from (f"{column}.{name}" for name in unused_columns(value, inner))
        else:
            yield column


def media_of(columns: Mapping[str, Any]) -> str | None:
    """Return the first media content of a row or turn with its column: pictures ('images')."""
    for column, value in columns.items():
        kind = media_kind(column, value)
        if kind:
            return f"{kind} ({column!r})"
    return None


def media_kind(column: str, value: Any) -> str | None:
    name = usual_name(column).removesuffix("s")
    for end in MEDIA_ENDS:
        name = name.removesuffix(end).removesuffix("s")
    if name in MEDIA:
        return MEDIA[name] if _has_content(value) else None
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict) and isinstance(first.get("bytes"), bytes):
        return "pictures or sound"
    return "sound" if isinstance(first, dict) and "sampling_rate" in first else None


def _has_content(value: Any) -> bool:
    value = parsed(value)
    if isinstance(value, dict):
        return any(map(_has_content, value.values()))
    if isinstance(value, list):
        return any(map(_has_content, value))
    return value is not None and value not in ("", False, 0)


def field_hints(columns: Mapping[str, Any]) -> list[str]:
    """Return suggestions for data.fields if a row's format is unknown, likeliest first."""
    chats = [column for column, value in columns.items() if is_turns(value)]
    texts = [column for column, value in columns.items() if isinstance(value, str)]
    hints = [f"messages: {column}" for column in chats]
    pair = _variants(texts)
    if pair:
        prompt = next((column for column in [*chats, *texts] if column not in pair), None)
        before = f"prompt: {prompt}, " if prompt else ""
        hints.append(f"{before}chosen: {pair[0]}, rejected: {pair[1]}")
    elif len(texts) > 1:
        hints.append(f"prompt: {texts[0]}, completion: {texts[1]}")
    if texts:
        hints.append(f"text: {max(texts, key=lambda column: len(columns[column]))}")
    return hints


def _variants(names: list[str]) -> tuple[str, str] | None:
    """Return two columns that differ only in a final number or letter: answer_a, answer_b."""
    by_stem: dict[str, str] = {}
    for name in names:
        stem = VARIANT.sub("", name)
        if stem != name and stem in by_stem:
            return by_stem[stem], name
        by_stem.setdefault(stem, name)
    return None
