"""Rows to conversations and documents, for many names of columns."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.own_code import place_of
from fsdp_trainer.config.parts.own_parts import built_in, usable_part
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.files.tables import label_names
from fsdp_trainer.data.files.turns_and_rows import is_turn, role_key
from fsdp_trainer.data.records.flags import flag_of, is_missing, mask_of, shown_value, whole_numbers
from fsdp_trainer.data.records.labelled_texts import (
    LabelledTexts,
    TaggedText,
    named_labels,
)
from fsdp_trainer.data.records.media import media_in
from fsdp_trainer.data.records.messages import (
    LISTS,
    Message,
    read_turns,
    text_of,
    tools_of,
    turns_or_text,
)
from fsdp_trainer.data.records.preference_records import (
    PAIRS,
    SINGLE,
    UNPAIRED,
    LabelledAnswer,
    Preference,
)
from fsdp_trainer.data.records.record_formats import (
    FIELDS,
    FORMATS,
    LABELS,
    MEDIA_MEANINGS,
    OF_HEADS,
    REQUIRED,
    column_value,
    columns_by_name,
    field_hints,
    find_format,
    is_calls,
    is_column,
    is_complete,
    is_label,
    later_columns,
    match,
    media_of,
    parsed,
    unused_columns,
)
from fsdp_trainer.data.records.record_values import Values
from fsdp_trainer.data.records.recorded_calls import tool_call
from fsdp_trainer.data.records.unread_columns import (
    CLASS_COLUMN,
    NO_VERDICTS,
    UNREAD_COLUMN,
    bad_verdicts,
    classes,
    is_suspect,
    is_worse,
    require_no_verdict,
    unread_masks,
)
from fsdp_trainer.data.token_files.known_token_files import ROW_COLUMN
from fsdp_trainer.data.token_files.token_file import MappedTokens
from fsdp_trainer.errors import UserError

UNSUPERVISED = -100  # label of unsupervised tokens, as in torch's losses
FORMS_REMEMBERED = 1000  # limit on different sets of columns in one file


@dataclass
class Conversation:
    """A chat as a list of turns.

    A turn has `role` (system, user, assistant, tool) and `content`, and optionally
    `reasoning_content`, `tool_calls` and `weight`; one with weight 0 is not supervised. Its `text`
    replaces tool calls for a template that does not support them.
    """

    messages: list[Message]
    tools: list[dict] | None
    where: tuple[str, int]


@dataclass
class Document:
    """Plain text, supervised from the first token to the last."""

    text: str
    where: tuple[str, int]


@dataclass
class Pretokenized:
    """Tokens that are trained on unchanged, and which of them are supervised."""

    tokens: list[int] | np.ndarray
    learnt: list[bool] | np.ndarray
    where: tuple[str, int]
    begin: int | None = None
    """The byte of the file at which the tokens lie just so, to be read from there."""


@dataclass
class Segments:
    """Texts that are tokenized separately and then joined, and which of them are supervised."""

    texts: list[str]
    learnt: list[bool]
    where: tuple[str, int]


Readable = (
    Conversation
    | Document
    | Pretokenized
    | Segments
    | Preference
    | LabelledAnswer
    | LabelledTexts
    | TaggedText
)


def turns_of(readable: Readable) -> list[Message]:
    if isinstance(readable, Conversation):
        return readable.messages
    if isinstance(readable, Preference):
        return [*readable.prompt, *readable.chosen, *readable.rejected]
    if isinstance(readable, LabelledAnswer):
        return [*readable.prompt, *readable.answer]
    return []


def has_media(readable: Readable) -> bool:
    if isinstance(readable, LabelledTexts):
        return any(text.media for text in readable.texts)
    own = readable.media if isinstance(readable, TaggedText) else media_in(turns_of(readable))
    return any(True for _ in own)


def _nothing(key: str, where: tuple[str, int]) -> None:
    """Note nothing."""


@dataclass
class Reader:
    format: str
    columns: dict[str, str]
    """The column of each meaning, e.g. {"prompt": "question", "completion": "answer"}."""
    first: frozenset[str] = frozenset()
    """The columns of the first row."""
    text_only: bool = True
    """True if pictures and sound in unused columns are ignored instead of refused."""
    with_media: bool = False
    """True if the model reads media; otherwise a row with one is refused."""
    form: str = ""
    """A note for people on how its rows are read; may be empty."""
    has_fields: bool = False
    """True if the user said which columns mean what."""
    label_names: dict[str, list[str]] = field(default_factory=dict)
    """Names of the numbers in columns of labels, for heads."""
    convert: Callable[[Json], Json] | None = None
    """The user's own data.format: returns the columns of a row in a format that is known here."""
    learns: bool = True
    """False if the answers of the rows are not learnt, so that masks and labels do not matter."""
    unused: dict[str, None] = field(default_factory=dict)
    """Columns of the rows read so far that have no meaning, in order."""
    note: Callable[[str, tuple[str, int]], Any] = _nothing
    """Called with a key of `findings.KINDS`, and the place, for what a row says and is not used."""
    suspects: dict[str, None] = field(default_factory=dict)
    """Those of them that are named as masks, weights or labels."""
    _by_columns: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        renamed = [
            f"{column} → {meaning}" for meaning, column in self.columns.items() if column != meaning
        ]
        about = [*renamed, *([self.form] if self.form else [])]
        return self.format + (f" ({', '.join(about)})" if about else "")

    def again(self) -> "Reader":
        """Return a new reader for other rows of the same file."""
        return replace(self, unused={}, suspects={}, _by_columns={})

    def columns_of(self, row: Record) -> dict[str, str]:
        """Return the column of each meaning in this row, cached for rows with equal columns."""
        key = tuple(row.columns)
        if key not in self._by_columns:
            if len(self._by_columns) >= FORMS_REMEMBERED:
                self._by_columns.clear()
            used = later_columns(self.format, row.columns, self.columns, self.first)
            used = used if self.with_media else without_media(used)
            self._by_columns[key] = used
            unused = dict.fromkeys(unused_columns(row.columns, used.values()))
            self.unused |= unused
            self.suspects |= {name: None for name in unused if is_suspect(name)}
        return self._by_columns[key]

    def known(self, row: Record) -> Record:
        """Return the row as the user's own data.format converts it. RecordError if that fails."""
        return replace(row, columns=own_columns(self.convert, row.columns)) if self.convert else row

    def values(self, row: Record) -> Json:
        """Return the row's values by meaning. RecordError if a required one is missing or null."""
        used = self.columns_of(row)
        if not self.text_only:
            others = {name: row.columns[name] for name in row.columns if name in self.unused}
            media = media_of(others)
            if media:
                raise RecordError(f"holds {media}, and only text is read.\n{self._text_alone()}")
        values = {
            meaning: _present(column_value(row.columns, used[meaning])) if meaning in used else None
            for meaning in FORMATS[self.format]
        }
        values |= {
            meaning: named_labels(values[meaning], self.label_names[column])
            for meaning, column in used.items()
            if column in self.label_names
        }
        for meaning in REQUIRED[self.format]:
            if values[meaning] is None:
                column = used.get(meaning, meaning)
                raise RecordError(
                    f"{column!r} is null"
                    if column in row.columns
                    else f"has no {column!r}; its columns: {' '.join(row.columns) or 'none'}"
                )
        _refuse_lists([values[meaning] for meaning in PARALLEL if values.get(meaning) is not None])
        return values

    def read(self, row: Record) -> Readable:
        """Return the row's content. RecordError if a column is missing or has the wrong type."""
        values = self.values(row)
        readable = READERS[self.format](Values(values, self.columns_of(row), row.where))
        if self.suspects and self.learns:
            self._check_unread(row, readable)
        if not self.with_media and has_media(readable):
            raise RecordError(ONLY_TEXT)
        return readable

    def _check_unread(self, row: Record, readable: Readable) -> None:
        """Note columns that look like masks, weights or labels by which not all is learnt alike.

        Raises RecordError where data.fields does not say which columns are read.
        """
        columns = {name: column_value(row.columns, name) for name in self.suspects}
        learnt = None
        if isinstance(readable, Pretokenized):
            learnt = [bool(one) for one in readable.learnt]
        names = [*unread_masks(columns, learnt)]
        if names and not self.has_fields and self.format != "text":
            shown = str(columns[names[0]])[:60]
            raise RecordError(f"{names[0]!r} is {shown}, {self._not_read(names[0])}")
        if not self.text_only and self.format not in NO_VERDICTS:
            require_no_verdict(columns, UNPAIRED_REFUSED)
            names += bad_verdicts(columns)
            for name in classes(columns):
                self.note(CLASS_COLUMN + name, row.where)
        for name in names:
            self.note(UNREAD_COLUMN + name, row.where)
        if self.format == "preference" and is_worse(columns):
            self.note("worse_chosen", row.where)

    def _not_read(self, name: str) -> str:
        if self.format == "tokens":
            return (
                "which looks like a mask, and is not read.\nTo learn where it is 1:  "
                f"'data.fields={{{self._fields()}, loss_mask: {name}}}'  ; to leave it out:  "
                f"'data.fields={{{self._fields()}}}'"
            )
        return (
            "which may say what is not learnt, and is not read.\nWrite it into the turns, as"
            " train (false: not learnt), masked or weight, or leave it out:  "
            f"'data.fields={{{self._fields()}}}'"
        )

    def _fields(self) -> str:
        return ", ".join(f"{key}: {self.columns.get(key, key)}" for key in REQUIRED[self.format])

    def _text_alone(self) -> str:
        return (
            "Leave such rows out with  data.on_error=skip  , or have their text read alone with"
            f"  'data.fields={{{self._fields()}}}'"
        )


