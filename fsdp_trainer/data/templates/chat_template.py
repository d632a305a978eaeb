"""Chat templates: built in, from a file or from the tokenizer; rendering of conversations."""

from collections.abc import Callable, Mapping
from datetime import date
from functools import cached_property, partial
from typing import Any

import jinja2

from fsdp_trainer.base.time_limit import TooSlow, time_limit
from fsdp_trainer.data.files.built_in_templates import TEMPLATES
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.media import HELD
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.records.row_kinds import ROW_KINDS
from fsdp_trainer.data.templates.closing_text import Closing, find_closing
from fsdp_trainer.data.templates.completeness import TOOLS
from fsdp_trainer.data.templates.template_forms import Forms, convert_turns, place_media
from fsdp_trainer.data.templates.template_language import (
    DEFAULT,
    DEFAULT_DATE,
    SPECIAL,
    TOOL_USE,
    compile_template,
    mentions,
    with_defaults,
)
from fsdp_trainer.data.templates.template_probes import ANSWER, ASK, TOOL, find_forms
from fsdp_trainer.errors import UserError

# `plain` ends its prompt with a newline: a space would form one token with the first word of the
# answer, which then would not be supervised.
BUILT_IN = {name: template.text for name, template in TEMPLATES.items()}

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where a turn goes on. transformers uses the same text, which a template might look at."""
FOLLOWING: Message = {"role": "user", "content": "probed reply"}
"""A question that might follow an answer."""
SECONDS = 20.0
"""Longest time to compile a template, or to render the short conversations that probe it."""


class RecordTemplate:
    """A compiled template for rows of one kind, with tools or without.

    forms: the forms in which it reads the content of turns.
    """

    def __init__(
        self, name: str, compiled: jinja2.Template, values: Mapping[str, Any], with_tools: bool
    ):
        self.name, self._compiled, self._values = name, compiled, values
        self.forms: Forms = find_forms(self.render, with_tools)
        self.probed_tools = [TOOL] if with_tools else None
        """The tools with which it is probed."""
        self.closing: Closing = self._closing(convert_turns([ASK], self.forms), self.probed_tools)
        """Text after the last turn, eos_token in Phi-3. It may depend on the conversation."""
        self.generation_prompt: str = self._generation_prompt()
        """Text between a question and its answer; empty if it is unknown."""

    def render(
        self,
        messages: list[Message],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of turns in this template's forms. Raises RecordError with its error.

        A template is a program that may raise any exception.
        """
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._values,
            )
        except Exception as e:
            reason = str(e) or type(e).__name__
            raise RecordError(
                f"the chat template ({self.name}) cannot render this conversation: {reason}"
            ) from None

    def prompt(self, messages: list[Message], tools: list[dict] | None = None) -> str:
        return self.render(messages, tools, add_generation_prompt=True)

    def finished(self, messages: list[Message], tools: list[dict] | None = None) -> str:
        """Return the text of a conversation as it is when the model has just written its last turn.

        Templates that show the system text only if the last turn is the user's (Mistral's) omit it
        once there is an answer. But the model has seen it, so the text is the prompt with the
        system text, plus the text that the answer adds to a prompt without it. Raises RecordError
        as in `render`.
        """
        if self.forms.system != "prompt" or messages[-1]["role"] != "assistant":
            return self.render(messages, tools)
        others = [message for message in messages if message["role"] != "system"]
        if len(others) in (1, len(messages)):
            return self.render(messages, tools)
        before, after = self.prompt(others[:-1], tools), self.render(others, tools)
        if not after.startswith(before):
            return self.render(messages, tools)
        return self.prompt(messages[:-1], tools) + after[len(before) :]

    @cached_property
    def shown_kinds(self) -> set[str]:
        return {kind for kind in ROW_KINDS if self._shows_part(kind)}

    def _shows_part(self, kind: str) -> bool:
        text = {"type": "text", "text": ASK["content"]}
        try:
            without, shown = (
                self.render([{**ASK, "content": parts}])
                for parts in ([text], [{"type": kind}, text])
            )
        except RecordError:
            return False
        return ASK["content"] in shown != without and repr(kind) not in shown

    def closing_of(self, text: str, before: list[Message], tools: list[dict] | None) -> Closing:
        """Return what stands behind the last turn in the text of a conversation.

        before: its turns but for the last, which is an answer.
        """
        if not self.closing.text or text.endswith(self.closing.text):
            return self.closing
        return self._closing(before, tools)

    def _closing(self, before: list[Message], tools: list[dict] | None) -> Closing:
        answer, ask = convert_turns([ANSWER, FOLLOWING], self.forms)
        values = [value for value in self._values.values() if isinstance(value, str) and value]
        contents = FOLLOWING["content"], ANSWER["content"]
        try:
            render = partial(self.finished, tools=tools)
            return find_closing(render, [*before, answer], ask, contents, values)
        except RecordError:
            return Closing()

    def _generation_prompt(self) -> str:
        messages = convert_turns([ASK], self.forms)
        closing = self.closing.text
        try:
            before, prompt = (
                make(messages, self.probed_tools) for make in (self.render, self.prompt)
            )
        except RecordError:
            return ""
        if prompt == before:  # it is written after any turn
            return closing
        if not prompt.startswith(before):
            before = before.removesuffix(closing)
        return prompt[len(before) :] if prompt.startswith(before) else ""


