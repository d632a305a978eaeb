"""The assistant's turns in a rendered conversation: the text that the model writes.

A turn's text is the difference between the finished text and the prompt of inference. No markers
are searched for, so this works for any template.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.chat_template import RecordTemplate
from fsdp_trainer.data.templates.closing_text import common_start
from fsdp_trainer.data.templates.template_forms import convert_turns
from fsdp_trainer.data.templates.template_probes import ANSWER, ASK

HALF_A_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")
"""Common beginning of two different tags: the `<t` of `<think>` and `<tool_call>`."""


@dataclass
class TurnText:
    """A conversation's text up to one turn, and the characters [start, end) that are supervised.

    If the turn `is_closed`, end is just after the special token that closes it.
    """

    text: str
    start: int
    end: int
    is_closed: bool
    begins_as_prompted: bool = True
    """True if the text before `start` is the prompt of inference."""


class TurnFinder:
    """Finds the assistant's turns in the rendered text of one conversation.

    ends: special tokens that may close a turn.
    """

    def __init__(
        self,
        template: RecordTemplate,
        messages: list[Message],
        tools: list[dict] | None,
        ends: tuple[str, ...],
    ):
        self.template, self.messages, self.tools, self.ends = template, messages, tools, ends
        self.whole = template.finished(messages, tools)

    def turn(self, k: int) -> TurnText:
        """Return the conversation up to turn k, as it is when the model has just written that turn.

        Raises RecordError if the template refuses it.
        """
        is_last = k == len(self.messages) - 1
        try:
            full = self.whole
            if not is_last:
                full = self.template.finished(self.messages[: k + 1], self.tools)
        except RecordError:  # some templates require a user turn, which may come later
            return self._inside(k)
        closing = self.template.closing_of(full, self.messages[:k], self.tools)
        full, start, as_prompted = self._start(k, full)
        bare = full.removesuffix(closing.text)
        # an eos that closes a conversation is not part of the turn, unless nothing else ends it
        for text in (bare, full) if closing.may_end else (bare,):
            stripped = text.rstrip()
            if stripped.endswith(self.ends) and len(stripped) >= start:
                shown = full if is_last else text
                return TurnText(shown, start, len(stripped), True, as_prompted)
        return TurnText(full if is_last else bare, start, len(bare), False, as_prompted)

    def _start(self, k: int, full: str) -> tuple[str, int, bool]:
        """Return the text, the start of the answer in it, and whether it starts as prompted.

        Some prompts contain text that the finished turn lacks (for example an opened `<think>`).
        The answer then starts where prompt and finished text first differ after all earlier turns.
        """
        if all(message["role"] == "system" for message in self.messages[:k]):
            return full, *self._start_of_first(k, full)
        try:
            prompt = self.template.prompt(self.messages[:k], self.tools)
        except RecordError:
            return full, self._start_of_plain_answers(k, full), False
        if full.startswith(prompt):
            return full, len(prompt), True
        last, behind = self._last_said(k, prompt)
        start = common_start(prompt, full)
        if start >= behind > 0:
            return full, self._start_after(behind, start, prompt, full), False
        # earlier turns are rendered differently now that this turn exists (for example without
        # their reasoning): use the prompt, which is what the model saw
        if behind and full.count(prompt[last:]) == 1:
            return prompt + full.partition(prompt[last:])[2], len(prompt), True
        return full, self._start_of_plain_answers(k, full), False

    def _start_after(self, behind: int, start: int, prompt: str, full: str) -> int:
        """Return where an answer starts whose prompt parts from the finished text.

        behind, start: where the previous turn's text ends, and where the two texts part.
        """
        header = self.template.generation_prompt
        place = full.find(header, behind, start + len(header))
        if header and place >= 0:  # the prompt has more text before the header
            return place + len(header)
        rest = full[start:].lstrip()
        header = prompt[start:].lstrip()
        if header and rest.startswith(header):  # white space before it differs (Hermes)
            return len(full) - len(rest) + len(header)
        half = HALF_A_TAG.search(full, behind, start)
        return half.start() if half else start

    def _start_of_first(self, k: int, full: str) -> tuple[int, bool]:
        """Return where an answer that nobody asked for starts, and whether it does as prompted.

        A prompt without a question may lack what the conversation has before the answer: a header,
        a system text, or tools.
        """
        plain, other = (self._with_answer(k, answer, self.messages[:k]) for answer in "1A")
        start = self._start_by_plain(full, plain, other)
        if start is None:
            self._refuse(k)
        try:
            prompt = self.template.prompt(self.messages[:k], self.tools)
        except RecordError:  # for example because no turn precedes it
            return start, False
        header = self.template.generation_prompt
        return start, full.startswith(prompt) and full[len(prompt) : start] in ("", header)

    def _start_by_plain(self, text: str, plain: str, other: str) -> int | None:
        """Return where a turn starts in a text; None if it cannot be told.

        plain, other: texts that have other plain answers in its place.
        """
        if plain == other:
            return None
        start = common_start(plain, other)
        opening, _ = frame_of(self.template)
        if plain[:start].endswith(opening):
            start -= len(opening)
        same = common_start(plain[:start], text)  # a turn with calls may have another header
        return same if same >= start - len(self.template.generation_prompt) else None

    def _last_said(self, k: int, prompt: str) -> tuple[int, int]:
        """Return where in the prompt of turn k the text of the previous turn begins and ends.

        If it cannot be found, both are the end of all earlier turns, or 0 if that is unknown too.
        """
        content = self.messages[k - 1]["content"] if k else None
        if isinstance(content, list) and content:
            content = content[-1].get("text")
        content = content.strip() if isinstance(content, str) else ""
        # the generation prompt may contain the same text
        place = prompt.removesuffix(self.template.generation_prompt).rfind(content)
        if content and place >= 0:
            return place, place + len(content)
        try:
            before = self.template.render(self.messages[:k], self.tools)
        except RecordError:
            return 0, 0
        before = before.removesuffix(self.template.closing.text)
        return (len(before), len(before)) if prompt.startswith(before) else (0, 0)

    def _start_of_plain_answers(self, k: int, full: str) -> int:
        """Return where turn k starts, found by rendering two different answers in its place."""
        one, other = (self._with_answer(k, answer, self.messages[:k]) for answer in "1A")
        start = self._start_by_plain(full, one, other)
        if start is None or start < common_start(one, other) - len(frame_of(self.template)[0]):
            self._refuse(k)
        return start

    def _refuse(self, k: int) -> NoReturn:
        raise RecordError(
            f"the chat template ({self.template.name}) rewrites what comes before turn {k + 1} "
            "when it is written: it is not known where it begins.\n"
            "Use another template, as  data.template=chatml"
        )

    def _with_answer(
        self, k: int, answer: str, before: list[Message], after: tuple[Message, ...] = ()
    ) -> str:
        """Return the rendered text with a plain answer in place of turn k."""
        content = self.messages[k]["content"]
        plain = answer if not isinstance(content, list) else [{"type": "text", "text": answer}]
        turn = {"role": "assistant", "content": plain}
        return self.template.finished([*before, turn, *after], self.tools)

    def _inside(self, k: int) -> TurnText:
        before, after = self.messages[:k], tuple(self.messages[k + 1 :])
        one, other = (self._with_answer(k, answer, before, after) for answer in "1A")
        start = self._start_by_plain(self.whole, one, other)
        following = common_start(one[::-1], other[::-1])
        end = len(self.whole) - following
        as_these = self.whole.endswith(one[len(one) - following :])
        if start is None or end < start or not as_these:
            raise RecordError(
                f"the chat template ({self.template.name}) cannot render turn {k + 1} "
                "as the end of a conversation, and it is not found within the whole"
            )
        rest = self.whole[end:]
        closers = [frame_of(self.template)[1], *self.ends]
        behind = next((text for text in closers if text and rest.lstrip().startswith(text)), None)
        if behind is None:
            return TurnText(self.whole, start, end, False, False)
        end += rest.index(behind) + len(behind)
        return TurnText(self.whole, start, end, behind.endswith(self.ends), False)


@lru_cache(16)
def frame_of(template: RecordTemplate) -> tuple[str, str]:
    """Return what a plain answer begins with, such as an empty <think>, and what it ends with."""
    try:
        messages = convert_turns([ASK, ANSWER], template.forms)
        turn = TurnFinder(template, messages, template.probed_tools, ()).turn(1)
    except RecordError:
        return "", ""
    before, _, after = turn.text[turn.start : turn.end].partition(ANSWER["content"])
    return before, after.strip()


def merged(turns: list[TurnText], whole: str) -> list[tuple[str, list[TurnText]]]:
    """Return the fewest texts that contain all turns, in order, each with its turns.

    A text that is a prefix of another one is redundant.
    """
    if all(whole.startswith(turn.text) for turn in turns):
        return [(whole, turns)]
    groups: list[tuple[str, list[TurnText]]] = []
    for turn in turns:
        inner = [group for group in groups if turn.text.startswith(group[0])]
        groups = [group for group in groups if not turn.text.startswith(group[0])]
        groups.append((turn.text, [one for _, held in inner for one in held] + [turn]))
    return groups