def _present(value: Any) -> Any:
    """Return a value; None for NaN, which pandas writes where there is none."""
    return None if isinstance(value, float) and value != value else value


def _refuse_lists(parts: list[Any]) -> None:
    """Raise RecordError for prompts and answers that are lists, of a row that holds columns."""
    lists = [[*part.values()] if is_column(part) else part for part in parts]
    are_texts = all(isinstance(part, list) and {*map(type, part)} == {str} for part in lists)
    sizes = {len(part) for part in lists} if len(lists) > 1 and are_texts else {0}
    if len(sizes) == 1 and min(sizes) > any(isinstance(part, list) for part in parts):
        raise RecordError(f"holds columns of {sizes.pop()} texts, not a row.\nInto rows:  {LISTS}")


PARALLEL = ("prompt", "instruction", "completion", "output", "chosen")
"""Meanings of a prompt and its answer, each of which may be a list of texts, but not all."""
ONLY_TEXT = """a turn holds an image, but this model or method reads only text. Images are read by a
model with a tower for them, with  model.implementation=transformers  and  data.streaming=false ,
and not by objective=grpo. Leave such rows out with  data.on_error=skip"""
PREFERENCE = """holds preference pairs (%s, %s), but this objective trains on single answers.
To learn from pairs:  objective=dpo  ; from the better answers alone:  'data.fields={%s}'"""

