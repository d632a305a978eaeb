"""The page of a report's rollouts, each as a conversation."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.report.page import html_of, write_page
from fsdp_trainer.apps.report.read import is_finite
from fsdp_trainer.apps.report.run_summary import Summary
from fsdp_trainer.rl.environments.tool_calls import FORMATS, WrongCall
from fsdp_trainer.rl.reasoning import split_reasoning

SPECIAL_AT_END = re.compile(r"(<[|｜][^<>]*[|｜]>|</s>|<eos>)\s*$")
"""A stop token at the end of a turn."""


@dataclass(frozen=True)
class ShownTurn:
    """A turn on the page. calls: tool calls in it, as text; reward: its own, None without one."""

    is_own: bool
    text: str
    calls: list[str]
    reward: float | None


@dataclass(frozen=True)
class ShownRollout:
    """A rollout on the page. label: the run's name; wrong_calls: None for an answer of one turn.

    prompt: the texts of its turns.
    """

    label: str
    step: int
    reward: float
    prompt: list[str]
    turns: list[ShownTurn]
    wrong_calls: float | None


def write_rollouts(summaries: list[Summary], report: Path) -> Path | None:
    """Write the page beside the report's; None if no run has rollouts. Raises UserError."""
    rollouts = [each for summary in summaries for each in rollouts_of(summary)]
    if not rollouts:
        return None
    file = report.with_name(f"{report.stem}-rollouts.html")
    html = html_of(
        "rollouts.html.jinja",
        ("page.css",),
        ("rollouts.js",),
        rollouts=rollouts,
        many=len(summaries) > 1,
        report=report.name,
    )
    write_page(html, file)
    return file


def rollouts_of(summary: Summary) -> list[ShownRollout]:
    """Return the recorded rollouts of a run that have a reward, the newest first."""
    return [
        ShownRollout(
            summary.run.label,
            int(number(one.get("step")) or 0),
            reward,
            prompt_of(one),
            turns_of(one),
            number(one.get("wrong_calls")),
        )
        for one in reversed(summary.run.samples)
        if (reward := number(one.get("reward"))) is not None
    ]


def number(value: Any) -> float | None:
    return value if is_finite(value) else None


def prompt_of(sample: dict[str, Any]) -> list[str]:
    """Return the turns of a rollout's prompt; runs of older versions recorded one text."""
    turns = sample.get("prompt_turns")
    return [*map(str, turns if isinstance(turns, list) else [sample.get("prompt") or ""])]


def turns_of(sample: dict[str, Any]) -> list[ShownTurn]:
    """Return the turns of a recorded rollout; an answer of one turn is the model's."""
    turns = sample.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        turns = [{"own": True, "text": sample.get("text")}]
    return [
        ShownTurn(
            bool(turn.get("own")),
            (text := str(turn.get("text") or "")),
            calls_in(text) if turn.get("own") else [],
            number(turn.get("reward")),
        )
        for turn in turns
    ]


def calls_in(text: str) -> list[str]:
    """Return the tool calls in a turn, in whatever known format; empty if none can be read."""
    text = SPECIAL_AT_END.sub("", text)
    for form in FORMATS.values():
        try:
            _, calls = form.parse(split_reasoning(text, form.call)[1])
        except WrongCall:
            continue
        if calls:
            return [f"{name}({arguments})" for name, arguments in calls]
    return []
