"""Conversations and documents to tokens, each with its loss weight."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.media.media import MediaReader, SampleMedium
from fsdp_trainer.data.records.conversations import (
    Conversation,
    Document,
    Pretokenized,
    Readable,
    Segments,
)
from fsdp_trainer.data.records.labelled_texts import QUERY, LabelledText, LabelledTexts, TaggedText
from fsdp_trainer.data.records.media import media_in
from fsdp_trainer.data.records.messages import BAD_KEY, MESSAGE_KEYS, UNREAD_KEY, Message
from fsdp_trainer.data.records.preference_records import SIDES, LabelledAnswer, Preference
from fsdp_trainer.data.records.prompts import DataQuestion
from fsdp_trainer.data.records.unread_columns import bad_verdicts
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.templates.completeness import TEXT as TEXT_LEFT_OUT
from fsdp_trainer.data.templates.completeness import TOOLS as TOOLS_LEFT_OUT
from fsdp_trainer.data.templates.completeness import (
    left_out_of_answer,
    left_out_of_context,
    left_out_tools,
)
from fsdp_trainer.data.templates.turns import TurnFinder, merged
from fsdp_trainer.data.tokens.encoding import Encoding
from fsdp_trainer.data.tokens.shown_media import with_shown_media
from fsdp_trainer.data.tokens.tagged_tokens import labelled_tokens, place_labels
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.data.tokens.tokenizer_template import NOTHING

Span = tuple[int, int, float]
"""Characters [start, end) of a text, and the loss weight of their tokens."""
Prompt = tuple[str, ...]
"""The text before an answer, and the digests of the media in it."""
EXAMPLES = 3
FITS = "fits_"
"""Prefix of keys that count samples too long for a row; the suffix is a sufficient length, as in
fits_1536."""
CUT_HELPS, SPLIT_HELPS = "cut_helps", "split_helps"
"""Keys that count too long samples of which data.too_long=truncate, or =split, keeps more."""
LOST = "lost_tokens"
"""Key of the number of tokens in samples that were dropped for length, or cut off."""
MEDIA, MEDIA_TOKENS = READ.counts
"""Keys of the numbers of media, and of tokens that stand for them."""
REWRITTEN_SAMPLES, REWRITTEN_TOKENS, LAST_TOKENS = "of_rewritten", "of_rewritten_tokens", "of_last"
"""Keys of counts for conversations whose template rewrites earlier turns: samples made of them,
tokens of those samples, and tokens of the last sample of each (the conversation without
repeats)."""
HEADER = 80
"""Characters before an answer that may hold its beginning, if prompt and answer share a prefix."""
TEXTS = ("content", "reasoning_content")
"""Keys of a turn that hold text."""
GOOD, BAD, MISMATCHED = range(3)
"""Kinds of a sample: an answer; an answer that should become less likely; and a prompt with the
answer to another prompt, whose mean log(policy / reference) is the baseline for all answers."""
LABELLED = ("labelled_good", "labelled_bad")
"""Keys of the numbers of answers that are GOOD and BAD."""
REMEMBERED = 16
"""Prompts of earlier calls whose last answers are kept for answers without another prompt."""
TRIED = 8
"""Answers to other prompts that are looked at for one that the own prompt does not have too."""
EMPTY_THINK = re.compile(r"<think>\s*</think>")


@dataclass
class Sample:
    """Tokens as they are stored; `weights[i]` is the loss weight of `tokens[i]` as a target."""

    tokens: np.ndarray  # [length] int32
    weights: np.ndarray  # [length] float32
    starts_group: bool = True
    """False if packing must keep it in one row with the sample before it."""
    kind: int = GOOD
    question: str | None = None
    """DataQuestion.as_json, for prompts only."""
    label: str | None = None
    """What a head is to learn of it, as JSON."""
    media: tuple[SampleMedium, ...] = ()
    """The media that its tokens stand for, in order."""
    link: tuple[int, np.dtype] | None = None
    """First byte and type of the tokens in the file they come from, if they are read from there."""


@dataclass
class Rendered:
    """A text before tokenization.

    A document gets bos and eos around it; a conversation is exactly the template's output.
    """

    text: str
    spans: list[Span]
    where: tuple[str, int]
    """File and line."""
    is_document: bool = False
    ends: tuple[int, ...] = ()
    """Character positions just after the special tokens that end the assistant's turns."""
    sample: Sample | None = None
    """The tokens of data that is already tokenized; the text is then empty."""
    place: tuple[int, int] = (1, 1)
    """Number of this text among those of its conversation, from 1, and how many there are."""
    rejected: "Rendered | None" = None
    """The rejected answer of a preference pair, if this is the chosen one."""
    is_good: bool | None = None
    """Label of an answer in good or bad; None for any other text."""
    question: str | None = None
    """The same as in Sample, for the text of a prompt."""
    media: tuple[SampleMedium, ...] = ()
    """The media of the text, in order."""
    labelled: tuple[LabelledText, ...] = ()
    """Texts with labels; this text is then empty."""
    tagged: TaggedText | None = None
    """Words or steps with labels; this text is then empty."""
    can_be_split: bool = False
    """True if it may continue in another row."""

    @property
    def has_labels(self) -> bool:
        return bool(self.labelled or self.tagged)

    @property
    def is_weighed(self) -> bool:
        return not (self.is_document or self.has_labels) and self.sample is None

    @property
    def is_compared(self) -> bool:
        return self.rejected is not None or self.is_good is not None

    @property
    def sides(self) -> "list[Rendered]":
        return [self] if self.rejected is None else [self, self.rejected]

    @property
    def size(self) -> int:
        """Number of characters, estimated as 4 per token for tokenized data."""
        own = len(self.text) if self.sample is None else 4 * len(self.sample.tokens)
        own += sum(len(one.text) + len(one.second or "") for one in self.labelled)
        own += sum(map(len, self.tagged.parts)) if self.tagged else 0
        return own + (self.rejected.size if self.rejected else 0)