NO_PAIRS = """is read as %s, and this objective compares two answers to one prompt.
Name their columns:  'data.fields={prompt: …, chosen: …, rejected: …}'  or use  objective=sft"""


UNPAIRED_REFUSED = """holds answers labelled good or bad (%s), but this objective ignores
labels.
To learn from both:  objective=kto  ; else keep the rows that are true, or say that the label
means something else with  data.format=…"""

NO_LABELS = """is read as %s, and objective=kto learns from good and bad answers, or pairs.
Name their columns:  'data.fields={prompt: …, completion: …, label: …}'  or use  objective=sft"""


def _require_fields_of(format: str, fields: dict[str, str]) -> None:
    unknown = sorted(set(fields) - set(FORMATS[format]))
    if unknown:
        raise _unusable(
            f"data.fields={{{unknown[0]}: {fields[unknown[0]]}}}",
            f"format {format} has only: {' '.join(FORMATS[format])}",
        )


def own_columns(convert: Callable[[Json], Json], columns: Json) -> Json:
    """Return the columns that the user's own code makes of a row. RecordError if it fails."""
    try:
        return dict(convert(dict(columns)))
    except Exception as error:
        name = type(error).__name__
        raise RecordError(f"cannot be converted: {name}: {error}{place_of(error)}") from None


Make = TypeVar("Make", bound=Callable[..., Reader])


def of_any_format(make: Make) -> Make:
    """Return a function like `make` that also takes the user's own data.format."""

    @wraps(make)
    def reader(columns: Json, format: str | None, *more: Any, **options: Any) -> Reader:
        if format in (None, "auto", *FORMATS):
            return make(columns, format, *more, **options)
        convert = usable_part("format", str(format))
        known = make(own_columns(convert, columns), "auto", *more, **options)
        return replace(known, convert=convert)

    return cast(Make, reader)


