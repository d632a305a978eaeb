"""The reasoning of an answer, which is no part of what it says to others. Imports no torch."""

import re
from functools import lru_cache

THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "◁think▷": "◁/think▷",
}
"""Marks around the reasoning of models; the first is often the end of the prompt."""


CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")


def split_reasoning(
    text: str, call: tuple[str, str] | None = None, prompt: str = ""
) -> tuple[str, str]:
    """Return an answer's reasoning with the spaces behind it, and the rest.

    call: begin and end of a call, in whose arguments the marks are no reasoning. prompt: the end of
    what the model read, which may begin the reasoning. One without an end is the whole answer.
    """
    prefix = begun_by(prompt)
    text = prefix + text
    if not any(mark in text for pair in THOUGHTS.items() for mark in pair):
        return "", text
    thoughts: list[str] = []
    rest: list[str] = []
    place = 0
    for match in finder(call).finditer(text):
        if match.lastgroup == "call" or (match.lastgroup == "end" and thoughts):
            continue
        if match.lastgroup == "end":  # a prompt began it
            thoughts, rest = [text[: match.end()]], []
        else:
            rest.append(text[place : match.start()])
            thoughts.append(match[0])
        place = match.end()
    rest.append(text[place:])
    answer = "".join(rest)
    spaces = answer[: len(answer) - len(answer.lstrip())] if thoughts else ""
    return "".join(thoughts).removeprefix(prefix) + spaces, answer.removeprefix(spaces)


def said_in(text: str, prompt: str = "") -> str:
    """Return what an answer says after its reasoning; of GPT-OSS's channels that in `final`.

    text: with special tokens. prompt: see split_reasoning.
    """
    rest = split_reasoning(text, prompt=prompt)[1]
    channels = CHANNEL.split(rest)
    if len(channels) == 1:
        return rest
    return channels[-1] if channels[-2] == "final" else ""


def begun_by(prompt: str) -> str:
    end = prompt.rstrip()
    return next((begin for begin in THOUGHTS if end.endswith(begin)), "")


@lru_cache
def finder(call: tuple[str, str] | None) -> re.Pattern[str]:
    thoughts = [rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in THOUGHTS.items()]
    ends = map(re.escape, THOUGHTS.values())
    parts = [f"(?P<thought>{'|'.join(thoughts)})", f"(?P<end>{'|'.join(ends)})"]
    if call:
        begin, end = map(re.escape, call)
        parts.insert(0, f"(?P<call>{begin}(?:(?!{begin}).)*?{end})")
    return re.compile("|".join(parts), re.DOTALL)
