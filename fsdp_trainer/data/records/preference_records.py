"""Reads and checks preferences: pairs of a better and a worse answer, or labelled answers."""

import re
from dataclasses import dataclass
from itertools import takewhile

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.flags import VERDICTS, flag_of
from fsdp_trainer.data.records.messages import Message, turns_or_text
from fsdp_trainer.data.records.record_values import Values

TURN = re.compile(r"\n\n(Human|Assistant): ?")
"""Start of a turn in Anthropic's hh-rlhf, which has one text per conversation."""
SIDES = ("chosen", "rejected")
"""The documents of a pair, in the order in which they are stored."""
SINGLE, PAIRS, UNPAIRED, PROMPTS = "single", "pairs", "unpaired", "prompts"
"""Kinds of training data: answers, pairs of answers, good and bad answers, and prompts that the
model answers itself."""


@dataclass
class Preference:
    """A prompt and two answers to it, each of one or more turns that end with the assistant's."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict] | None
    where: tuple[str, int]


@dataclass
class LabelledAnswer:
    """A prompt and an answer to it, of one or more turns, that is labelled good or bad."""

    prompt: list[Message]
    answer: list[Message]
    is_good: bool
    tools: list[dict] | None
    where: tuple[str, int]


def read_labelled(values: Values) -> LabelledAnswer:
    """Return the answer of a row and its label. Raises RecordError if either is missing.

    If there is no completion, the prompt's last turn is the answer.
    """
    name = values.name("label")
    label = flag_of(values["label"], repr(name), VERDICTS)
    if label is None:
        raise RecordError(f"{name!r} is null")
    prompt = turns_or_text(values["prompt"], "user", values.name("prompt"))
    if values["completion"] is None:
        name, answer = values.name("prompt"), prompt[-1:]
        prompt = prompt[:-1]
        _require_answer(name, answer)
        if not prompt:
            raise RecordError(f"{name} is an answer without a prompt")
    else:
        name = values.name("completion")
        answer = turns_or_text(values["completion"], "assistant", name)
        _require_answer(name, answer)
    if not (answer[-1]["content"].strip() or answer[-1].get("tool_calls")):
        raise RecordError(f"{name} is empty")
    if values["input"]:
        prompt[-1]["content"] += f"\n{values['input']}"
    tools = values.tools()
    prompt = values.with_media(values.with_system(prompt))
    return LabelledAnswer(prompt, answer, label, tools, values.where)


def read_preference(values: Values) -> Preference:
    """Return the pair of a row.

    Raises RecordError if a side is missing, if both are equal or answer different prompts, or if
    one does not end with the assistant's turn.
    """
    chosen, rejected = (_side(values[name], values.name(name)) for name in SIDES)
    if chosen == rejected:
        raise RecordError("chosen and rejected are the same")
    turns = zip(chosen, rejected, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], turns))
    prompt = values["prompt"] or []
    if prompt:
        prompt = turns_or_text(prompt, "user", values.name("prompt"))
    if prompt in (chosen, rejected):  # UltraFeedback has the better chat once more, as messages
        prompt = []
    if prompt and values["input"]:
        prompt[-1]["content"] += f"\n{values['input']}"
    begins_with_prompt = chosen[0]["role"] != "assistant"
    _require_prompt(prompt, chosen[:common], begins_with_prompt)
    before = chosen[:common] if begins_with_prompt else prompt + chosen[:common]
    for name, side in (("chosen", chosen[common:]), ("rejected", rejected[common:])):
        _require_answer(name, side)
    return Preference(
        values.with_media(values.with_system(before)),
        chosen[common:],
        rejected[common:],
        values.tools(),
        values.where,
    )


def _require_prompt(prompt: list[Message], common: list[Message], in_sides: bool) -> None:
    """Raise RecordError unless both sides answer one prompt. common: turns that both begin with."""
    if prompt and in_sides and prompt[-1] not in common:
        raise RecordError("chosen and rejected do not both begin with the row's own prompt")
    if not prompt and not common:
        raise RecordError(
            "chosen and rejected share no prompt. Name its column:  'data.fields={prompt: …,"
            " chosen: …, rejected: …}'"
        )


def _require_answer(name: str, turns: list[Message]) -> None:
    """Raise RecordError unless the turns that only one side has are an answer."""
    if not turns:
        raise RecordError(f"{name} is the beginning of the other")
    if turns[-1]["role"] != "assistant":
        raise RecordError(f"{name} does not end with a turn of the assistant")
    if turns[0]["role"] == "user":
        raise RecordError(
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
        raise RecordError(f"{name} is empty")
    return turns
