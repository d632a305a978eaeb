"""The verb `rewards`: scores answers without training."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.base.text_files import text_lines
from fsdp_trainer.config.verbs import RewardsConfig
from fsdp_trainer.data.files.sources import Problems, find_sources
from fsdp_trainer.data.prepared_data import build_tokenizer, cache_root
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.tokens.questions import DataQuestion, read_questions
from fsdp_trainer.errors import UserError
from fsdp_trainer.observe.console import Console
from fsdp_trainer.rl.rewards.model import ModelReward
from fsdp_trainer.rl.rewards.reward import Attempt, Reward, score, totals
from fsdp_trainer.rl.rewards.table import make_rewards

SHOWN_ANSWER = 60
"""Maximum number of characters of an answer in a table."""
ANSWER_KEYS = ("text", "answer", "completion", "response", "output")
"""Keys that may hold the answer in a line of a JSON file; `generate` writes the first one."""


@dataclass(frozen=True)
class Scored:
    """An attempt with the FILE:LINE of its row, one score per reward, and their weighted sum."""

    where: str
    attempt: Attempt
    scores: list[float]
    total: float


def rewards(cfg: RewardsConfig) -> int:
    """Print the scores of answers, by default of those in the data; return the exit code."""
    console = Console(quiet=False, stream=sys.stderr if cfg.format == "json" else None)
    chosen = with_models(make_rewards(cfg.objective.rewards), cfg)
    problems = Problems(cfg.data.on_error)
    questions = dict(islice(questions_of(cfg, chosen, problems, console), cfg.limit))
    if not questions:
        reason = "there is no prompt in it"
        raise UserError("nothing can be scored", f"data.path={cfg.data.path}", reason)
    pairs = answered(questions, cfg.answers)
    attempts = with_lengths(cfg, chosen, [attempt for _, attempt in pairs])
    scores = score(chosen, attempts)
    sums = totals(chosen, scores)
    rows = zip(
        (where for where, _ in pairs), attempts, zip(*scores, strict=True), sums, strict=True
    )
    scored = [Scored(where, attempt, list(own), total) for where, attempt, own, total in rows]
    if problems.count:
        console.say(f"skipped  {counted(problems.count, 'row')} that cannot be used")
    if cfg.format == "json":
        print(visible(json.dumps(as_json(chosen, scored), ensure_ascii=False)))
        return 0
    console.say("\n".join(table(cfg, chosen, scored)))
    return 0


def with_models(chosen: list[Reward], cfg: RewardsConfig) -> list[Reward]:
    if not any(isinstance(reward, ModelReward) for reward in chosen):
        return chosen
    # imported here because torch is slow to import and only reward models need it
    import torch

    from fsdp_trainer.apps.generate import device_of
    from fsdp_trainer.rl.rounds.reward_scores import open_models

    return open_models(chosen, torch.device(device_of(cfg.launch.device)))


def questions_of(
    cfg: RewardsConfig, chosen: list[Reward], problems: Problems, console: Console
) -> Iterator[tuple[int, DataQuestion]]:
    """Yield the rows of data.path for which the rewards can score answers, and their numbers."""

    def check(question: DataQuestion) -> str | None:
        reasons = (reward.record_problem(question.columns, question.reference) for reward in chosen)
        return next((reason for reason in reasons if reason), None)

    reporter = Reporter(console.paced(), console.say)
    cache = cache_root(cfg.data, cfg.run)
    sources = find_sources(cfg.data.path, "data.path", cache, reporter.say, reporter.progress)
    return read_questions(cfg.data, sources, problems, check)


def answered(questions: dict[int, DataQuestion], answers: str | None) -> list[tuple[str, Attempt]]:
    """Return for each answer the FILE:LINE of its row and the attempt.

    questions: by the number of the row. answers: a file of answers; None: use the references of
    the rows. Raises UserError if no answer in the file belongs to a row, or one to several.
    """
    if answers is None:
        own = [question for question in questions.values() if question.reference is not None]
        return [_attempt(question, str(question.reference)) for question in own]
    lines = read_answers(Path(answers).expanduser())
    by_prompt: dict[str, list[DataQuestion]] = {}
    for question in questions.values():
        by_prompt.setdefault(question.prompt.strip(), []).append(question)
    pairs = []
    for number, (prompt, answer) in enumerate(lines):
        if prompt is not None:
            same = by_prompt.get(prompt.strip(), [])
            require_one_reference(same, answers)
        else:
            same = [questions[number]] if number in questions else []
        if same:
            pairs.append(_attempt(same[-1], answer))
    if not pairs:
        reason = (
            f"has {counted(len(lines), 'answer')}, and none is to a prompt of data.path.\n"
            "A line is an answer to the row of the same number, or an object with `prompt`, the"
            " row's last user turn, and `text`, as  generate format=json  writes it"
        )
        raise UserError("nothing can be scored", f"answers={answers}", reason)
    return pairs


def require_one_reference(questions: list[DataQuestion], answers: str) -> None:
    """Raise UserError if rows with the same prompt have different references."""
    if len({question.reference for question in questions}) < 2:
        return
    places = " and ".join(f"{file}:{line}" for file, line in (q.where for q in questions[:2]))
    reason = (
        f"has an answer to the prompt of {places}, whose references differ.\n"
        "Write the answers without `prompt`, in the order of the rows"
    )
    raise UserError("it is not known which row is answered", f"answers={answers}", reason)


def read_answers(path: Path) -> list[tuple[str | None, str]]:
    """Return (prompt, answer) for each line of a file.

    A prompt of None means that the answer belongs to the row with the same number. Raises UserError
    for a file that is not text, and for a line without an answer.
    """
    try:
        lines = text_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("nothing can be scored", f"answers={path}", str(error)) from None
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        return [(None, line) for line in lines]
    return [_read_line(path, n, line) for n, line in enumerate(lines, start=1) if line.strip()]


def _read_line(path: Path, number: int, line: str) -> tuple[str | None, str]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, str):
        return None, value
    if isinstance(value, dict):
        name = next((name for name in ANSWER_KEYS if isinstance(value.get(name), str)), None)
        prompt = value.get("prompt")
        if name:
            return prompt if isinstance(prompt, str) else None, value[name]
    reason = f"is no JSON object with an answer under one of: {' '.join(ANSWER_KEYS)}"
    raise UserError("nothing can be scored", f"{path}:{number}", reason)


def with_lengths(
    cfg: RewardsConfig, chosen: list[Reward], attempts: list[Attempt]
) -> list[Attempt]:
    counts = any(getattr(reward, "unit", None) == "tokens" for reward in chosen)
    if not counts or not (cfg.tokenizer.path or cfg.model.init_from):
        return attempts
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.model.init_from)
    return [replace(one, tokens=len(tokenizer.encode(one.answer))) for one in attempts]


def _attempt(question: DataQuestion, answer: str) -> tuple[str, Attempt]:
    where = f"{question.where[0]}:{question.where[1]}"
    attempt = Attempt(question.prompt, answer, question.columns, question.reference)
    return where, replace(attempt, messages=question.messages, tools=question.tools)


def as_json(chosen: list[Reward], scored: list[Scored]) -> dict[str, Any]:
    columns = {reward.title: [one.scores[i] for one in scored] for i, reward in enumerate(chosen)}
    return {
        "answers": len(scored),
        "reward": figures([one.total for one in scored]),
        "rewards": {
            reward.title: {"weight": reward.weight, **figures(columns[reward.title])}
            for reward in chosen
        },
        "scores": [
            {
                "row": one.where,
                "answer": one.attempt.answer,
                "reward": one.total,
                "rewards": dict(zip(columns, one.scores, strict=True)),
            }
            for one in scored
        ],
    }


def figures(scores: list[float]) -> dict[str, float]:
    top = max(scores)
    return {
        "mean": sum(scores) / len(scores),
        "lowest": min(scores),
        "highest": top,
        "share_of_highest": sum(one == top for one in scores) / len(scores),
    }


def table(cfg: RewardsConfig, chosen: list[Reward], scored: list[Scored]) -> list[str]:
    """Return the printed lines: statistics of each reward, then the lowest-scoring answers."""
    width = max(len("reward"), *(len(reward.title) for reward in chosen))
    lines = [f"{'reward':{width}}  weight    mean  lowest  highest"]
    for i, reward in enumerate(chosen):
        own = figures([one.scores[i] for one in scored])
        lines.append(_line(reward.title, width, f"{reward.weight:g}", own))
    totals_of_all = figures([one.total for one in scored])
    lines.append(_line("sum", width, "", totals_of_all))
    what = "answers of the data itself" if cfg.answers is None else f"answers of {cfg.answers}"
    lines.append(f"\n{len(scored):,} {what}")
    worst = [one for one in scored if one.total < totals_of_all["highest"]]
    worst.sort(key=lambda one: one.total)
    if worst:
        lines.append(f"{len(worst):,} score less than the highest; the lowest:")
    for one in worst[: cfg.show]:
        text = " ".join(one.attempt.answer.split())
        shown = text if len(text) <= SHOWN_ANSWER else f"…{text[1 - SHOWN_ANSWER :]}"
        lines.append(f"  {one.total:7.3f}  {one.where}  {shown}")
    return lines


def _line(title: str, width: int, weight: str, own: dict[str, float]) -> str:
    numbers = f"{own['mean']:8.3f}{own['lowest']:8.3f}{own['highest']:9.3f}"
    return f"{title:{width}}  {weight:>6}{numbers}"
