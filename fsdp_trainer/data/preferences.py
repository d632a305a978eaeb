"""Preference pairs: a better and a worse answer to one prompt, read and checked."""

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.conversations import Reader, make_reader, with_system
from fsdp_trainer.data.messages import Message, tools_of, turns_or_text
from fsdp_trainer.data.row_formats import find_format
from fsdp_trainer.data.sources import Problems, Row, RowError, Source, find_sources
from fsdp_trainer.data.units import read_rows

TURN = re.compile(
    r"\n\n(Human|Assistant): ?"
)  # as in Anthropic's hh-rlhf, one text for a whole conversation


@dataclass
class Preference:
    """One prompt and two answers to it, each one or more turns that end with the assistant's."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict] | None
    where: tuple[str, int]


def read_preference(row: Row, reader: Reader) -> Preference:
    """Return the pair of a row.

    RowError if a side is missing, both are equal, they answer different prompts, or one does not
    end with the assistant's turn.
    """
    values = reader.values(row)
    names = {meaning: meaning for meaning in values} | reader.columns_of(row)
    chosen, rejected = (_side(values[name], names[name]) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowError("chosen and rejected are the same")
    shared = len(
        list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    )
    prompt = turns_or_text(values["prompt"], "user", names["prompt"]) if values["prompt"] else []
    if prompt and values["input"]:
        prompt[-1]["content"] += f"\n{values['input']}"
    if prompt and chosen[0]["role"] != "assistant" and prompt[-1] not in chosen[:shared]:
        raise RowError("chosen and rejected do not both begin with the row's own prompt")
    if not prompt and not shared:
        raise RowError(
            "chosen and rejected share no prompt. Name its column:  'data.fields={prompt: …,"
            " chosen: …, rejected: …}'"
        )
    prompt = with_system(
        (prompt if chosen[0]["role"] == "assistant" else []) + chosen[:shared],
        values,
        names["system"],
    )
    for name, side in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        if not side or side[-1]["role"] != "assistant":
            raise RowError(
                f"{name} does not end with a turn of the assistant"
                if side
                else f"{name} is the beginning of the other"
            )
        if side[0]["role"] == "user":
            raise RowError(
                f"{name} begins with a user's turn that is not in the other: both are to"
                " answer one prompt"
            )
    return Preference(
        prompt,
        chosen[shared:],
        rejected[shared:],
        tools_of(values["tools"], names["tools"]),
        row.where,
    )


def _side(value: object, name: str) -> list[Message]:
    if isinstance(value, str) and (pieces := TURN.split(value))[0] == "" and len(pieces) > 1:
        roles = {"Human": "user", "Assistant": "assistant"}
        turns = [
            {"role": roles[role], "content": text}
            for role, text in zip(pieces[1::2], pieces[2::2], strict=True)
        ]
    else:
        turns = turns_or_text(value, "assistant", name)
    if not (turns[-1]["content"].strip() or turns[-1].get("tool_calls")):
        raise RowError(f"{name} is empty")
    return turns


def preference_summary(data: Data, cache: Path, rows: int) -> list[str]:
    """The preview of preference pairs, the first `rows` of them in full; empty without any.

    Raises UserError if they are broken.
    """
    files = [
        (source, file)
        for source in find_sources(data.path, "data.path", cache)
        for file in source.files
    ]
    if not _holds_pairs(data, *files[0]):
        return []
    lines, shown, problems, pairs, characters = [], [], Problems(data.on_error), 0, [0, 0]
    for source, file in files:
        reader, of_file = None, 0
        for row in read_rows(file):
            try:
                if row.error:
                    raise RowError(row.error)
                fields = source.fields or data.fields
                reader = reader or make_reader(row.columns, "preference", fields, file, pairs=True)
                pair = read_preference(row, reader)
            except RowError as error:
                problems.add(row.where, str(error))
                if problems.is_enough:
                    break
                continue
            of_file, pairs = of_file + 1, pairs + 1
            characters = [
                n + sum(len(t["content"]) for t in side)
                for n, side in zip(characters, (pair.chosen, pair.rejected), strict=True)
            ]
            shown += _shown(pair) if pairs <= rows else []
        problems.raise_if_failing()
        lines.append(f"{file}: {of_file:,} pairs, {reader or 'of no known format'}")
        if reader and reader.unused:
            lines.append(f"{file}: columns not used: {', '.join(reader.unused)}")
    if problems.count:
        lines += [
            f"skipped {problems.count:,} rows that cannot be read:",
            *(f"    {p.what}  {p.why.splitlines()[0]}" for p in problems.first),
        ]
    if pairs:  # a model that learns from pairs easily learns to be long
        chosen, rejected = (n / pairs for n in characters)
        lines.append(
            f"{pairs:,} preference pairs; chosen answers have {chosen:,.0f} characters on"
            f" average, rejected ones {rejected:,.0f}"
        )
    return [*lines, "note: `train` does not learn from pairs yet", *shown]


def _holds_pairs(data: Data, source: Source, file: str) -> bool:
    if (source.format or data.format) != "auto":
        return (source.format or data.format) == "preference"
    columns = next((row.columns for row in read_rows(file) if not row.error), {})
    fields = {meaning: str(name) for meaning, name in (source.fields or data.fields or {}).items()}
    format, _ = find_format(columns, fields) or ("text", {})
    return format == "preference"


def _shown(pair: Preference) -> list[str]:
    sides = (("prompt", pair.prompt), ("chosen", pair.chosen), ("rejected", pair.rejected))
    lines = [
        f"{name:9} {turn['role']}: {turn['content']}" for name, turns in sides for turn in turns
    ]
    printable = [line.encode("utf-8", "backslashreplace").decode() for line in lines]
    return ["", f"{pair.where[0]}:{pair.where[1]}", *printable]