@of_any_format
def make_reader(
    columns: Json,
    format: str | None,
    fields: dict[str, str] | None,
    file: str,
    kind: str | None = None,
    with_media: bool = False,
) -> Reader:
    """Return the reader for a file, from the columns of its first row.

    kind: expected kind of data: SINGLE, PAIRS or UNPAIRED (which accepts pairs too); None for any.
    with_media: whether the model reads media.
    Raises UserError if the format cannot be detected or is of another kind.
    """
    fields = {meaning: str(column) for meaning, column in (fields or {}).items()}
    if kind in OF_HEADS:
        return _head_reader(str(kind), str(format), columns, fields, file, with_media)
    format = _or_tokens(str(format), fields, columns, file)
    automatic = format == "auto" and not fields
    if format == "auto":
        if automatic:
            if kind in (SINGLE, PAIRS):
                _refuse_judged(columns, file)
            _refuse_single_turns(columns, file)
        format, matched = _detected(columns, fields, file, kind)
    else:
        _require_fields_of(str(format), fields)
        matched = match(str(format), columns, fields, by_value=False)
    _require_kind(str(format), matched, file, kind)
    matched = matched if with_media else without_media(matched)
    text_only = not automatic or format == "text"
    form = _form(columns, matched) if format in ("messages", "sharegpt", "tokens") else ""
    has_fields = bool(fields)
    return Reader(str(format), matched, frozenset(columns), text_only, with_media, form, has_fields)


def _head_reader(
    format: str,
    named: str,
    columns: Json,
    fields: dict[str, str],
    file: str,
    with_media: bool,
) -> Reader:
    """Return the reader of rows for a head. named: data.format. UserError for other rows.

    Of rows without a text, or without documents, a column of media is that.
    """
    if named != "auto":
        reason = f"this objective reads {format} texts alone.\nUse  data.format=auto"
        raise _unusable(f"data.format={named}", reason)
    _require_fields_of(format, fields)
    by_value = match(format, columns, fields)
    matched = by_value if is_complete(format, by_value) else match(format, columns, fields, False)
    matched = matched if with_media else without_media(matched)
    missing = [key for key in REQUIRED[format] if key not in matched]
    for key in {*missing} & {"text", "positive"} if MEDIA_MEANINGS.keys() & matched.keys() else ():
        matched[key] = matched.pop(next(iter(MEDIA_MEANINGS.keys() & matched.keys())))
        missing.remove(key)
    if missing:
        shown = ", ".join(f"{key}: …" for key in REQUIRED[format])
        reason = f"has no column for {missing[0]}; its columns: {' '.join(columns) or 'none'}"
        raise _unusable(file, f"{reason}\nSay what they mean:  'data.fields={{{shown}}}'")
    return Reader(
        format, matched, frozenset(columns), bool(fields), with_media, has_fields=bool(fields),
        label_names=label_names(file), learns=False,
    )  # fmt: skip


def _detected(
    columns: Json, fields: dict[str, str], file: str, kind: str | None
) -> tuple[str, dict[str, str]]:
    """Return the format of a row, and the columns of its meanings. UserError for an unknown one.

    kind: UNPAIRED if a column that is named as a label is one, whatever its value is.
    """
    detected = find_format(columns, fields)
    label = _label_column(columns)
    if kind == UNPAIRED and label and (not detected or detected[0] not in ("preference", UNPAIRED)):
        detected = find_format(columns, {"label": label} | fields) or detected
    if detected is None:
        raise _unknown_fields(fields) if fields else _unknown_format(columns, file)
    return detected


def _or_tokens(format: str, fields: dict[str, str], columns: Json, file: str) -> str:
    """Return the format, or `tokens` for documents that are already tokenized.

    Raises UserError if a token file is to be read as anything else.
    """
    if not isinstance(columns.get(ROW_COLUMN), MappedTokens):
        if format != "text" or fields:
            return format
        is_text, is_tokens = (
            is_complete(format, match(format, columns, {})) for format in ("text", "tokens")
        )
        return "tokens" if is_tokens and not is_text else "text"
    if format not in ("auto", "text", "tokens"):
        raise _unusable(
            f"data.format={format}", f"{file} holds tokens, no {format}.\nUse  data.format=tokens"
        )
    if any(meaning != column for meaning, column in fields.items()):
        shown = ", ".join(f"{meaning}: {column}" for meaning, column in fields.items())
        raise _unusable(f"data.fields={{{shown}}}", f"{file} holds tokens and has no columns")
    return "tokens"


def without_media(matched: dict[str, str]) -> dict[str, str]:
    return {meaning: column for meaning, column in matched.items() if meaning not in MEDIA_MEANINGS}


