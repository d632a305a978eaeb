"""The pipeline from rows to samples, shared by stored and streamed data."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from fsdp_trainer.config.data_files import kind
from fsdp_trainer.config.parts.own_parts import identity_of, own_names
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.data.records.conversations import Readable, Reader, make_reader
from fsdp_trainer.data.records.preference_records import SINGLE, UNPAIRED
from fsdp_trainer.data.records.record_formats import OF_HEADS
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.token_files.known_token_files import is_token_file
from fsdp_trainer.data.tokens.samples import Rendered, Sample, SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError

T = TypeVar("T")
CAN_BE_CUT = ("text", "tokens")  # formats whose samples may continue in another row


@dataclass
class TokenizeOptions:
    """Everything that decides the tokens of a row, for all units of a component.

    share: fraction of the rows that is held out for validation, chosen by content. kind: passed to
    `make_reader`. media: reads media; None for a model that reads only text. answer: tokens of a
    row that are left for the answer to a prompt, besides `seq_len`.
    """

    data: Data
    seq_len: int
    share: float
    tokenizer: TextTokenizer
    template: Template
    kind: str | None = None
    media: MediaReader | None = None
    answer: int = 0

    @property
    def separator(self) -> int | None:
        """The token between documents of a token file, as data.end_of_text says.

        None if the tokenizer has no end token. Raises UserError for a token it does not have.
        """
        named = self.data.end_of_text
        if named is None:
            return self.tokenizer.eos_id
        token = named if isinstance(named, int) else self.tokenizer.backend.token_to_id(named)
        if token is None and str(named).isdecimal():
            token = int(named)
        if token is not None and 0 <= token < self.tokenizer.vocab_size:
            return token
        ending = self.tokenizer.eos_token
        use = f"Its end token:  data.end_of_text='{ending}'" if ending else "It has no end token"
        reason = f"the tokenizer has no such token.\n{use}"
        raise UserError("the data cannot be used", f"data.end_of_text={named}", reason)

    def separator_of(self, files: Iterable[str]) -> list[Any]:
        """Return what decides the tokens of token files; an empty list if none of the files is one.

        That is the separator, and what opens files of the user's own kinds.
        """
        names = {kind(file)[0][1:] for file in files if is_token_file(file)}
        own = sorted(names & {*own_names("token_file")})
        return [self.separator, *(identity_of("token_file", name) for name in own)] if names else []

    def builder(self) -> SampleBuilder:
        splits = self.kind == UNPAIRED
        return SampleBuilder(
            self.data, self.seq_len, self.tokenizer, self.template, splits, self.media
        )


def read_texts(
    rows: Iterable[Record],
    choose: Callable[[Record], Reader],
    render: Callable[[Readable], T],
    refuse: Callable[[Record, str], None],
    first: int = 0,
) -> Iterator[tuple[int, Record, T]]:
    """Yield (number, row, result of `render`), from the row with number `first` on.

    choose: returns the reader of all rows for the first row that can be read, even if that is
    before `first`. refuse: called with each row that cannot be used, and the reason.
    """
    reader: Reader | None = None
    for number, row in enumerate(rows):
        try:
            if row.error:
                raise RecordError(row.error)
            reader = reader or choose(row)
            if number < first:
                continue
            rendered = render(reader.read(reader.known(row)))
        except (RecordError, RecursionError) as error:
            if number >= first:
                refuse(
                    row, str(error) if isinstance(error, RecordError) else "is nested too deeply"
                )
        else:
            yield number, row, rendered


def tokenize_in_chunks(
    texts: Iterator[tuple[Any, Rendered]],
    builder: SampleBuilder,
    max_texts: int,
    max_characters: int,
) -> Iterator[Iterator[tuple[Any, list[Sample]]]]:
    """Yield chunks of (key, samples) from (key, text); each chunk is one call of the tokenizer.

    The limits bound the memory of a call.
    """
    while True:
        chunk, characters = [], 0
        for key, text in islice(texts, max_texts):
            chunk.append((key, text))
            characters += text.size
            if characters >= max_characters:
                break
        if not chunk:
            return
        samples = builder.tokenize([text for _, text in chunk])
        yield zip((key for key, _ in chunk), samples, strict=True)


def choose_reader(
    data: Data,
    columns: dict[str, Any],
    file: str,
    format: str,
    fields: dict[str, Any] | None,
    kind: str | None = SINGLE,
    with_media: bool = False,
) -> Reader:
    """Return a reader for rows with these columns. kind, with_media: passed to `make_reader`.

    Raises UserError if they cannot be used, or RecordError if data.on_error=skip.
    """
    try:
        reader = make_reader(columns, format, fields, file, kind, with_media)
    except UserError as error:
        if data.on_error == "fail":
            raise
        raise RecordError(error.problems[0].reason.splitlines()[0]) from None
    if reader.format in ("preference", UNPAIRED):
        _require_whole_answers(data, file)
    if data.too_long == "split" and reader.format not in CAN_BE_CUT:
        # packing=stream needs too_long=split
        packing = "data.packing=best_fit " if data.packing == "stream" else ""
        kind = "segments" if reader.format == "segments" else "conversations"
        kind = "labelled texts" if reader.format in OF_HEADS else kind
        use = f"Use  {packing}data.too_long=drop  or  {packing}data.too_long=truncate"
        reason = f"only text and tokens can be cut into pieces, and {file} holds {kind}.\n{use}"
        raise UserError("the data cannot be used", "data.too_long=split", reason)
    return reader


def _require_whole_answers(data: Data, file: str) -> None:
    """Raise UserError for options with which answers could not be compared."""
    pairs = f"{file} holds preferences, "
    if data.loss_on == "all":
        reason = f"{pairs}whose answers alone are compared.\nUse  data.loss_on=assistant"
        raise UserError("the data cannot be used", "data.loss_on=all", reason)
    if data.too_long == "truncate":
        reason = f"{pairs}whose answers are compared whole.\nUse  data.too_long=drop"
        raise UserError("the data cannot be used", "data.too_long=truncate", reason)
