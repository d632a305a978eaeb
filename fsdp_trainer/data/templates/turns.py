"""The assistant's turns in a rendered conversation: the text that the model writes.

A turn's text is the difference between the finished text and the prompt of inference. No markers
are searched for, so this works for any template.
"""

import re
from dataclasses import dataclass

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.chat_template import RecordTemplate

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
        full, start, as_prompted = self._start(k, full)
        # the text that closes a conversation is not part of the turn, unless nothing else ends it
        for text in (full.removesuffix(self.template.closing), full):
            stripped = text.rstrip()
            if stripped.endswith(self.ends) and len(stripped) >= start:
                shown = full if is_last else text
                return TurnText(shown, start, len(stripped), True, as_prompted)
        return TurnText(full, start, len(full), False, as_prompted)

    def _start(self, k: int, full: str) -> tuple[str, int, bool]:
        """Return the text, the start of the answer in it, and whether it starts as prompted.

        Some prompts contain text that the finished turn lacks (for example an opened `<think>`).
        The answer then starts where prompt and finished text first differ after all earlier turns.
        """
        try:
            prompt = self.template.prompt(self.messages[:k], self.tools)
        except RecordError:  # for example because no turn precedes it
            return full, self._start_of_plain_answers(k, full), False
        if full.startswith(prompt):
            return full, len(prompt) + self._header_beyond(k, prompt, full), True
        last, behind = self._last_said(k, prompt)
        start = common_start(prompt, full)
        if start >= behind > 0:
            rest = full[start:].lstrip()
            header = prompt[start:].lstrip()
            if header and rest.startswith(header):  # white space before it differs (Hermes)
                return full, len(full) - len(rest) + len(header), False
            half = HALF_A_TAG.search(full, behind, start)
            return full, half.start() if half else start, False
        # earlier turns are rendered differently now that this turn exists (for example without
        # their reasoning): use the prompt, which is what the model saw
        if behind and full.count(prompt[last:]) == 1:
            return prompt + full.partition(prompt[last:])[2], len(prompt), True
        return full, self._start_of_plain_answers(k, full), False

    def _header_beyond(self, k: int, prompt: str, full: str) -> int:
        """Return the length of a header before the first turn that the prompt lacks, else 0.

        Some templates (OLMo's) write the header after the previous turn, and the first has none
        before it.
        """
        header = self.template.generation_prompt
        if k or prompt.endswith(header) or not full.startswith(header, len(prompt)):
            return 0
        return len(header)

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
        before = before.removesuffix(self.template.closing)
        return (len(before), len(before)) if prompt.startswith(before) else (0, 0)

    def _start_of_plain_answers(self, k: int, full: str) -> int:
        """Return where turn k starts, found by rendering two different answers in its place."""
        one, other = (self._with_answer(k, answer, self.messages[:k]) for answer in "1A")
        start = common_start(one, other)
        if one == other or not full.startswith(one[:start]):
            raise RecordError(
                f"the chat template ({self.template.name}) rewrites what comes before turn {k + 1} "
                "when it is written: it is not known where it begins.\n"
                "Use another template, as  data.template=chatml"
            )
        return start

    def _with_answer(
        self, k: int, answer: str, before: list[Message], after: tuple[Message, ...] = ()
    ) -> str:
        """Return the rendered text with a plain answer in place of turn k."""
        content = self.messages[k]["content"]
        plain = answer if not isinstance(content, list) else [{"type": "text", "text": answer}]
        turn = {"role": "assistant", "content": plain}
        return self.template.finished([*before, turn, *after], self.tools)

    def _inside(self, k: int) -> TurnText:
        """Return turn k within the complete conversation, found by rendering other answers."""
        before, after = self.messages[:k], tuple(self.messages[k + 1 :])
        one, other = (self._with_answer(k, answer, before, after) for answer in "1A")
        start = common_start(one, other)
        following = common_start(one[::-1], other[::-1])
        end = len(self.whole) - following
        as_these = self.whole.startswith(one[:start]) and self.whole.endswith(other[-following:])
        if one == other or not as_these or end < start:
            raise RecordError(
                f"the chat template ({self.template.name}) cannot render turn {k + 1} "
                "as the end of a conversation, and it is not found within the whole"
            )
        rest = self.whole[end:]
        behind = next((token for token in self.ends if rest.lstrip().startswith(token)), None)
        if behind is None:
            return TurnText(self.whole, start, end, False, False)
        end += rest.index(behind) + len(behind)
        return TurnText(self.whole, start, end, True, False)


def common_start(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