class SampleBuilder:
    """Renders and tokenizes rows, and counts what it leaves out."""

    def __init__(
        self,
        data: Data,
        seq_len: int,
        tokenizer: TextTokenizer,
        template: Template,
        splits_pairs: bool = False,
        media: MediaReader | None = None,
    ):
        """splits_pairs: if True, the answers of a pair become one good and one bad answer.

        media: reads the media of conversations; None for a model that reads only text.
        """
        self.splits_pairs, self.media = splits_pairs, media
        self.others = OtherAnswers()
        """Answers for those that have no other prompt beside them."""
        self.data, self.seq_len, self.tokenizer, self.template = data, seq_len, tokenizer, template
        self.counts: Counter[str] = Counter()
        """Counts by the keys of `findings.KINDS`."""
        self.examples: dict[str, list[str]] = {}
        """The first few FILE:LINE for each key."""
        self._ends = tuple(tokenizer.special_tokens)
        self._special = re.compile(
            "|".join(map(re.escape, sorted(self._ends, key=len, reverse=True))) or "(?!)"
        )
        self._special_ids = set(tokenizer.special_tokens.values())
        self._stripping = [
            id
            for id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.lstrip or token.rstrip
        ]

    def count(self, key: str, where: tuple[str, int]) -> None:
        """Count one more event, and keep its place if it is among the first few."""
        self.counts[key] += 1
        place, places = f"{where[0]}:{where[1]}", self.examples.setdefault(key, [])
        if len(places) < EXAMPLES and place not in places:
            places.append(place)

    def count_all(self, key: str, file: str, lines: np.ndarray) -> None:
        for line in lines[:EXAMPLES].tolist():
            self.count(key, (file, line))
        if len(lines) > EXAMPLES:
            self.counts[key] += len(lines) - EXAMPLES

    def render_prompt(self, row: DataQuestion) -> list[Rendered]:
        """Return the prompt up to where the model answers; RecordError if it cannot be rendered."""
        notes: set[str] = set()
        messages = self._adapted(row, notes, "")
        text = self.template.render(messages, row.tools, add_generation_prompt=True)
        require_whole_characters(text)
        if left_out_of_context(row.messages, text):
            notes.add(TEXT_LEFT_OUT)
        if left_out_tools(row.tools, text):
            notes.add(TOOLS_LEFT_OUT)
        for key in sorted(notes):
            self.count(key, row.where)
        return [Rendered(text, [], row.where, question=row.as_json)]

    def render(self, row: Readable) -> list[Rendered]:
        """Return one text, or several if the template rewrites earlier turns.

        Raises RecordError if the template refuses the conversation.
        """
        if isinstance(row, Conversation):
            texts = self._conversation(row)
        elif isinstance(row, Document):
            texts = self._document(row)
        elif isinstance(row, Segments):
            texts = [self._segments(row)]
        elif isinstance(row, Preference) and not self.splits_pairs:
            texts = [self._pair(row)]
        elif isinstance(row, LabelledTexts):
            texts = self._labelled(row)
        elif isinstance(row, TaggedText):
            texts = self._tagged(row)
        elif isinstance(row, Preference | LabelledAnswer):
            texts = self._verdicts(row)
        else:
            texts = [self._pretokenized(row)]
        require_whole_characters(*(side.text for text in texts for side in text.sides))
        return texts

    def _document(self, row: Document) -> list[Rendered]:
        if not row.text.strip():
            return self._left_out("empty", row.where)
        bos, eos = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
        if self._special.search(row.text.removeprefix(bos).removesuffix(eos)):
            self.count("special_in_text", row.where)
        if self.tokenizer.eos_id is None:
            self.count("no_end_token", row.where)
        spans = [(0, len(row.text), 1.0)]
        return [Rendered(row.text, spans, row.where, is_document=True, can_be_split=True)]

    def _labelled(self, row: LabelledTexts) -> list[Rendered]:
        written = [text for one in row.texts for text in (one.text, one.second) if text is not None]
        if not all(text.strip() for text in written):
            return self._left_out("empty", row.where)
        require_whole_characters(*written)
        is_query = len(row.texts) > 1 and row.texts[0].second is None
        texts = [*map(self._prompted, row.texts)] if is_query else row.texts
        return [Rendered("", [], row.where, labelled=tuple(self._with_shown(texts, row.where)))]

    def _with_shown(self, texts: list[LabelledText], where: tuple[str, int]) -> list[LabelledText]:
        """Return texts with the tokens of their media, each of which is read once."""
        reader = self.media
        if reader is None:
            return texts
        items = [*dict.fromkeys(item for one in texts for item in one.media)]
        named = reader.find(items, where[0], lambda key, name: self.count(key, where))
        files = dict(zip(items, named, strict=True))
        return [
            with_shown_media(one, reader, self.tokenizer, lambda own: [files[one] for one in own])
            for one in texts
        ]

    def _tagged(self, row: TaggedText) -> list[Rendered]:
        require_whole_characters(row.prompt or "", *row.parts)
        if not any(part.strip() for part in row.parts):
            return self._left_out("empty", row.where)
        text = row.before if row.prompt is None else row.prompt
        (shown,) = self._with_shown([LabelledText(text, None, "", media=row.media)], row.where)
        prompt, before = (None, shown.text) if row.prompt is None else (shown.text, "")
        row = replace(row, prompt=prompt, before=before, media=shown.media)
        return [Rendered("", [], row.where, tagged=row)]

    def _prompted(self, one: LabelledText) -> LabelledText:
        prompts = self.data.prompts or {}
        prompt = prompts.get("query" if one.kind == QUERY else "document", "")
        return replace(one, text=prompt + one.text)

    def _pretokenized(self, row: Pretokenized) -> Rendered:
        """Return tokens unchanged. Raises RecordError if the tokenizer does not know one."""
        tokens = np.asarray(row.tokens)
        beyond = tokens[(tokens < 0) | (tokens >= self.tokenizer.vocab_size)]
        if len(beyond):
            raise RecordError(self.unknown_token(int(beyond[0])))
        link = None if row.begin is None else (row.begin, tokens.dtype)
        return replace(_with_tokens(tokens, row.learnt, row.where, link), can_be_split=True)

    def unknown_token(self, token: int) -> str:
        return (
            f"holds the token {token}, and the tokenizer has 0 to {self.tokenizer.vocab_size - 1}:"
            " tokenizer.path has to be what the data was tokenized with"
        )

    def _segments(self, row: Segments) -> Rendered:
        try:
            encoded = self.tokenizer.encode_plain(row.texts)
        except UnicodeEncodeError:
            raise RecordError("holds half a character, which is no text") from None
        tokens = [token for ids in encoded for token in ids.tolist()]
        segments = zip(encoded, row.learnt, strict=True)
        supervised = [one for ids, one in segments for _ in range(len(ids))]
        ends = [i for i, one in enumerate(supervised) if one and not any(supervised[i + 1 : i + 2])]
        if any(tokens[i] not in self._special_ids for i in ends):
            self.count("no_end", row.where)
        return _with_tokens(tokens, supervised, row.where)

    def _pair(self, row: Preference) -> Rendered:
        chosen, rejected = (self._answer(row, name) for name in SIDES)
        return replace(chosen, rejected=rejected)

    def _verdicts(self, row: Preference | LabelledAnswer) -> list[Rendered]:
        if isinstance(row, LabelledAnswer):
            return [replace(self._answer(row, "answer"), is_good=row.is_good)]
        return [replace(self._answer(row, name), is_good=name == SIDES[0]) for name in SIDES]

    def _answer(self, row: Preference | LabelledAnswer, name: str) -> Rendered:
        """Return the prompt with an answer; only the turns of the answer are supervised."""
        prompt = [
            turn | {"weight": 0.0} if turn["role"] == "assistant" else turn for turn in row.prompt
        ]
        turns = [*prompt, *getattr(row, name)]
        texts = self._conversation(Conversation(turns, row.tools, row.where))
        if len(texts) > 1:
            raise RecordError(
                f"{name} has several turns, which the template writes in {len(texts)} texts, and"
                " an answer is compared as one.\nUse  data.loss_on=last"
            )
        return texts[0]

    def _conversation(self, row: Conversation) -> list[Rendered]:
        notes: set[str] = set()
        mark = self.media.processor.mark if self.media else ""
        messages = self._adapted(row, notes, mark)
        if any(a["role"] == b["role"] == "assistant" for a, b in pairwise(row.messages)):
            notes.add("two_answers")
        finder = TurnFinder(self.template.for_record(row.tools), messages, row.tools, self._ends)
        if self.data.loss_on == "all":
            texts = self._supervise_all(finder, row, notes)
        else:
            texts = self._supervise_turns(finder, row, notes)
        if left_out_tools(row.tools, finder.whole):
            notes.add(TOOLS_LEFT_OUT)
        for key in sorted(notes):
            self.count(key, row.where)
        return [*self._with_media(texts, row)] if self.media else texts

    def _adapted(
        self, row: Conversation | DataQuestion, notes: set[str], mark: str
    ) -> list[Message]:
        """Return a row's turns in the forms of the template; add keys of `findings.KINDS`.

        mark: text for an image, for a template that does not show it itself.
        """
        if any(
            self._special.search(message[name])
            for message in row.messages
            for name in TEXTS
            if message.get(name)
        ):
            notes.add("special_in_text")
        notes |= self._unread_keys(row.messages)
        return self.template.adapt(row.messages, row.tools, notes.add, mark)

    def _unread_keys(self, messages: list[Message]) -> set[str]:
        """Return the keys of `findings.KINDS` for keys of turns that nothing reads."""
        return {
            (BAD_KEY if any(bad_verdicts({name: message[name]})) else UNREAD_KEY) + name
            for message in messages
            if len(message) > 2
            for name in map(str, message.keys() - MESSAGE_KEYS)
            if message.get(name) not in (None, "", [], {}) and not self.template.reads(name)
        }

    def _with_media(self, texts: list[Rendered], row: Conversation) -> Iterator[Rendered]:
        """Yield the texts of a conversation with its media, which are never supervised."""
        assert self.media is not None
        files = self.media.find(
            [*media_in(row.messages)], row.where[0], lambda key, name: self.count(key, row.where)
        )
        token = str(self.tokenizer.backend.id_to_token(self.media.processor.token))
        for text in texts:
            number, count = text.place
            whole = self.media.expand(text.text, files, token, is_whole=number == count)
            spans = [(whole.moved(a), whole.moved(b), weight) for a, b, weight in text.spans]
            yield replace(
                text,
                text=whole.text,
                spans=spans + [(start, end, 0.0) for start, end in whole.spans],
                ends=tuple(map(whole.moved, text.ends)),
                media=whole.media,
            )

    def _supervise_all(
        self, finder: TurnFinder, row: Conversation, notes: set[str]
    ) -> list[Rendered]:
        whole = finder.whole
        spans = [(0, len(whole), 1.0), *self._weighted_turns(finder)]
        for message in row.messages:
            if message["role"] == "assistant":
                notes.update(left_out_of_answer(message, whole))
        if left_out_of_context(row.messages, whole):
            notes.add(TEXT_LEFT_OUT)
        return [Rendered(whole, spans, row.where)]

    def _supervise_turns(
        self, finder: TurnFinder, row: Conversation, notes: set[str]
    ) -> list[Rendered]:
        """Return one text, or several if the template rewrites earlier turns."""
        turns, spans, behind = [], {}, 0
        if any(turn.get("weight") and turn["role"] != "assistant" for turn in row.messages):
            notes.add("marked_prompt")
        for k, place in self._chosen(finder, row):
            answer = row.messages[place]
            weight = answer.get("weight", 1.0)
            if weight <= 0:
                continue
            turn = finder.turn(k)
            notes.update(left_out_of_answer(answer, turn.text[max(0, turn.start - HEADER) :]))
            if not turn.begins_as_prompted:
                self.count("prompt_differs", row.where)
            if not turn.is_closed:
                self.count("no_end", row.where)
            turns.append(turn)
            context = _context_spans(finder.messages[k], turn.text, turn.start)
            spans[id(turn)] = [(turn.start, turn.end, weight), *context]
            behind = place + 1
        groups = merged(turns, finder.whole)
        if len(groups) == 1:
            behind = len(row.messages)
        # turns after the last supervised answer may be in none of the texts
        if left_out_of_context(row.messages[:behind], groups[-1][0]):
            notes.add(TEXT_LEFT_OUT)
        if len(groups) > 1:
            notes.add("rewritten")
            self.counts[REWRITTEN_SAMPLES] += len(groups)
        return [
            Rendered(
                text,
                [span for turn in held for span in spans[id(turn)]],
                row.where,
                ends=tuple(turn.end for turn in held if turn.is_closed),
                place=(number, len(groups)),
            )
            for number, (text, held) in enumerate(groups, 1)
        ]

    def _chosen(self, finder: TurnFinder, row: Conversation) -> list[tuple[int, int]]:
        """Return two indices of each supervised answer: in the finder's and the row's messages."""
        places = [
            [k for k, message in enumerate(messages) if message["role"] == "assistant"]
            for messages in (finder.messages, row.messages)
        ]
        chosen = list(zip(*places, strict=True))
        return chosen[-1:] if self.data.loss_on == "last" else chosen

    def _weighted_turns(self, finder: TurnFinder) -> list[Span]:
        spans = []
        template, messages, tools = finder.template, finder.messages, finder.tools
        for k in (k for k, message in enumerate(messages) if message.get("weight", 1.0) != 1.0):
            before, after = (
                template.finished(messages[:n], tools).removesuffix(template.closing.text)
                if n
                else ""
                for n in (k, k + 1)
            )
            if not (finder.whole.startswith(after) and after.startswith(before)):
                raise RecordError(
                    "weights of turns with data.loss_on=all need a template "
                    "that does not rewrite earlier turns"
                )
            spans.append((len(before), len(after), messages[k]["weight"]))
        return spans

    def tokenize(self, texts: list[Rendered]) -> Iterator[list[Sample]]:
        """Yield the samples of every text: one, two for a pair, none if the text is left out.

        An answer labelled good or bad comes with a second sample, its prompt with a mismatched
        answer.
        """
        samples = self._tokenized(texts)
        if any(text.is_good is not None for text in texts):
            return iter(self._with_mismatched(texts, [*samples]))
        return samples

    def _tokenized(self, texts: list[Rendered]) -> Iterator[list[Sample]]:
        sides = [side for text in texts for side in text.sides]
        plain = [text.text for text in sides if text.is_document]
        weighed = [text.text for text in sides if text.is_weighed]
        documents = iter(self.tokenizer.encode_plain(plain))
        chats = iter(self.tokenizer.encode_batch(weighed))
        for text in texts:
            if text.rejected is not None:
                yield self._keep_pair([self._weigh(next(chats), side) for side in text.sides], text)
                continue
            if text.has_labels:
                yield self._group(text) if text.labelled else self._with_tags(text)
                continue
            if text.question is not None:
                yield self._prompt(next(chats), text)
                continue
            if text.sample is not None:
                sample = text.sample
            elif text.is_document:
                sample = self._frame(next(documents))
            else:
                sample = self._weigh(next(chats), text)
            yield [one for piece in self._fit(sample, text) for one in self._keep(piece, text)]

    def _with_mismatched(
        self, texts: list[Rendered], samples: list[list[Sample]]
    ) -> list[list[Sample]]:
        """Return each text's sample, followed by its prompt with an answer to another prompt.

        A mismatched answer is cut where both samples fill the row. A text is left out if there is
        no other prompt.
        """
        both = list(samples)
        places = [i for i, text in enumerate(texts) if samples[i] and text.is_good is not None]
        prompts = [_prompt_of(texts[i]) for i in places]
        answers = [samples[i][0] for i in places]
        others = self.others.match(prompts, answers)
        for i, own, other in zip(places, answers, others, strict=True):
            text = texts[i]
            kind = GOOD if text.is_good else BAD
            self.counts[LABELLED[kind]] += 1
            if other is None:
                both[i] = self._left_out("no_other_prompt", text.where)
                continue
            second = mismatched(own, other, self.seq_len - len(own.tokens))
            pair = [replace(own, kind=kind), second] if second else None
            both[i] = pair or self._too_long(len(own.tokens), text)
        return both

    def _keep_pair(self, samples: list[Sample], text: Rendered) -> list[Sample]:
        """Return both answers, or none: one row must hold both."""
        length = sum(len(sample.tokens) for sample in samples)
        if length > self.seq_len:
            return self._too_long(length, text)
        chosen, rejected = samples
        if len(chosen.tokens) == len(rejected.tokens) and (chosen.tokens == rejected.tokens).all():
            return self._left_out("same_answers", text.where)
        chosen_kept, rejected_kept = (self._keep(sample, text) for sample in samples)
        if not (chosen_kept and rejected_kept):
            return []
        return [chosen, replace(rejected, starts_group=False)]

    def _group(self, text: Rendered) -> list[Sample]:
        """Return the labelled texts of a row, or none: one row of tokens must hold all.

        The first one's last token has a weight of 1, so that the weight of a step is its number of
        groups.
        """
        room = self.seq_len // len(text.labelled)
        pairs = [one.pair for one in text.labelled]
        tokens = self.tokenizer.encode_published(pairs)
        length = sum(map(len, tokens))
        if length > self.seq_len and self.data.too_long == "truncate":
            tokens = self.tokenizer.encode_published(pairs, room)
            self._note_too_long(length, length - sum(map(len, tokens)), text)
            self.count("truncated", text.where)
        elif length > self.seq_len:
            return self._too_long(length, text)
        if not all(map(len, tokens)):
            return self._left_out("empty", text.where)
        if not all(map(self._has_whole_media, tokens, (one.media for one in text.labelled))):
            return self._too_long(length, text)
        samples = []
        for place, (own, one) in enumerate(zip(tokens, text.labelled, strict=True)):
            weights = np.zeros(len(own), np.float32)
            weights[-1] = not place
            sample = Sample(own, weights, starts_group=not place, kind=one.kind, label=one.label)
            samples.append(self._counting_media(replace(sample, media=one.media)))
        return samples

    def _has_whole_media(self, tokens: np.ndarray, media: tuple[SampleMedium, ...]) -> bool:
        """Return False if a text that was cut has lost tokens of its media."""
        if self.media is None:
            return True
        kept = np.count_nonzero(tokens == self.media.processor.token)
        return bool(kept == sum(one.tokens for one in media))

    def _counting_media(self, sample: Sample) -> Sample:
        if sample.media:
            self.counts[MEDIA] += len(sample.media)
            self.counts[MEDIA_TOKENS] += sum(one.tokens for one in sample.media)
        return sample

    def _with_tags(self, text: Rendered) -> list[Sample]:
        """Return words or steps; the tokens that get a label have a weight of 1."""
        assert text.tagged
        separator, seq_len = self.data.step_separator, self.seq_len
        tokens, places = place_labels(text.tagged, self.tokenizer, separator, None)
        if len(tokens) > seq_len and self.data.too_long == "truncate":
            self._note_too_long(len(tokens), len(tokens) - seq_len, text)
            self.count("truncated", text.where)
            tokens, places = place_labels(text.tagged, self.tokenizer, separator, seq_len)
        elif len(tokens) > seq_len:
            return self._too_long(len(tokens), text)
        weights, label = labelled_tokens(text.tagged, places, len(tokens))
        if not weights.any():
            return self._left_out("unsupervised", text.where)
        if not self._has_whole_media(tokens, text.tagged.media):
            return self._too_long(len(tokens), text)
        return [self._counting_media(Sample(tokens, weights, label=label, media=text.tagged.media))]

    def _prompt(self, encoding: Encoding, text: Rendered) -> list[Sample]:
        """Return the prompt, without supervised tokens; nothing if it is too long."""
        self._count_first(encoding, text)
        length = len(encoding.ids)
        if length > self.seq_len:
            return self._too_long(length, text)
        return [Sample(encoding.ids, np.zeros(length, np.float32), question=text.question)]

    def _frame(self, ids: np.ndarray) -> Sample:
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        begin = [bos] if bos is not None else []
        if self.template.name == NOTHING:
            begin = self._first
        front = begin if ids[:1].tolist() != begin else []
        tokens = np.concatenate(
            [front, ids, [eos] if eos is not None and ids[-1:].tolist() != [eos] else []]
        ).astype(np.int32)
        return Sample(tokens, np.ones(len(tokens), np.float32))

    def _weigh(self, encoding: Encoding, text: Rendered) -> Sample:
        number, count = text.place
        if count > 1:
            self.counts[REWRITTEN_TOKENS] += len(encoding.ids)
            self.counts[LAST_TOKENS] += len(encoding.ids) * (number == count)
        self._leave_out_stripped(encoding, text.text)
        self._count_first(encoding, text)
        if self.template.name == NOTHING:
            text = replace(text, spans=[_to_whole_token(encoding, span) for span in text.spans])
        sample = Sample(encoding.ids, token_weights(encoding, text), media=text.media)
        self._count_turns(encoding, text, sample)
        return sample

    def _count_first(self, encoding: Encoding, text: Rendered) -> None:
        """Count a chat without the first token that processors of media add to every text."""
        if self.media and self._first and encoding.ids[:1].tolist() != self._first:
            self.count("no_first_token", text.where)

    @cached_property
    def _first(self) -> list[int]:
        return self.tokenizer.first_added()

    def _count_turns(self, encoding: Encoding, text: Rendered, sample: Sample) -> None:
        """Count turns whose beginning or end is not supervised as it should be."""
        for end in text.ends:
            at = encoding.first_reaching(end)
            if (
                at == len(encoding.ids)
                or not sample.weights[at]
                or int(encoding.ids[at]) not in self._special_ids
            ):
                self.count("no_end", text.where)
        for start, end, weight in text.spans:
            first = encoding.first_reaching(start + 1)
            in_front = first < len(encoding.ids) and encoding.start_of(first) < start
            if weight and in_front and not sample.weights[first]:
                self.count("shared_token", text.where)
            if EMPTY_THINK.search(text.text, start, end):
                self.count("empty_think", text.where)

    def _leave_out_stripped(self, encoding: Encoding, text: str) -> None:
        """Restrict special tokens that swallow white space (Phi-3's) to their own characters."""
        for i in np.flatnonzero(np.isin(encoding.ids, self._stripping)) if self._stripping else ():
            covered = text[encoding.starts[i] : encoding.ends[i]]
            encoding.starts[i] += len(covered) - len(covered.lstrip())
            encoding.ends[i] -= len(covered) - len(covered.rstrip())

    def _fit(self, sample: Sample, text: Rendered) -> list[Sample]:
        length, seq_len = len(sample.tokens), self.seq_len
        if length <= seq_len:
            return [sample]
        if self.data.too_long == "split":  # choose_reader refuses it for conversations
            self.count("split", text.where)
            return [sample]  # RowOrder splits it
        if self.data.too_long == "truncate":
            self._note_too_long(length, length - seq_len, text)
            self.count("truncated", text.where)
            return [self._cut(sample, seq_len)]
        return self._too_long(length, text)

    def _cut(self, sample: Sample, size: int) -> Sample:
        """Return a sample's first tokens, at most `size`. It ends before an image that is cut."""
        media = sample.media
        if self.media and media:
            places = np.flatnonzero(sample.tokens == self.media.processor.token)
            ends = np.cumsum([one.tokens for one in media])
            whole = int(np.searchsorted(ends, np.searchsorted(places, size), side="right"))
            if whole < len(media):
                size = min(size, int(places[ends[whole] - media[whole].tokens]))
            media = media[:whole]
        return replace(
            sample, tokens=sample.tokens[:size], weights=sample.weights[:size], media=media
        )

    def _keep(self, sample: Sample, text: Rendered) -> list[Sample]:
        bos = self.tokenizer.bos_id
        if bos is not None and sample.tokens[:2].tolist() == [bos, bos]:
            self.count("two_bos", text.where)
        sample.weights[:1] = 0  # no token precedes the first one to predict it from
        if len(sample.tokens) >= 2 and sample.weights.any():
            return [self._counting_media(sample)]
        return self._left_out("unsupervised", text.where)

    def _too_long(self, length: int, text: Rendered) -> list:
        """Count a text of `length` tokens that is dropped because no row holds it; return []."""
        # the row of an answer labelled good or bad also holds its prompt with another answer
        self._note_too_long(length if text.is_good is None else 2 * length, length, text)
        return self._left_out("too_long", text.where)

    def _note_too_long(self, needed: int, lost: int, text: Rendered) -> None:
        self.counts[f"{FITS}{rounded_length(needed)}"] += 1
        self.counts[LOST] += lost
        if text.question is None and not text.is_compared:
            self.counts[CUT_HELPS] += 1
            self.counts[SPLIT_HELPS] += text.can_be_split

    def _left_out(self, key: str, where: tuple[str, int]) -> list:
        """Count a dropped row or text; return []."""
        self.count(key, where)
        return []