class Template:
    """The chat template of a run, or several by name, with a tokenizer's special tokens.

    source: its text, or {name: text}, where `tool_use` is for rows with tools. args: further
    variables of the template. today: the date that it can read.
    """

    def __init__(
        self,
        name: str,
        source: str | dict[str, str],
        special: dict[str, str],
        args: Mapping[str, Any] | None = None,
        today: date = DEFAULT_DATE,
    ):
        self.name, self.sources = name, {DEFAULT: source} if isinstance(source, str) else source
        self._special, self._args, self._today = special, dict(args or {}), today
        self.source = self.sources.get(DEFAULT) or next(iter(self.sources.values()))
        """The template text for rows without tools."""
        self._values = {**special, **self._args}
        self._compiled = {
            name: compile_template(text, today) for name, text in self.sources.items()
        }
        self._for_record: dict[bool, RecordTemplate] = {}
        self._reads: dict[str, bool] = {}  # by name
        self.unfit: UserError | None = None
        """Raised for the first conversation: the tokenizer lacks what `plain` needs.

        Rows of text need no template.
        """

    def __reduce__(self) -> tuple:
        # compiled templates cannot be pickled
        made_of = (self.name, self.sources, self._special, self._args, self._today)
        return Template, made_of, {"unfit": self.unfit}

    @property
    def decides(self) -> Any:
        # those of any tokenizer are part of its own fingerprint
        more = {k: v for k, v in self._special.items() if k not in SPECIAL and self.reads(k)}
        args = more | self._args
        if len(self.sources) == 1 and not args and self._today == DEFAULT_DATE:
            return self.source
        return [self.sources, args, str(self._today)]

    @property
    def exported(self) -> dict[str, str]:
        return {name: with_defaults(text, self._args) for name, text in self.sources.items()}

    def reads(self, name: str) -> bool:
        if name not in self._reads:
            texts = self.sources.values()
            self._reads[name] = any(mentions(text, name) for text in texts)
        return self._reads[name]

    def for_record(self, tools: list[dict] | None) -> RecordTemplate:
        """Return the template for a row with these tools, chosen as in `transformers`.

        Raises UserError if it takes too long, or does not fit the tokenizer.
        """
        if self.unfit:
            raise self.unfit
        with_tools = bool(tools)
        if with_tools not in self._for_record:
            named = TOOL_USE if with_tools and TOOL_USE in self.sources else DEFAULT
            compiled = self._compiled.get(named) or next(iter(self._compiled.values()))
            try:
                with time_limit(SECONDS):
                    record_template = RecordTemplate(self.name, compiled, self._values, with_tools)
            except TooSlow:
                raise unusable(
                    self.name, f"takes more than {SECONDS:.0f} s for two turns"
                ) from None
            self._for_record[with_tools] = record_template
        return self._for_record[with_tools]

    def shows(self, tools: list[dict] | None) -> bool:
        return not tools or self.for_record(tools).forms.tools

    def render(
        self,
        messages: list[Message],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        return self.for_record(tools).render(messages, tools, add_generation_prompt)

    def adapt(
        self,
        messages: list[Message],
        tools: list[dict] | None,
        note: Callable[[str], Any] = lambda key: None,
        media_mark: str = "",
    ) -> list[Message]:
        """Return the conversation in the forms that the template reads.

        note: called with a key of `findings.KINDS` for content that the template has no form for.
        media_mark: text for one medium, for a template that does not show it itself.
        """
        template = self.for_record(tools)
        forms = template.forms
        if not self.shows(tools):
            note(TOOLS)
        turns = convert_turns(messages, forms, note)
        if not any(turn.get(HELD) for turn in turns):
            return turns
        return place_media(turns, template.shown_kinds, media_mark)

    def ask(self, messages: list[Message], media_mark: str = "") -> str:
        turns = self.adapt(messages, None, media_mark=media_mark)
        return self.render(turns, add_generation_prompt=True)

    def continued(self, messages: list[Message], media_mark: str = "") -> str:
        """Return the conversation up to the end of its last turn's text, which is to go on.

        As transformers' `apply_chat_template(…, continue_final_message=True)`. media_mark: see
        `adapt`. Raises RecordError if the template does not show that text as it is.
        """
        *before, last = self.adapt(messages, None, media_mark=media_mark)
        last, key = dict(last), "content"
        holder: dict[str, Any] = last
        if isinstance(last["content"], list):
            last["content"] = parts = [dict(part) for part in last["content"]]
            holder, key = next((part for part in reversed(parts) if "text" in part), {}), "text"
        text = holder.get(key) or ""
        holder[key] = text + CONTINUED
        whole = self.render([*before, last])
        end = whole.rfind(CONTINUED.strip())
        if end < 0 or text.strip() not in whole:
            raise RecordError(
                f"the chat template ({self.name}) does not show the last turn as it is, so that"
                " its text cannot go on"
            )
        is_kept = whole[end:].startswith(CONTINUED)
        return whole[:end] if is_kept else whole[:end].rstrip()


def unusable(name: str, reason: str) -> UserError:
    return UserError("the chat template cannot be used", f"data.template={name}", reason)
