"""Preference pairs: a better and a worse answer to one prompt, read and checked."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
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
    turns = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], turns))
    prompt = turns_or_text(values["prompt"], "user", names["prompt"]) if values["prompt"] else []
    if prompt and values["input"]:
        prompt[-1]["content"] += f"\n{values['input']}"
    begins_with_prompt = chosen[0]["role"] != "assistant"
    _require_prompt(prompt, chosen[:shared], begins_with_prompt)
    before = chosen[:shared] if begins_with_prompt else prompt + chosen[:shared]
    for name, side in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        _require_answer(name, side)
    return Preference(
        with_system(before, values, names["system"]),
        chosen[shared:],
        rejected[shared:],
        tools_of(values["tools"], names["tools"]),
        row.where,
    )


def _require_prompt(prompt: list[Message], shared: list[Message], in_sides: bool) -> None:
    """Raise RowError unless both sides answer one prompt. shared: the turns that both have."""
    if prompt and in_sides and prompt[-1] not in shared:
        raise RowError("chosen and rejected do not both begin with the row's own prompt")
    if not prompt and not shared:
        raise RowError(
            "chosen and rejected share no prompt. Name its column:  'data.fields={prompt: …,"
            " chosen: …, rejected: …}'"
        )


def _require_answer(name: str, turns: list[Message]) -> None:
    """Raise RowError unless the turns of one side alone are an answer."""
    if not turns:
        raise RowError(f"{name} is the beginning of the other")
    if turns[-1]["role"] != "assistant":
        raise RowError(f"{name} does not end with a turn of the assistant")
    if turns[0]["role"] == "user":
        raise RowError(
            f"{name} begins with a user's turn that is not in the other: both are to"
            " answer one prompt"
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
    lines, shown, problems = list[str](), list[str](), Problems(data.on_error)
    totals: Counter[str] = Counter()
    for source, file in files:
        pairs, count = PairFile(data, source, file, problems), 0
        for pair in pairs:
            count += 1
            totals["pairs"] += 1
            totals["chosen"] += sum(len(turn["content"]) for turn in pair.chosen)
            totals["rejected"] += sum(len(turn["content"]) for turn in pair.rejected)
            if totals["pairs"] <= rows:
                shown += _shown(pair)
        problems.raise_if_failing()
        lines.append(f"{file}: {count:,} pairs, {pairs.reader or 'of no known format'}")
        if pairs.reader and pairs.reader.unused:
            lines.append(f"{file}: columns not used: {', '.join(pairs.reader.unused)}")
    return [*lines, *_totals_lines(problems, totals), *shown]


def _totals_lines(problems: Problems, totals: Mapping[str, int]) -> list[str]:
    """Return lines on the pairs of all files."""
    lines = []
    if problems.count:
        lines.append(f"skipped {problems.count:,} rows that cannot be read:")
        lines += [f"    {p.what}  {p.why.splitlines()[0]}" for p in problems.first]
    if n := totals["pairs"]:  # a model that learns from pairs easily learns to be long
        lines.append(
            f"{n:,} preference pairs; chosen answers have {totals['chosen'] / n:,.0f} characters on"
            f" average, rejected ones {totals['rejected'] / n:,.0f}"
        )
    return [*lines, "note: `train` does not learn from pairs yet"]


class PairFile:
    """The pairs of a file. problems: gets its bad rows; reader: known when rows are read."""

    def __init__(self, data: Data, source: Source, file: str, problems: Problems):
        self.file, self.problems = file, problems
        self.fields = source.columns(data)[1]
        self.reader: Reader | None = None

    def __iter__(self) -> Iterator[Preference]:
        for row in read_rows(self.file):
            try:
                yield self._pair(row)
            except RowError as error:
                self.problems.add(row.where, str(error))
                if self.problems.is_enough:
                    return

    def _pair(self, row: Row) -> Preference:
        if row.error:
            raise RowError(row.error)
        if self.reader is None:
            columns = row.columns
            self.reader = make_reader(columns, "preference", self.fields, self.file, pairs=True)
        return read_preference(row, self.reader)


def _holds_pairs(data: Data, source: Source, file: str) -> bool:
    format, given = source.columns(data)
    if format != "auto":
        return format == "preference"
    columns = next((row.columns for row in read_rows(file) if not row.error), {})
    fields = {meaning: str(name) for meaning, name in (given or {}).items()}
    detected = find_format(columns, fields)
    return detected is not None and detected[0] == "preference"


def _shown(pair: Preference) -> list[str]:
    sides = (("prompt", pair.prompt), ("chosen", pair.chosen), ("rejected", pair.rejected))
    lines = [
        f"{name:9} {turn['role']}: {turn['content']}" for name, turns in sides for turn in turns
    ]
    printable = [line.encode("utf-8", "backslashreplace").decode() for line in lines]
    return ["", f"{pair.where[0]}:{pair.where[1]}", *printable]