class OtherAnswers:
    """Finds an answer to another prompt for each answer, among those of the same call.

    If these have one prompt only, it is an answer of an earlier call.
    """

    def __init__(self) -> None:
        self._earlier: dict[Prompt, Sample] = {}  # the last answer to each of the last prompts

    @property
    def are_several(self) -> bool:
        return len(self._earlier) > 1

    def is_new(self, text: Rendered) -> bool:
        return _prompt_of(text) not in self._earlier

    def match(self, prompts: list[Prompt], answers: list[Sample]) -> list[Sample | None]:
        """Return an answer to another prompt for each answer; None if there is none.

        The answers, sorted by prompt, are moved on by as many places as one prompt has answers:
        each is used once, unless one prompt has more than half of them.
        """
        of_prompt: dict[Prompt, list[int]] = {}
        for i, prompt in enumerate(prompts):
            of_prompt.setdefault(prompt, []).append(i)
        earlier = [one for prompt, one in self._earlier.items() if prompt not in of_prompt]
        self._remember(prompts, answers)
        if len(of_prompt) == 1:
            return [earlier[i % len(earlier)] if earlier else None for i in range(len(answers))]
        in_order = [i for group in of_prompt.values() for i in group]
        contents = [answer.tokens[_begin_of_answer(answer) :].tobytes() for answer in answers]
        moved = max(map(len, of_prompt.values()), default=0)
        matched: list[Sample | None] = [None] * len(answers)
        end = 0
        for group in of_prompt.values():
            end += len(group)
            own, others = {contents[i] for i in group}, len(answers) - len(group)
            for place, i in enumerate(group):
                tried = [
                    in_order[(end + (place - moved + k) % others) % len(answers)]
                    for k in range(min(TRIED, others))
                ]
                unlike = next((j for j in tried if contents[j] not in own), tried[0])
                matched[i] = answers[unlike]
        return matched

    def _remember(self, prompts: list[Prompt], answers: list[Sample]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            self._earlier.pop(prompt, None)
            self._earlier[prompt] = answer
        self._earlier = dict([*self._earlier.items()][-REMEMBERED:])


def _prompt_of(text: Rendered) -> Prompt:
    """Return what identifies the prompt of an answer: its text, and digests of its media."""
    begins = (begin for begin, _, weight in text.spans if weight > 0)
    start = min(begins, default=len(text.text))
    return text.text[:start], *(one.file.digest for one in text.media)


def _begin_of_answer(sample: Sample) -> int:
    return int(np.argmax(sample.weights > 0))


def mismatched(sample: Sample, other: Sample, room: int) -> Sample | None:
    """Return a sample's prompt with the answer of another sample, at most `room` tokens.

    None if there is no room for any token of the answer.
    """
    prompt, begin = _begin_of_answer(sample), _begin_of_answer(other)
    if room <= prompt:
        return None
    tokens = np.concatenate([sample.tokens[:prompt], other.tokens[begin:]])[:room]
    weights = np.concatenate([sample.weights[:prompt], other.weights[begin:]])[:room]
    media = sample.media
    return Sample(tokens, weights, starts_group=False, kind=MISMATCHED, media=media)


def require_whole_characters(*texts: str) -> None:
    """Raise RecordError for a text that cannot be encoded as UTF-8, with half a surrogate pair."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as e:
        raise RecordError(
            f"holds half a character: \\u{ord(e.object[e.start]):04x} without its other half"
        ) from None


def _with_tokens(
    tokens: list[int] | np.ndarray,
    supervised: list[bool] | np.ndarray,
    where: tuple[str, int],
    link: tuple[int, np.dtype] | None = None,
) -> Rendered:
    """Return already tokenized data as a text without characters."""
    sample = Sample(np.array(tokens, np.int32), np.array(supervised, np.float32), link=link)
    return Rendered("", [], where, sample=sample)


def _context_spans(message: Message, text: str, start: int) -> list[Span]:
    content, parts = message.get("context_parts", ("", []))
    begin = text.find(content, start)
    if parts and begin < 0:
        raise RecordError("train_detail: the chat template changes the turn's text")
    return [(begin + first, begin + stop, 0.0) for first, stop in parts]


def _to_whole_token(encoding: Encoding, span: Span) -> Span:
    """Return a span with the part of its first token that is before it.

    Without text around an answer, its first letters may share a token with the prompt's last ones.
    """
    start, end, weight = span
    first = encoding.first_reaching(start + 1)
    if weight and first < len(encoding.ids):
        start = min(start, encoding.start_of(first))
    return start, end, weight


def token_weights(encoding: Encoding, text: Rendered) -> np.ndarray:
    """Return the weight of the span around each token: [tokens] float32.

    A token that crosses a span's edge gets the smaller weight of both sides.
    """
    characters = np.zeros(len(text.text) + 1, np.float32)
    for start, end, weight in text.spans:
        characters[start:end] = weight
    return encoding.lower_of_ends(characters)


def rounded_length(length: int) -> int:
    """Return the next usual row length: 1024, 1280, 1536, 1792, 2048, 2560 …"""
    step = max(1, 1 << max(0, (length - 1).bit_length() - 3))
    return round_up(length, step)