def _require_kind(format: str, matched: dict[str, str], file: str, kind: str | None) -> None:
    """Raise UserError if the format cannot be trained on as `kind` requires."""
    if format == "preference" and kind == SINGLE:
        raise _unusable(file, _pairs_refused(matched))
    if format == UNPAIRED and kind in (SINGLE, PAIRS):
        raise _unusable(file, UNPAIRED_REFUSED % matched.get("label", "label"))
    if format != "preference" and kind == PAIRS:
        raise _unusable(file, NO_PAIRS % format)
    if format not in ("preference", UNPAIRED) and kind == UNPAIRED:
        raise _unusable(file, NO_LABELS % format)


def _pairs_refused(matched: dict[str, str]) -> str:
    chosen, rejected = (matched.get(name, name) for name in ("chosen", "rejected"))
    prompt = matched.get("prompt")
    fields = f"prompt: {prompt}, completion: {chosen}" if prompt else f"messages: {chosen}"
    return PREFERENCE % (chosen, rejected, fields)


def _form(columns: Json, matched: dict[str, str]) -> str:
    turns = parsed(column_value(columns, next(iter(matched.values()), "")))
    if isinstance(turns, MappedTokens):
        return turns.form
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return "its texts are the user's and the assistant's by turns"
    return ""


def _label_column(columns: Json) -> str | None:
    names = columns_by_name(columns)
    return next((names[name] for name in LABELS if name in names), None)


def _refuse_judged(columns: Json, file: str) -> None:
    """Raise UserError for answers with a true/false label: not all of them should be trained on."""
    column = _label_column(columns)
    label = columns.get(column or "")
    if not is_label(label):
        return
    format, _ = find_format(columns, {}) or ("text", {})
    if format not in ("text", "tokens"):
        reason = (
            f"has a label of true or false ({str(label).lower()} in its first row): unpaired"
            " preferences, and false ones would be trained on as well.\n"
        )
        raise _unusable(
            file,
            reason + "To learn from both:  objective=kto  ; else keep the rows that are true, or"
            " say that the label means something else with  data.format=…",
        )


def _refuse_single_turns(columns: Json, file: str) -> None:
    """Raise UserError for rows with a single turn each: they would not teach answering."""
    if not is_turn(columns):
        return
    role = str(role_key(columns))
    format, _ = find_format(columns, {}) or ("text", {})
    if format == "text":
        raise _unusable(
            file,
            f"each row is one turn of a conversation ({role!r} is {columns[role]!r}).\n"
            "Put all turns of a conversation into one row, in a column `messages`, or learn each "
            "as a document with  data.format=text",
        )


def _unknown_fields(fields: dict[str, str]) -> UserError:
    known = [
        f"{name}: {' '.join(m if m in REQUIRED[name] else f'({m})' for m in meanings)}"
        for name, meanings in FIELDS.items()
    ]
    shown = ", ".join(f"{meaning}: {column}" for meaning, column in fields.items())
    reason = "no format has these meanings. Each format's own (those in brackets may be left out):"
    return _unusable(f"data.fields={{{shown}}}", "\n".join([reason, *known]))


def _unknown_format(columns: Json, file: str) -> UserError:
    reason = f"no known format has its columns: {' '.join(columns) or 'none'}\n"
    hints = "  or  ".join(f"'data.fields={{{hint}}}'" for hint in field_hints(columns))
    advice = f"Say what they mean:  {hints}" if hints else "None of them holds text or turns"
    return _unusable(file, reason + advice)


def _conversation(values: Values, messages: list[Message]) -> Conversation:
    turns = values.with_media(values.with_system(messages))
    return Conversation(turns, values.tools(), values.where)


def _read_chat(values: Values, meaning: str) -> Conversation:
    return _conversation(values, read_turns(values[meaning], values.name(meaning)))


def _read_answer(values: Values, prompt: str, completion: str) -> Conversation:
    question = turns_or_text(values[prompt], "user", values.name(prompt))
    question = [
        turn | {"weight": 0.0} if turn["role"] == "assistant" else turn for turn in question
    ]
    context = values["input"]
    if context:
        texts = context if isinstance(context, list) else [context]
        lines = [text_of(text, values.name("input")) for text in texts]
        question[-1]["content"] = "\n".join([question[-1]["content"], *lines])
    history = read_turns(values["history"], values.name("history")) if values["history"] else []
    answer = _answer(values, completion)
    if values["reasoning"]:
        answer[0]["reasoning_content"] = values.text("reasoning")
    return _conversation(values, [*history, *question, *answer])


