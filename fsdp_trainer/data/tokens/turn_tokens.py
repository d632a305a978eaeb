"""Conversations as tokens that only grow: an answer's own tokens are never made again from text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

ANSWER, OTHERS = "\u2060ANSWER\u2060", "\u2060TURN%d\u2060"
"""Texts that stand for an answer and for other turns: they hold a character that joins words."""
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class TurnTokens:
    template: Template
    tokenizer: TextTokenizer

    def prompt(self, messages: list[Message], tools: Tools) -> list[int]:
        """Return the tokens up to where the model answers. Raises RecordError."""
        marked, contents = self._marked(messages)
        template = self.template.for_record(tools)
        return self._encode(template.prompt(self._adapted(marked, tools), tools), contents)

    def following(self, messages: list[Message], new: list[Message], tools: Tools) -> list[int]:
        """Return the tokens between an answer and the next one: new turns, and their surroundings.

        messages: the turns up to the answer, which ended with a stop token. Raises RecordError if
        the template cannot show the new turns.
        """
        *before, answer = [turn for turn in messages if turn["role"] != "system"]
        marked, contents = self._marked(new)
        for stand_in in stand_ins(answer):
            try:
                adapted = self._adapted([*before, stand_in, *marked], tools)
                text = self.template.for_record(tools).prompt(adapted, tools)
            except RecordError:
                continue
            if text.count(ANSWER) == 1:
                return self._encode(self._after_stop(text.partition(ANSWER)[2]), contents)
        raise RecordError(
            f"the chat template ({self.template.name}) cannot show turns of "
            f"{' and '.join(dict.fromkeys(turn['role'] for turn in new))} after an answer"
        )

    def _after_stop(self, text: str) -> str:
        places = [(text.find(each), len(each)) for each in self.stop_texts]
        first = min((place for place in places if place[0] >= 0), default=None)
        return text if first is None else text[sum(first) :]

    @cached_property
    def stop_texts(self) -> list[str]:
        ids = self.tokenizer.stop_ids
        return [text for id in ids if (text := self.tokenizer.decode([id], skip_special=False))]

    @cached_property
    def special_texts(self) -> list[str]:
        return [*self.tokenizer.special_tokens]

    def _adapted(self, messages: list[Message], tools: Tools) -> list[Message]:
        return self.template.adapt(messages, tools)

    def _marked(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        marked: list[Message] = []
        contents: list[str] = []
        for turn in messages:
            content = turn.get("content")
            if isinstance(content, str) and any(each in content for each in self.special_texts):
                turn = {**turn, "content": OTHERS % len(contents)}
                contents.append(content)
            marked.append(turn)
        return marked, contents

    def _encode(self, text: str, contents: list[str]) -> list[int]:
        """Return the tokens of a text; special tokens in replaced contents are plain text."""
        tokens: list[int] = []
        for i, content in enumerate(contents):
            before, _, text = text.partition(OTHERS % i)
            tokens += self.tokenizer.encode(before)
            tokens += self.tokenizer.encode_as_text(content)
        return tokens + self.tokenizer.encode(text)


def stand_ins(answer: Message) -> list[Message]:
    """Return turns to render in place of an answer, in each of which ANSWER stands once.

    Some templates show no content beside calls, and some no results without a call.
    """
    plain = {"role": "assistant", "content": ANSWER}
    calls = answer.get("tool_calls")
    if not calls:
        return [plain]
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"value": ANSWER}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}
    return [calling, plain]