def _answer(values: Values, completion: str) -> list[Message]:
    """Return the turns of the answer; tool calls if it is only calls of the row's tools."""
    value, tools = values[completion], values["tools"]
    calls = parsed(value)
    if tools and isinstance(calls, list) and calls and is_calls(calls):
        described = tools_of(tools, values.name("tools")) or []
        names = {str(tool["function"].get("name")) for tool in described}
        if all(str(call["name"]) in names for call in calls):
            message = {"role": "assistant", "content": "", "tool_calls": [*map(tool_call, calls)]}
            return [message | ({"text": value} if isinstance(value, str) else {})]
    return turns_or_text(value, "assistant", values.name(completion))


def read_document(values: Values) -> Document:
    return Document(values.text("text"), values.where)


def read_tokens(values: Values) -> Pretokenized:
    """Return tokens without padding; those with label -100 or `loss_mask` 0 are not supervised."""
    mapped = values["input_ids"]
    if isinstance(mapped, MappedTokens):
        learnt = np.ones(len(mapped.tokens), np.bool_)
        return Pretokenized(mapped.tokens, learnt, values.where, mapped.begin)
    lists = _token_lists(values)
    tokens = lists["input_ids"] or []
    size = len(tokens)
    labels = lists["labels"] or tokens
    _require_labels(values, tokens, labels)
    mask = lists["loss_mask"] or [1] * size
    attended = lists["attention_mask"] or [1] * size
    columns = zip(tokens, labels, mask, attended, strict=True)
    real = [
        (token, label != UNSUPERVISED and bool(in_loss))
        for token, label, in_loss, is_attended in columns
        if is_attended
    ]
    return Pretokenized([token for token, _ in real], [used for _, used in real], values.where)


def _token_lists(values: Values) -> dict[str, list | None]:
    """Return the tokens of a row, its labels and its masks. RecordError for unequal lengths."""
    masks = ("loss_mask", "attention_mask")
    lists = {key: (_mask if key in masks else _numbers)(values, key) for key in FORMATS["tokens"]}
    size = len(lists["input_ids"] or ())
    for key, numbers in lists.items():
        if numbers is not None and len(numbers) != size:
            name, ids = values.name(key), values.name("input_ids")
            raise RecordError(f"{name!r} has {counted(len(numbers), 'number')}, {ids!r} has {size}")
    return lists


def _require_labels(values: Values, tokens: list[int], labels: list[int]) -> None:
    """Raise RecordError for a label that is neither its token nor UNSUPERVISED."""
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (token, UNSUPERVISED):
            raise RecordError(
                f"{values.name('labels')!r} has {label} at place {place}, where the token is "
                f"{token}: a label is the token of its own place, or {UNSUPERVISED}"
            )


def _numbers(values: Values, meaning: str) -> list[int] | None:
    if values[meaning] is None:
        return None
    numbers = whole_numbers(values[meaning])
    if numbers is None:
        name = values.name(meaning)
        raise RecordError(
            f"{name!r} should be a list of whole numbers, it is {shown_value(values[meaning])}"
        )
    return numbers


def _mask(values: Values, meaning: str) -> list | None:
    value = values[meaning]
    if is_missing(value):
        return None
    if meaning == "attention_mask" and (numbers := whole_numbers(value)):
        return numbers  # packed rows number their documents
    return mask_of(value, repr(values.name(meaning)))


def read_segments(values: Values) -> Segments:
    """Return axolotl's segments: a list of `text` and `label`, which is true if supervised."""
    segments, name = parsed(values["segments"]), values.name("segments")
    if not isinstance(segments, list) or not segments:
        raise RecordError(
            f"{name!r} should be a list of text and label, it is {shown_value(segments)}"
        )
    learnt = []
    for segment in segments:
        label = segment.get("label") if isinstance(segment, dict) else None
        flag = flag_of(label, f"'label' in {name!r}")
        if flag is None:
            raise RecordError(
                f"{name!r} needs a text and a label of true or false, it holds"
                f" {shown_value(segment)}"
            )
        learnt.append(flag)
    texts = [text_of(segment.get("text"), f"{name}.text") for segment in segments]
    return Segments(texts, learnt, values.where)


read_messages = partial(_read_chat, meaning="messages")
read_sharegpt = partial(_read_chat, meaning="conversations")
read_alpaca = partial(_read_answer, prompt="instruction", completion="output")
read_completion = partial(_read_answer, prompt="prompt", completion="completion")
READERS: dict[str, Callable[[Values], Readable]] = built_in("format") | built_in("head_format")


def _unusable(what: str, reason: str) -> UserError:
    return UserError("the data cannot be used", what, reason)
